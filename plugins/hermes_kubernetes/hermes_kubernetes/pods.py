"""The pod of a sandbox: what is sent to the API server, and what its answers say."""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hermes_core import (
    Isolation,
    Network,
    PolicyError,
    Sandbox,
    SandboxImage,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
)
from hermes_kubernetes.config import CONTAINER, DEFAULT_IMAGE, SYS_ADMIN, KubernetesConfig

OWNER, CREATION_ID, ISOLATION, UIDS, ENVIRONMENT = (
    f"hermes-rl/{name}" for name in ("owner", "creation-id", "isolation", "uid-base", "environment")
)
"""Names of annotations. The first, the second and the fourth are labels as well, for selectors."""

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of the guest: it gives each slot an unprivileged user, kills the slot's processes, and removes its
files."""
_NAMESPACE_CAPABILITIES = ("NET_ADMIN", "SYS_CHROOT")
"""Capabilities for namespaces besides SYS_ADMIN: to bring up the loopback interface, and to enter the root."""
_ROOT_CAPABILITIES = ("SETFCAP",)
"""Capabilities for user namespaces in which slots are root, besides those for namespaces."""

UID_BLOCK = 512
"""Number of user ids of one sandbox. No two sandboxes of a node share an id, because the kernel counts processes by
user id over all pods of the node."""
_NODE_UIDS = range(2_000_000_000 + (UID_BLOCK << 16), 2_147_000_000, UID_BLOCK)
"""First ids of blocks, above those of `local` on the same host."""
POD_UIDS = 20_480
"""The first id where the pod has a user namespace of its own, with 65,536 ids."""

_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

CUT_NETWORK = """
for each in /sys/class/net/*; do
  name=${each##*/}
  [ "$name" = lo ] && continue
  { ip link set dev "$name" down || ifconfig "$name" down || python3 -c 'import fcntl,socket,struct,sys
fcntl.ioctl(socket.socket(),0x8914,struct.pack("16sh",sys.argv[1].encode(),0)+bytes(14))' "$name"; } 2>/dev/null
done
for each in /sys/class/net/*; do
  [ "${each##*/}" = lo ] || [ "$(($(cat "$each/flags") & 1))" = 0 ] || { echo "${each##*/} is still up" >&2; exit 1; }
done
"""
"""Takes down every network interface of the pod but its loopback, and proves it. Needs NET_ADMIN, without which nothing
can bring one up again, and one of `ip`, `ifconfig` and `python3`."""

_NO_SYSV_IPC = """
cd /proc/sys
for each in kernel/shmmni kernel/msgmni kernel/sem fs/mqueue/queues_max; do
  [ -e "$each" ] || continue
  case $each in */sem) none="0 0 0 0";; *) none=0;; esac
  echo "$none" >"$each" && [ "$(tr -s '[:space:]' ' ' <"$each" | sed 's/ $//')" = "$none" ] ||
    { echo "/proc/sys/$each can't be set to $none" >&2; exit 1; }
done
"""
"""Sets the limits of kernel objects to 0 that all users of the pod share, so that slots can't make any."""

_START = 'mkdir -p "$1"; chmod 1777 /dev/shm; shift; exec "$@"'
"""Runs before the watchdog. A volume at /dev/shm has another mode."""


def name_of(creation_id: str) -> str:
    """Return the object's name for a creation id. As a namespace has each name once, creation ids are unique."""
    return f"hermes-rl-{hashlib.sha256(creation_id.encode()).hexdigest()[:20]}"


def label_of(text: str) -> str:
    """Return the text as a label's value: itself if it is valid, otherwise a hash of it."""
    return text if _LABEL.fullmatch(text) else f"sha256-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def choose_uids(config: KubernetesConfig) -> int | None:
    """Return the first of the sandbox's user ids; None if only root's guest could use any."""
    if config.user:
        return None
    return random.choice(_NODE_UIDS) if config.host_users else POD_UIDS


def check_spec(spec: SandboxSpec, config: KubernetesConfig) -> None:
    """Refuse a level that the profile's settings rule out, and images of items where the pool decides on the image.

    Raises:
        PolicyError: the message names the setting.
    """
    if config.warm_pool is not None:
        if config.image != DEFAULT_IMAGE:
            raise PolicyError(
                f"image {config.image!r} is asked for; warm pool {config.warm_pool!r} has the image of its template",
                hint="leave warm_pool out for items with images of their own",
            )
        return
    namespaces = spec.isolation in (Isolation.NAMESPACE, Isolation.PRIVATE_ROOT)
    if (namespaces or spec.isolation is Isolation.USER) and config.user:
        raise PolicyError(
            f"profile {config.name!r} sets user {config.user}: only root can keep slots apart",
            hint="leave user out (every slot has one of its own), or take level dedicated",
        )
    if namespaces and SYS_ADMIN not in config.cap_add:
        raise PolicyError(
            f"profile {config.name!r}: slots of level {spec.isolation.label!r} need SYS_ADMIN in the container",
            hint="set cap_add: [SYS_ADMIN], best with host_users: false, or take level user or dedicated",
        )


def metadata(spec: SandboxSpec, config: KubernetesConfig, uid_base: int | None) -> dict[str, Any]:
    """Return the metadata of the object that stands for the sandbox."""
    texts = {OWNER: spec.owner, CREATION_ID: spec.creation_id, UIDS: "" if uid_base is None else str(uid_base)}
    labels = {f"hermes-rl/{label_of(key)}": label_of(value) for key, value in spec.labels.items()}
    labels |= {"app.kubernetes.io/managed-by": "hermes-rl"} | {key: label_of(text) for key, text in texts.items()}
    return {
        "name": name_of(spec.creation_id),
        "labels": {**config.labels, **labels},
        "annotations": {**config.annotations, **texts, ISOLATION: spec.isolation.label},
    }


def pod_of(spec: SandboxSpec, config: KubernetesConfig, uid_base: int | None) -> dict[str, Any]:
    """Return the pod of a spec."""
    volumes = [{"name": "data", "emptyDir": _size(config.disk)}]
    mounts = [{"name": "data", "mountPath": Sandbox.workspace_base}]
    if config.shm_size is not None:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **_size(config.shm_size)}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container = {
        "name": CONTAINER,
        "image": config.image,
        "command": [literal(word) for word in _main_process(spec)],
        "env": [{"name": name, "value": literal(value)} for name, value in spec.environment.items()],
        "envFrom": [{"secretRef": {"name": name}} for name in config.secrets],
        "resources": {
            "limits": _resources(config.cpu, config.memory, config),
            "requests": _resources(config.cpu_request or config.cpu, config.memory_request or config.memory, config),
        },
        "securityContext": _security(spec, config),
        "volumeMounts": mounts,
    }
    pod_spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": config.max_lifetime,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostUsers": None if config.host_users else False,
        "serviceAccountName": config.service_account,
        "runtimeClassName": config.runtime_class,
        "nodeSelector": config.node_selector,
        "tolerations": list(config.tolerations),
        "imagePullSecrets": [{"name": name} for name in config.image_pull_secrets],
        "initContainers": _setup(spec, config),
        "containers": [container],
        "volumes": volumes,
    }
    ours = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(spec, config, uid_base),
        "spec": {key: value for key, value in pod_spec.items() if value not in (None, [], {})},
    }
    merged: dict[str, Any] = merge(config.pod, ours)
    return merged


def merge(theirs: Any, ours: Any) -> Any:
    """Return both parts of a pod in one. Where both have a value that is no mapping or list, ours counts."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        both = {key: merge(theirs[key], ours[key]) for key in ours.keys() & theirs.keys()}
        return {**ours, **theirs, **both}
    if isinstance(theirs, Sequence) and isinstance(ours, Sequence) and not isinstance(ours, str):
        named = {each["name"]: each for each in theirs if isinstance(each, Mapping) and "name" in each}
        known = [merge(named.pop(each["name"]), each) if _name(each) in named else each for each in ours]
        return [*known, *(each for each in theirs if _name(each) is None or _name(each) in named)]
    return ours


def _name(each: Any) -> Any:
    return each.get("name") if isinstance(each, Mapping) else None


def literal(text: str) -> str:
    """Return the text as it is written for Kubernetes, which replaces `$(NAME)` by variables, and `$$` by `$`."""
    return text.replace("$", "$$")


def _main_process(spec: SandboxSpec) -> list[str]:
    state_dir, base = Sandbox.state_dir, Sandbox.workspace_base
    return ["/bin/sh", "-c", _START, "hermes-start", base, *spec.command(state_dir)]


def _size(mib: int | None) -> dict[str, str]:
    return {} if mib is None else {"sizeLimit": f"{mib}Mi"}


def _resources(cpu: float | None, memory: int | None, config: KubernetesConfig) -> dict[str, str]:
    found = {} if cpu is None else {"cpu": str(cpu)}
    if memory is not None:
        found["memory"] = f"{memory}Mi"
    return found | ({config.gpu_resource: str(config.gpus)} if config.gpus else {})


def _security(spec: SandboxSpec, config: KubernetesConfig) -> dict[str, Any]:
    capabilities = {*CAPABILITIES, *config.cap_add}
    if SYS_ADMIN in config.cap_add:
        capabilities |= {*_NAMESPACE_CAPABILITIES}
    if spec.isolation is Isolation.PRIVATE_ROOT:
        capabilities |= {*_ROOT_CAPABILITIES}
    if config.network is Network.SETUP:
        capabilities.add("NET_ADMIN")
    return {
        "runAsUser": config.user or 0,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": sorted(capabilities)},
    }


def _setup(spec: SandboxSpec, config: KubernetesConfig) -> list[dict[str, Any]]:
    """Return the container that takes away, before the sandbox starts, what the sandbox must not have."""
    scripts = [_NO_SYSV_IPC] if spec.isolation is Isolation.USER else []
    scripts += [CUT_NETWORK] if config.network is Network.NONE else []
    if not scripts:
        return []
    return [
        {
            "name": "hermes-setup",
            "image": config.setup_image,
            "command": ["/bin/sh", "-c", literal("\n".join(scripts))],
            "securityContext": {"privileged": True, "runAsUser": 0},
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    ]


def annotation(pod: Mapping[str, Any], name: str) -> str:
    """Return an annotation of a pod; empty if it has none of this name."""
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))


def uid_base_of(pod: Mapping[str, Any]) -> int | None:
    """Return the first user id of a pod's block; None if it has no block."""
    text = annotation(pod, UIDS)
    return int(text) if text.isdigit() else None


def environment_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of every program, where a pod can't have them itself."""
    return dict(json.loads(annotation(pod, ENVIRONMENT) or "{}"))


def created(pod: Mapping[str, Any]) -> float:
    """Return when a pod was created, in seconds since the epoch."""
    return _seconds(pod["metadata"]["creationTimestamp"])


def _seconds(time_of_day: str) -> float:
    return datetime.fromisoformat(time_of_day).timestamp()


def life_left(pod: Mapping[str, Any]) -> float | None:
    """Return the seconds until Kubernetes ends a pod or a claim; None if it never does."""
    limit, end = pod["spec"].get("activeDeadlineSeconds"), (pod["spec"].get("lifecycle") or {}).get("shutdownTime")
    if limit is None and end is None:
        return None
    return max(0.0, (created(pod) + limit if end is None else _seconds(end)) - time.time())


def image_of(pod: Mapping[str, Any]) -> SandboxImage | None:
    """Return the image of the sandbox's container, with its digest if the node has said which it is."""
    name = next((each.get("image") for each in pod["spec"]["containers"] if each["name"] == container_of(pod)), None)
    digest = str(_container_status(pod).get("imageID") or "").rpartition("@")[2]
    return SandboxImage(str(name), digest or None) if name else None


def container_of(pod: Mapping[str, Any]) -> str:
    """Return the name of the sandbox's container: `sandbox`, or the first one in a pod of another's."""
    names = [str(each["name"]) for each in pod["spec"]["containers"]]
    return CONTAINER if CONTAINER in names else names[0]


def _container_status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((each for each in statuses if each["name"] == container_of(pod)), {})


def container_state(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the sandbox's container: `{"running": …}`, `{"waiting": …}`, `{"terminated": …}`, or
    nothing yet."""
    return dict(_container_status(pod).get("state") or {})


def is_running(pod: Mapping[str, Any]) -> bool:
    """Return whether programs can be started in a pod."""
    return "running" in container_state(pod) and "deletionTimestamp" not in pod["metadata"]


def status_of(pod: Mapping[str, Any]) -> SandboxStatus:
    """Return the status of a pod or a claim. One that starts counts as running, so that clean-up does not remove it."""
    status = pod.get("status") or {}
    finished = any(each.get("type") == "Finished" for each in status.get("conditions") or ())
    ended = finished or status.get("phase") in ("Succeeded", "Failed")
    if "containers" in pod["spec"]:
        ended = ended or "terminated" in container_state(pod)
    return SandboxStatus.ENDED if ended or "deletionTimestamp" in pod["metadata"] else SandboxStatus.RUNNING


def info_of(pod: Mapping[str, Any], sandbox_id: str) -> SandboxInfo:
    """Return the entry of `list` for a pod."""
    return SandboxInfo(sandbox_id, annotation(pod, OWNER), annotation(pod, CREATION_ID), created(pod), status_of(pod))
