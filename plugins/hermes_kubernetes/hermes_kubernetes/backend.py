"""The `kubernetes` backend: a sandbox is a pod, or the pod of a claim, and each channel a pod exec."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

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
    ProvisionError,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
    complete,
)
from hermes_kubernetes import claims, diagnosis, pods, starting
from hermes_kubernetes.cluster import ClusterError
from hermes_kubernetes.config import SYS_ADMIN, KubernetesConfig
from hermes_kubernetes.exec import PodChannel, command_of, run_to_end
from hermes_kubernetes.namespaces import CLAIMS, PODS, Kind, Namespace, Namespaces, Object

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
        later, with advice.) Levels at which a slot may be the sandbox's root are none if that root has NET_ADMIN, and
        could bring a network up again that was taken away.
        """
        assert isinstance(config, KubernetesConfig)
        levels = set(self.capabilities.isolation)
        if config.warm_pool is None and SYS_ADMIN not in config.cap_add:
            levels.discard(Isolation.PRIVATE_ROOT)
        admin = config.network is Network.SETUP or not {SYS_ADMIN, "NET_ADMIN"}.isdisjoint(config.cap_add)
        if admin and config.network is not Network.OPEN:
            levels -= {Isolation.SHARED, Isolation.DEDICATED}
        return frozenset(levels)

    def note_profile(self, config: SandboxConfig) -> None:
        """Include the profile's namespace in `list`."""
        assert isinstance(config, KubernetesConfig)
        self._namespaces.of(config)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the pod or the claim of this spec, or return the running one with the spec's creation id."""
        config = spec.config
        assert isinstance(config, KubernetesConfig)
        pods.check_spec(spec, config)
        namespace, kind = self._namespaces.of(config), PODS if config.warm_pool is None else CLAIMS
        try:
            sandbox, owned = await self._make(namespace, kind, spec, config)
            if kind is CLAIMS:
                await claims.take_over(sandbox, spec)
            await sandbox.find_workdir()
        except BaseException as error:
            await complete(_undo(namespace, kind, pods.name_of(spec.creation_id)))
            if isinstance(error, ClusterError):
                raise starting.not_made(error, config) from error
            if isinstance(error, ChannelLost | SandboxLost):
                message = f"no program could be started in the sandbox: {error.message}"
                raise ProvisionError(message, hint=error.hint) from error
            raise
        spec.check_existing(pods.annotation(owned, pods.ISOLATION), sandbox.id)
        return sandbox

    async def _make(
        self, namespace: Namespace, kind: Kind, spec: SandboxSpec, config: KubernetesConfig
    ) -> tuple[KubernetesSandbox, Object]:
        """Return a sandbox that runs, and the object that it is."""
        name, describe = pods.name_of(spec.creation_id), pods.pod_of if kind is PODS else claims.claim_of
        while True:
            # A request that was sent may take effect after a later DELETE, so a cancelled caller waits for its answer.
            await complete(namespace.create(kind, describe(spec, config, pods.choose_uids(config))))
            if kind is PODS:
                owned = pod = await starting.wait_for_start(namespace, name, config)
            else:
                owned, pod = await claims.wait_for_pod(namespace, name, config)
            if not await namespace.shares_uids(owned):
                return KubernetesSandbox(namespace, kind, await namespace.sandbox_id(name), owned, pod), owned
            await namespace.end(kind, name)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the pods and claims with our label, in the namespaces that the profiles name or have named."""
        return [
            pods.info_of(each, await namespace.sandbox_id(each["metadata"]["name"]))
            for namespace in self._namespaces.all()
            for kind in namespace.kinds
            for each in await namespace.find(kind, pods.OWNER, owner)
            if owner is None or pods.annotation(each, pods.OWNER) == owner
        ]

    async def terminate_id(self, sandbox_id: str) -> None:
        """Delete the pod or the claim of a sandbox by its id, if it is one of ours."""
        for namespace, kind, owned in await self._find(sandbox_id):
            await namespace.end(kind, owned["metadata"]["name"])

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raise `SandboxLost` if it does not run."""
        for namespace, kind, owned in await self._find(sandbox_id):
            pod = owned if kind is PODS else await claims.read_pod(namespace, owned)
            if pod is not None and pods.is_running(pod):
                return KubernetesSandbox(namespace, kind, sandbox_id, owned, pod)
        raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)

    async def check(self) -> Diagnosis:
        """Return whether the clusters answer, and whether we may create pods and exec in them."""
        return await diagnosis.diagnose(self._namespaces.all())

    async def aclose(self) -> None:
        """Close the connections. Sandboxes keep running."""
        await self._namespaces.aclose()

    async def _find(self, sandbox_id: str) -> Sequence[tuple[Namespace, Kind, Object]]:
        """Return the objects with our label that are the sandbox with this id."""
        name = sandbox_id.rpartition("/")[2]
        places = [each for each in self._namespaces.all() if await each.sandbox_id(name) == sandbox_id]
        found = [(place, kind, await place.read(kind, name)) for place in places for kind in place.kinds]
        return [(at, kind, each) for at, kind, each in found if each is not None and pods.annotation(each, pods.OWNER)]


async def _undo(namespace: Namespace, kind: Kind, name: str) -> None:
    """Delete the object of a creation that failed. The error of the creation says more than one of this."""
    try:
        await namespace.end(kind, name)
    except HermesError as error:
        log.warning("%s could not be deleted after its creation failed: %s", name, error)


class KubernetesSandbox(Sandbox):
    """A pod, made by `KubernetesBackend`.

    Args:
        kind: whether the sandbox is the pod, or a claim that has it.
        owned: the object that the sandbox is, with our annotations.
        pod: the pod in which the sandbox's programs run.
    """

    own_system = True

    def __init__(self, namespace: Namespace, kind: Kind, sandbox_id: str, owned: Object, pod: Object) -> None:
        self.id = sandbox_id
        self.uid_base = pods.uid_base_of(owned)
        self.lifetime_s = pods.life_left(owned)
        self.image = pods.image_of(pod)
        self._namespace, self._kind, self._name = namespace, kind, owned["metadata"]["name"]
        self._pod, self._container = pod["metadata"]["name"], pods.container_of(pod)
        self._environment = pods.environment_of(owned)

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` with a pod exec, over a websocket of its own."""
        command = command_of(argv, {**self._environment, **(env or {})})
        try:
            return PodChannel(await self._namespace.start_program(self._pod, self._container, command))
        except ClusterError as error:
            if error.status is not None and await self.status() is not SandboxStatus.RUNNING:
                raise SandboxLost("the sandbox has ended", sandbox_id=self.id) from error
            raise ChannelLost(error.message, hint=error.hint, sandbox_id=self.id) from error

    async def find_workdir(self) -> None:
        """Add to what is known of the image in which directory programs start. The API does not know that."""
        _, output, _ = await run_to_end(self, ["/bin/sh", "-c", "pwd"])
        if self.image is not None:
            self.image = replace(self.image, workdir=output.strip() or None)

    async def status(self) -> SandboxStatus:
        """Return the status of the pod's container on the API server."""
        pod = await self._namespace.read(PODS, self._pod)
        return SandboxStatus.GONE if pod is None else pods.status_of(pod)

    async def cut_network(self) -> None:
        """Take down the pod's network interfaces, with the guest's NET_ADMIN, which no slot has."""
        status, _, words = await run_to_end(self, ["/bin/sh", "-c", pods.CUT_NETWORK])
        if status:
            raise InfraError(f"the network could not be cut (status {status}): {words}", sandbox_id=self.id)

    async def terminate(self) -> None:
        """Delete the pod or the claim, and wait until it is gone."""
        await self._namespace.end(self._kind, self._name)
