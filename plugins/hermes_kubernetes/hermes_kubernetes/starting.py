"""Why a pod does not start: the reasons of Kubernetes as errors of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from hermes_core import HermesError, ImageError, ProvisionError
from hermes_kubernetes.cluster import MAX_MESSAGE, ClusterError
from hermes_kubernetes.config import KubernetesConfig
from hermes_kubernetes.namespaces import PODS, Namespace, Object
from hermes_kubernetes.pods import container_of, container_state, is_running

IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
"""Reasons for which a container waits that are about its image."""
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MAY_PASS = ("timeout", "timed out", "connection re", "too many requests", "429", "no such host", "unavailable", "EOF")
"""Words in the message of a pull that failed for a reason that may pass. All other pulls fail again."""

_IMAGE_HINT = (
    "check the image's name; a private registry needs image_pull_secrets; `--backend.image=NAME` names another"
)
_SHELL_HINT = "the image needs /bin/sh and sleep; `kubectl describe pod` says more"
_PLACE_HINT = "lower cpu, memory or gpus, check node_selector and tolerations, or let the cluster grow"
_SETUP_HINT = "level dedicated needs no setup container, nor does network: open; setup_image needs `sh` and `ip`"


def find_obstacle(pod: Mapping[str, Any]) -> HermesError | None:
    """Return the error for a pod that will not start; None if it runs, or may still start."""
    status = pod.get("status") or {}
    for name, state in _states(status):
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))[:MAX_MESSAGE]
        if reason in IMAGE_REASONS and not (reason == "ImagePullBackOff" and "rror" not in message):
            text = f"the image of container {name} can't be pulled: {reason}: {message}"
            if any(word in message for word in _MAY_PASS):
                return ProvisionError(text, hint=_IMAGE_HINT, retryable=True)
            return ImageError(text, hint=_IMAGE_HINT)
        if reason in _CONFIG_REASONS:
            text = f"container {name} can't be made: {reason}: {message}"
            return ProvisionError(text, hint="check the secrets and volumes of the profile", retryable=False)
        if ended and (name == container_of(pod) or ended.get("exitCode")):
            return _ended(name, ended)
    if status.get("phase") == "Failed":
        text = (
            f"the pod failed: {status.get('reason', 'no reason given')}: {str(status.get('message', ''))[:MAX_MESSAGE]}"
        )
        return ProvisionError(text, hint=_PLACE_HINT, retryable=True)
    return None


def _ended(name: str, ended: Mapping[str, Any]) -> ProvisionError:
    words = f"{ended.get('reason', '')} {ended.get('message') or ''}".strip()[:MAX_MESSAGE]
    text = f"container {name} ended with status {ended.get('exitCode')} before the sandbox was ready: {words}"
    return ProvisionError(text, hint=_SETUP_HINT if name == "hermes-setup" else _SHELL_HINT, retryable=False)


def _states(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for each in status.get(key) or []:
            yield str(each["name"]), each.get("state") or {}


async def wait_for_start(namespace: Namespace, name: str, config: KubernetesConfig) -> Object:
    """Return a pod as soon as its sandbox's container runs.

    Raises:
        ImageError: its image can't be had.
        ProvisionError: it can't start for another reason, or has not started in time.
    """
    pod: Object | None = None
    try:
        async with asyncio.timeout(config.start_timeout_s):
            while (pod := await namespace.look(PODS, name)) is not None:
                if is_running(pod):
                    return pod
                if (obstacle := find_obstacle(pod)) is not None:
                    raise obstacle
            raise ProvisionError("the pod was deleted while it started", retryable=True)
    except TimeoutError as error:
        raise not_started(pod, config) from error


def still_waits_for(pod: Mapping[str, Any] | None) -> str:
    """Return what a pod waits for that has not started in time."""
    if pod is None:
        return "it is not listed"
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") != "True":
            return f"no node takes it: {condition.get('reason')}: {str(condition.get('message'))[:MAX_MESSAGE]}"
    waiting = [
        f"container {name}: {state['waiting'].get('reason')}: {str(state['waiting'].get('message', ''))[:MAX_MESSAGE]}"
        for name, state in _states(status)
        if state.get("waiting")
    ]
    return (
        "; ".join(waiting) or f"its phase is {status.get('phase')}, its container {container_state(pod) or 'unknown'}"
    )


def not_started(pod: Mapping[str, Any] | None, config: KubernetesConfig) -> HermesError:
    """Return the error for a pod that has not started in time."""
    waits = still_waits_for(pod)
    if "ImagePullBackOff" in waits:
        return ImageError(f"the image {config.image!r} can't be pulled: {waits}", hint=_IMAGE_HINT)
    text = f"the pod has not started in {config.start_timeout_s:g} s: {waits}"
    return ProvisionError(text, hint=f"{_PLACE_HINT}; start_timeout_s is the limit", retryable=True)


def not_made(error: ClusterError, config: KubernetesConfig) -> ProvisionError:
    """Return the error for an object that the API server does not create."""
    message = f"profile {config.name!r}: a sandbox could not be made: {error.message}"
    if error.status == 403 and "exceeded quota" in error.message:
        hint = "lower max_sandboxes, cpu or memory, end other pods, or have the namespace's ResourceQuota raised"
        return ProvisionError(message, hint=hint, retryable=True)
    hints = {
        401: "log in again, as `kubectl get pods` does",
        403: "`hermes-rl doctor kubernetes` says which rights are missing, and how to grant them; a refusal by "
        "PodSecurity names what the namespace does not allow",
        404: "the namespace must exist; agent-sandbox must be installed for warm_pool",
        422: "change what the profile asks for; `pod` must fit what Kubernetes takes",
    }
    return ProvisionError(message, hint=hints.get(error.status or 0, error.hint), retryable=error.is_temporary)
