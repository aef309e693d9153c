"""The settings of a profile of the `kubernetes` backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator, model_validator

from hermes_core import Network, SandboxConfig, TerminalVariables

SYS_ADMIN = "SYS_ADMIN"
DEFAULT_IMAGE = "python:3.11"
CONTAINER = "sandbox"
"""The name of the sandbox's container in its pod."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

_OURS: Mapping[str, frozenset[str]] = {
    "": frozenset({"apiVersion", "kind", "status"}),
    "metadata": frozenset({"name", "generateName", "namespace"}),
    "spec": frozenset({"hostNetwork", "hostPID", "hostIPC", "restartPolicy"}),
    "container": frozenset({"command", "args", "image", "stdin", "tty"}),
    "securityContext": frozenset({"privileged", "capabilities", "allowPrivilegeEscalation", "runAsUser"}),
}
"""Keys of a pod that `pod` can't have: they would break what the backend promises, or have settings of their own."""


@dataclass(frozen=True)
class Address:
    """Where a cluster is: a kubeconfig and a context in it. None is what kubectl would use."""

    kubeconfig: str | None = None
    context: str | None = None


_OF_TEMPLATE = frozenset({"image", "cpu", "memory", "network"})
_OF_CLAIM = frozenset(
    {"annotations", "context", "kubeconfig", "labels", "max_lifetime", "namespace", "start_timeout_s", "warm_pool"}
)
"""Settings of all backends that have no effect on a sandbox from a warm pool, and settings of this one that have."""


class KubernetesConfig(SandboxConfig):
    """A profile of the `kubernetes` backend."""

    terminal = TerminalVariables(
        {
            "TERMINAL_KUBERNETES_IMAGE": "image",
            "TERMINAL_CONTAINER_CPU": "cpu",
            "TERMINAL_CONTAINER_MEMORY": "memory",
        }
    )

    image: str | None = DEFAULT_IMAGE
    """The image of the sandbox's container."""
    kubeconfig: str | None = None
    """The kubeconfig's path. None is KUBECONFIG, ~/.kube/config, or the service account of the driver's own pod."""
    context: str | None = None
    """The context in the kubeconfig. None is its current one."""
    namespace: str | None = None
    """The namespace of the pods. None is the context's."""
    cpu_request: float | None = Field(default=None, gt=0)
    """CPU cores that the scheduler reserves. None is `cpu`, which is the limit."""
    memory_request: int | None = Field(default=None, gt=0)
    """Memory in MiB that the scheduler reserves. None is `memory`, which is the limit."""
    disk: int | None = Field(default=None, gt=0)
    """The size in MiB of the slots' workspaces, /data. A pod that exceeds it is evicted. None is no limit."""
    shm_size: int | None = Field(default=None, gt=0)
    """The size of /dev/shm in MiB, which counts as memory. None is the container runtime's default, usually 64."""
    gpus: int = Field(default=0, ge=0)
    """How many GPUs."""
    gpu_resource: str = "nvidia.com/gpu"
    """The name by which the nodes offer GPUs."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have: `{"pool": "rollouts"}`."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Tolerations of taints, as in a pod's `spec.tolerations`."""
    service_account: str | None = None
    """The service account of the pods. Its token is not mounted."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of secrets with the credentials of registries."""
    secrets: tuple[str, ...] = ()
    """Names of secrets whose keys are variables of the sandbox. Commands see those that `slot_secrets` lists."""
    runtime_class: str | None = None
    """The runtime class, such as `gvisor` or `kata`."""
    host_users: bool = True
    """Whether users of the pod are those of the node. False gives the pod a user namespace, so that its root, even with
    SYS_ADMIN, has no rights on the node. The cluster must support it."""
    user: int | None = Field(default=None, ge=0)
    """The user id of the sandbox's processes. None is root, which the levels `user` and `namespace` need."""
    cap_add: tuple[str, ...] = ()
    """Kernel capabilities beside those that slots of level `user` need. `namespace` and `private-root` need
    SYS_ADMIN."""
    setup_image: str = "busybox:1.37"
    """The image of the privileged container that switches off System V IPC (level `user`) and the network (`none`)
    before the sandbox starts. It needs `sh` and `ip`. Its programs have the rights of root on the node."""
    max_lifetime: int = Field(default=86_400, ge=60)
    """Seconds after which Kubernetes ends the sandbox, whatever it does. It is replaced before that."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a pod may take to start, including the pull of its image and the start of a node."""
    warm_pool: str | None = None
    """The name of a SandboxWarmPool of agent-sandbox. Sandboxes are then claimed from it instead of being started, and
    its template decides what is in them. See the guide."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of the pods, for example for a NetworkPolicy of yours."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Further annotations of the pods."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Anything else of a pod, merged into ours: `{"spec": {"priorityClassName": "low"}}`. In lists, things of one
    name are merged, such as containers and volumes. The sandbox's container is `sandbox`."""

    @property
    def address(self) -> Address:
        """Return where the cluster is."""
        return Address(self.kubeconfig, self.context)

    @property
    def gpu_count(self) -> int | None:
        """Return the number of GPUs of a pod."""
        return self.gpus

    @property
    def has_secrets(self) -> bool:
        """Return whether Kubernetes sets secrets in the sandbox."""
        return bool(self.secrets) or super().has_secrets

    @field_validator("namespace", "service_account", "runtime_class", "warm_pool")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(
                f"must be lower-case letters, digits, '-' and '.', as names in Kubernetes are, not {name!r}"
            )
        return name

    @field_validator("cap_add")
    @classmethod
    def _without_prefix(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.upper().removeprefix("CAP_") for name in names)

    @field_validator("labels", "annotations")
    @classmethod
    def _not_ours(cls, values: dict[str, str]) -> dict[str, str]:
        if taken := [key for key in values if key.startswith("hermes-rl/")]:
            raise ValueError(f"holds {taken[0]!r}: names that begin with hermes-rl/ are the backend's own")
        return values

    @field_validator("pod")
    @classmethod
    def _breaks_nothing(cls, pod: dict[str, Any]) -> dict[str, Any]:
        spec, metadata = pod.get("spec", {}), pod.get("metadata", {})
        containers = (spec.get("containers") or []) if isinstance(spec, Mapping) else None
        if not isinstance(metadata, Mapping) or not isinstance(containers, list):
            raise ValueError("must be part of a pod: {metadata: {…}, spec: {…}}")
        if any(not isinstance(each, Mapping) or each.get("name") != CONTAINER for each in containers):
            raise ValueError(
                f"has a container that is not {CONTAINER!r}, which would go on after the sandbox's end: "
                "make it one of initContainers with restartPolicy: Always"
            )
        own = containers[0] if containers else {}
        parts = {"": pod, "metadata": metadata, "spec": spec, "container": own}
        for where, part in {**parts, "securityContext": own.get("securityContext") or {}}.items():
            if taken := sorted(_OURS[where] & part.keys()):
                raise ValueError(f"holds {where} {taken[0]!r}, which the backend sets itself, or refuses")
        return pod

    @model_validator(mode="after")
    def _agree(self) -> KubernetesConfig:
        own = self.model_fields_set - SandboxConfig.model_fields.keys() - _OF_CLAIM
        if self.warm_pool is not None and (given := sorted(own | self.model_fields_set & _OF_TEMPLATE)):
            raise ValueError(f"warm_pool is set, so its template decides on {given[0]}: leave {given[0]} out")
        if self.image is None:
            raise ValueError(f"image is empty: leave it out for {DEFAULT_IMAGE}")
        for key in ("cpu", "memory"):
            limit, request = getattr(self, key), getattr(self, f"{key}_request")
            if limit is not None and request is not None and request > limit:
                raise ValueError(f"{key}_request is {request}, more than {key}, {limit}")
        if self.network is Network.SETUP and self.user:
            raise ValueError("network is setup, which a sandbox of root's alone can cut: leave `user` out")
        return self
