"""The objects of a namespace: made, listed, waited for and ended, with one list that all waiting callers share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import ClientWebSocketResponse
from pydantic import ValidationError

from hermes_core import InfraError, SandboxStatus, SingleFlight, TaskSet
from hermes_kubernetes import pods
from hermes_kubernetes.cluster import Cluster, ClusterError
from hermes_kubernetes.config import Address, KubernetesConfig

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at the objects that callers wait for."""
GONE_S = 60.0
"""Seconds in which a deleted pod's processes must have ended. After that, it is removed without its node's consent."""

Object = Mapping[str, Any]
"""An object of Kubernetes."""


@dataclass(frozen=True)
class Kind:
    """A kind of object: the group that it is in, and its name in paths."""

    group: str
    name: str


PODS = Kind("api/v1", "pods")
CLAIMS = Kind("apis/extensions.agents.x-k8s.io/v1beta1", "sandboxclaims")


class Namespace:
    """The sandboxes in one namespace of a cluster.

    Args:
        cluster: the API server.
        name: the namespace; None is the context's own.
    """

    def __init__(self, cluster: Cluster, name: str | None) -> None:
        self.cluster = cluster
        self.kinds: set[Kind] = {PODS}
        """The kinds of objects that sandboxes may be."""
        self._name = name
        self._work = TaskSet()
        self._looks: SingleFlight[dict[str, Object]] = SingleFlight("the list of objects")

    async def name(self) -> str:
        """Return the namespace's name."""
        return self._name or await self.cluster.namespace()

    async def sandbox_id(self, name: str) -> str:
        """Return the id of the sandbox that the object of this name is."""
        return f"{await self.name()}/{name}"

    async def create(self, kind: Kind, body: Object) -> None:
        """Create an object, if there is none of its name that has not ended."""
        name = body["metadata"]["name"]
        while True:
            try:
                await self.cluster.ask("POST", await self._path(kind), body=body)
                return
            except ClusterError as error:
                if error.status != 409 or error.reason != "AlreadyExists":
                    raise
            found = await self.read(kind, name)
            if found is not None and pods.status_of(found) is SandboxStatus.RUNNING:
                return
            await self.end(kind, name)

    async def read(self, kind: Kind, name: str) -> Object | None:
        """Return an object; None if there is none of this name."""
        try:
            return await self.cluster.ask("GET", await self._path(kind, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def find(self, kind: Kind, label: str, value: str | None = None) -> list[Object]:
        """Return the objects with this label, and with this value of it unless it is None."""
        selector = label if value is None else f"{label}={pods.label_of(value)}"
        return [each async for page in self.cluster.list_pages(await self._path(kind), selector) for each in page]

    async def look(self, kind: Kind, name: str) -> Object | None:
        """Return one of our objects as it is in a moment; None if it is gone. All waiting callers share one list."""

        async def look_at_all() -> dict[str, Object]:
            await asyncio.sleep(LOOK_S)
            return {each["metadata"]["name"]: each for each in await self.find(kind, pods.OWNER)}

        return (await self._looks.get(self._work, look_at_all, kind)).get(name)

    async def shares_uids(self, owned: Object) -> bool:
        """Return whether another sandbox of the namespace has the same block of user ids. It sees this one, too."""
        base = pods.uid_base_of(owned)
        if base is None or base == pods.POD_UIDS:
            return False
        found = [each for kind in self.kinds for each in await self.find(kind, pods.UIDS, str(base))]
        return any(each["metadata"]["name"] != owned["metadata"]["name"] for each in found)

    async def end(self, kind: Kind, name: str) -> None:
        """Delete an object, and return when its processes have ended and it is gone. Idempotent.

        Raises:
            InfraError: it does not go away.
        """
        for grace_s in (1, 0):  # 0 removes it without its node's consent, which a dead node never gives
            if not await self._delete(kind, name, {"gracePeriodSeconds": grace_s, "propagationPolicy": "Foreground"}):
                return
            deadline = asyncio.get_running_loop().time() + GONE_S
            while asyncio.get_running_loop().time() < deadline:
                if await self.look(kind, name) is None:
                    return
            log.warning("%s of namespace %s does not end", name, await self.name())
        raise InfraError(
            "the sandbox was deleted, and does not go away",
            hint=f"`kubectl describe {kind.name} {name}` says which finalizer holds it",
            sandbox_id=await self.sandbox_id(name),
        )

    async def _delete(self, kind: Kind, name: str, query: Mapping[str, str | int]) -> bool:
        """Ask for the deletion of an object. Return whether there was one."""
        try:
            await self.cluster.ask("DELETE", await self._path(kind, name), query=query)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def start_program(self, pod: str, container: str, argv: Sequence[str]) -> ClientWebSocketResponse:
        """Start a program in a pod, and return the websocket to it."""
        return await self.cluster.start_program(await self._path(PODS, pod, "exec"), container, argv)

    async def aclose(self) -> None:
        """End the looks. Sandboxes stay."""
        await self._work.aclose()

    async def _path(self, kind: Kind, *names: str) -> str:
        parts = ["", kind.group, "namespaces", await self.name(), kind.name, *names]
        return "/".join(quote(part, safe="/") for part in parts)


class Namespaces:
    """The namespaces that the runtime's profiles name, and those of the profiles that were used.

    Args:
        profiles: the runtime's profiles by name, which may be for other backends.
    """

    def __init__(self, profiles: Mapping[str, Mapping[str, Any]]) -> None:
        self._clusters: dict[Address, Cluster] = {}
        self._known: dict[tuple[Address, str | None], Namespace] = {}
        for name, values in profiles.items():
            try:
                self.of(KubernetesConfig.model_validate({**values, "name": name}))
            except ValidationError as error:
                log.debug("profile %s is none of the kubernetes backend: %s", name, error)

    def of(self, config: KubernetesConfig) -> Namespace:
        """Return the namespace of a profile."""
        key = config.address, config.namespace
        if key not in self._known:
            cluster = self._clusters.setdefault(config.address, Cluster(config.address))
            self._known[key] = Namespace(cluster, config.namespace)
        if config.warm_pool is not None:
            self._known[key].kinds.add(CLAIMS)
        return self._known[key]

    def all(self) -> list[Namespace]:
        """Return the known namespaces. Without any, it is that of kubectl."""
        if not self._known:
            self.of(KubernetesConfig())
        return [*self._known.values()]

    async def aclose(self) -> None:
        """Close the connections."""
        for namespace in self._known.values():
            await namespace.aclose()
        for cluster in self._clusters.values():
            await cluster.aclose()
