"""The `kubernetes` backend: a sandbox is a pod, and each channel a pod exec."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hermes_core import PluginError

try:
    import kubernetes_asyncio  # noqa: F401
except ModuleNotFoundError as missing:
    hint = "`pip install kubernetes-asyncio`"
    raise PluginError(f"the client of Kubernetes is not installed: {missing}", hint=hint) from missing

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    ChannelLost,
    Diagnosis,
    HermesError,
    InfraError,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
    complete,
)
from hermes_kubernetes import pods, starting
from hermes_kubernetes.cluster import ClusterError
from hermes_kubernetes.config import CONTAINER, SYS_ADMIN, KubernetesConfig
from hermes_kubernetes.exec import PodChannel, command_of
from hermes_kubernetes.namespaces import Namespace, Namespaces

log = logging.getLogger(__name__)


class KubernetesBackend(Backend):
    """Sandboxes that are pods of the clusters which the profiles name; by default, of the cluster that kubectl uses.

    Args:
        settings: the runtime's settings. Their profiles say where to look for sandboxes.
    """

    name: ClassVar[str] = "kubernetes"
    config_class: ClassVar[type[SandboxConfig]] = KubernetesConfig
    capabilities = Capabilities(frozenset(Isolation), network=frozenset(Network), attach=True, gpu=True)

    def __init__(self, settings: Settings | None = None) -> None:
        self._namespaces = Namespaces({} if settings is None else settings.profiles)

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """Return the levels that pods of this profile can give.

        `private-root` is one only with SYS_ADMIN; without it, `dedicated` takes its place. (`namespace` is refused
        later, with advice.) With network `setup`, only levels whose slots are not the sandbox's root, which could bring
        the network up again.
        """
        levels = set(self.capabilities.isolation)
        if isinstance(config, KubernetesConfig) and SYS_ADMIN not in config.cap_add:
            levels.discard(Isolation.PRIVATE_ROOT)
        if config.network is Network.SETUP:
            levels -= {Isolation.SHARED, Isolation.DEDICATED}
        return frozenset(levels)

    def note_profile(self, config: SandboxConfig) -> None:
        """Include the profile's namespace in `list`."""
        assert isinstance(config, KubernetesConfig)
        self._namespaces.of(config)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the pod of this spec, or return the running one with the spec's creation id."""
        config = spec.config
        assert isinstance(config, KubernetesConfig)
        pods.check_spec(spec, config)
        namespace, name = self._namespaces.of(config), pods.name_of(spec.creation_id)
        try:
            pod = await self._make_pod(namespace, spec, config)
        except BaseException as error:
            await complete(_undo(namespace, name))
            if isinstance(error, ClusterError):
                raise starting.not_made(error, config) from error
            raise
        spec.check_existing(pods.annotation(pod, pods.ISOLATION), await namespace.sandbox_id(name))
        return await self._sandbox(namespace, pod)

    async def _make_pod(self, namespace: Namespace, spec: SandboxSpec, config: KubernetesConfig) -> Mapping[str, Any]:
        name = pods.name_of(spec.creation_id)
        while True:
            uid_base = pods.choose_uids(config)
            # A request that was sent may take effect after a later DELETE, so a cancelled caller waits for its answer.
            await complete(namespace.create_pod(pods.manifest(spec, config, uid_base)))
            pod = await namespace.wait_for_start(name, config)
            if not await namespace.shares_uids(pod):
                return pod
            await namespace.end_pod(name)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the pods with our label, in the namespaces that the profiles name or have named."""
        found = []
        for namespace in self._namespaces.all():
            found += [
                pods.info_of(pod, await namespace.sandbox_id(pod["metadata"]["name"]))
                for pod in await namespace.find_pods(owner)
                if owner is None or pods.annotation(pod, pods.OWNER) == owner
            ]
        return found

    async def terminate_id(self, sandbox_id: str) -> None:
        """Delete a sandbox's pod by the sandbox's id, if it is one of ours."""
        for namespace, pod in await self._find(sandbox_id):
            await namespace.end_pod(pod["metadata"]["name"])

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running pod. Raise `SandboxLost` if it does not run."""
        for namespace, pod in await self._find(sandbox_id):
            if pods.container_state(pod).get("running") is not None and "deletionTimestamp" not in pod["metadata"]:
                return await self._sandbox(namespace, pod)
        raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)

    async def check(self) -> Diagnosis:
        """Return whether the cluster answers, and whether we may create pods and exec in them."""
        from hermes_kubernetes.diagnosis import diagnose

        return await diagnose(self._namespaces.all())

    async def aclose(self) -> None:
        """Close the connections. Pods keep running."""
        await self._namespaces.aclose()

    async def _find(self, sandbox_id: str) -> Sequence[tuple[Namespace, Mapping[str, Any]]]:
        """Return the pods with this id and our label, each with its namespace."""
        found = []
        for namespace in self._namespaces.all():
            name = sandbox_id.rpartition("/")[2]
            if await namespace.sandbox_id(name) == sandbox_id:
                pod = await namespace.read_pod(name)
                if pod is not None and pods.annotation(pod, pods.CREATION_ID):
                    found.append((namespace, pod))
        return found

    async def _sandbox(self, namespace: Namespace, pod: Mapping[str, Any]) -> KubernetesSandbox:
        return KubernetesSandbox(await namespace.sandbox_id(pod["metadata"]["name"]), namespace, pod)


async def _undo(namespace: Namespace, name: str) -> None:
    """Delete the pod of a creation that failed. The error of the creation says more than one of this."""
    try:
        await namespace.end_pod(name)
    except HermesError as error:
        log.warning("pod %s could not be deleted after its creation failed: %s", name, error)


class KubernetesSandbox(Sandbox):
    """A pod, made by `KubernetesBackend`."""

    own_system = True

    def __init__(self, sandbox_id: str, namespace: Namespace, pod: Mapping[str, Any]) -> None:
        self.id = sandbox_id
        self.uid_base = pods.uid_base_of(pod)
        self.lifetime_s = pods.life_left(pod)
        self.image = pods.image_of(pod)
        self._pod_name: str = pod["metadata"]["name"]
        self._namespace = namespace

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` with a pod exec, over a websocket of its own."""
        command = command_of(argv, env or {})
        try:
            return PodChannel(await self._namespace.start_program(self._pod_name, CONTAINER, command))
        except ClusterError as error:
            if error.status is not None and await self.status() is not SandboxStatus.RUNNING:
                raise SandboxLost("the sandbox has ended", sandbox_id=self.id) from error
            raise ChannelLost(error.message, hint=error.hint, sandbox_id=self.id) from error

    async def status(self) -> SandboxStatus:
        """Return the status of the pod's container on the API server."""
        pod = await self._namespace.read_pod(self._pod_name)
        return SandboxStatus.GONE if pod is None else pods.status_of(pod)

    async def cut_network(self) -> None:
        """Take down the pod's network interfaces, with the guest's NET_ADMIN, which no slot has."""
        channel = await self.open(["/bin/sh", "-c", pods.CUT_NETWORK])
        try:
            while await channel.read(1 << 16):
                pass
            if status := await channel.wait():
                raise InfraError(
                    f"the network could not be cut (status {status}): {channel.stderr_tail}", sandbox_id=self.id
                )
        finally:
            await channel.aclose()

    async def terminate(self) -> None:
        """Delete the pod, and wait until it is gone."""
        await self._namespace.end_pod(self._pod_name)
