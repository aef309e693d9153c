"""Claims of agent-sandbox: a sandbox that is taken from a warm pool of the cluster instead of being started.

The pool's template decides what is in the pod. What we can't decide, we check before the sandbox is used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from hermes_core import HermesError, PolicyError, ProvisionError, Sandbox, SandboxSpec
from hermes_kubernetes import pods
from hermes_kubernetes.config import KubernetesConfig
from hermes_kubernetes.exec import run_to_end
from hermes_kubernetes.namespaces import CLAIMS, PODS, Namespace, Object

_NEVER_READY = frozenset({"InvalidMetadata", "TemplateNotFound", "WarmPoolNotFound", "VolumeClaimTemplatesError"})
"""Reasons for which a claim is not ready, and never will be."""
_TEMPLATE = "see the template in the guide of the kubernetes backend, and make such a SandboxTemplate"

_TAKE_OVER = """
level=$1 base=$2; shift 2
caught=; while read -r name value; do [ "$name" = SigCgt: ] && caught=$value; done </proc/1/status
[ "$((0x${caught#????????} >> 14 & 1))" = 1 ] ||
  { echo "its main process ignores TERM, so the sandbox could not end itself" >&2; exit 3; }
[ "$level" != user ] || [ "$(cat /proc/sys/kernel/shmmni /proc/sys/kernel/msgmni | tr -d '\\n')" = 00 ] ||
  { echo "its pods have System V IPC, which slots of level user would share" >&2; exit 3; }
mkdir -p "$base" || exit
(trap "" HUP; "$@"; kill -TERM 1) </dev/null >/dev/null 2>&1 &
"""
"""Starts the watchdog in a pod whose main process is another's. When the watchdog ends, it ends the main process. From
inside of a container, TERM is the only signal that can, and only if the main process has a handler for it."""


def claim_of(spec: SandboxSpec, config: KubernetesConfig, uid_base: int | None) -> dict[str, Any]:
    """Return the claim of a spec. Its time of shutdown is there for a driver that dies before the watchdog runs."""
    metadata = pods.metadata(spec, config, uid_base)
    metadata["annotations"][pods.ENVIRONMENT] = json.dumps(dict(spec.environment))
    end = datetime.now(UTC) + timedelta(seconds=config.max_lifetime)
    return {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxClaim",
        "metadata": metadata,
        "spec": {
            "warmPoolRef": {"name": config.warm_pool},
            "lifecycle": {
                "shutdownTime": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "shutdownPolicy": "DeleteForeground",
                "ttlSecondsAfterFinished": 0,
            },
        },
    }


async def wait_for_pod(namespace: Namespace, name: str, config: KubernetesConfig) -> tuple[Object, Object]:
    """Return a claim and its pod, as soon as the claim is ready.

    Raises:
        ProvisionError: it can't be ready, or is not in time.
        PolicyError: the pod starts again when it has ended.
    """
    claim: Object | None = None
    try:
        async with asyncio.timeout(config.start_timeout_s):
            while (claim := await namespace.look(CLAIMS, name)) is not None:
                ready = condition(claim, "Ready")
                if ready.get("status") == "True" and (pod := await read_pod(namespace, claim)) is not None:
                    return claim, _check(pod, config)
                if ready.get("reason") in _NEVER_READY:
                    raise _not_ready(claim, config, retryable=False)
            raise ProvisionError("the claim was deleted while it waited for a sandbox", retryable=True)
    except TimeoutError as error:
        raise _not_ready(claim, config, retryable=True) from error


async def read_pod(namespace: Namespace, claim: Object) -> Object | None:
    """Return the pod of a claim, which has the name of the sandbox that the claim got; None if there is none."""
    name = ((claim.get("status") or {}).get("sandbox") or {}).get("name")
    return None if not name else await namespace.read(PODS, name)


def condition(claim: Object, kind: str) -> Mapping[str, Any]:
    """Return a condition of a claim; empty if it has none of this kind."""
    conditions = (claim.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == kind), {})


def _check(pod: Object, config: KubernetesConfig) -> Object:
    if pod["spec"].get("restartPolicy") != "Never":
        raise PolicyError(
            f"pods of warm pool {config.warm_pool!r} start again when they have ended: restartPolicy is not Never",
            hint=_TEMPLATE,
        )
    return pod


def _not_ready(claim: Object | None, config: KubernetesConfig, *, retryable: bool) -> HermesError:
    ready = {} if claim is None else condition(claim, "Ready")
    why = f"{ready.get('reason', 'not listed')}: {ready.get('message', '')}"
    return ProvisionError(
        f"no sandbox of warm pool {config.warm_pool!r} is to be had: {why}",
        hint="`kubectl describe sandboxclaim,sandboxwarmpool` says more; raise the pool's replicas",
        retryable=retryable,
    )


async def take_over(sandbox: Sandbox, spec: SandboxSpec) -> None:
    """Check what the template decided, and start the watchdog.

    Raises:
        PolicyError: the sandbox could not keep a promise.
    """
    words = spec.isolation.label, sandbox.workspace_base, *spec.command(sandbox.state_dir)
    status, _, complaint = await run_to_end(sandbox, ["/bin/sh", "-c", _TAKE_OVER, "hermes-start", *words])
    if status:
        raise PolicyError(f"a sandbox of the warm pool can't be used (status {status}): {complaint}", hint=_TEMPLATE)
