"""The pods of a namespace: made, listed, waited for and ended, with one list that all waiting callers share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import ClientWebSocketResponse
from pydantic import ValidationError

from hermes_core import ProvisionError, SandboxStatus, SingleFlight, TaskSet
from hermes_kubernetes import pods, starting
from hermes_kubernetes.cluster import Cluster, ClusterError
from hermes_kubernetes.config import Address, KubernetesConfig

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between two looks at the pods that callers wait for."""
GONE_S = 60.0
"""Seconds in which a deleted pod's processes must have ended. After that, it is removed without its node's consent."""


class Namespace:
    """The sandboxes in one namespace of a cluster.

    Args:
        cluster: the API server.
        name: the namespace; None is the context's own.
    """

    def __init__(self, cluster: Cluster, name: str | None) -> None:
        self.cluster = cluster
        self._name = name
        self._work = TaskSet()
        self._looks: SingleFlight[dict[str, Mapping[str, Any]]] = SingleFlight("the list of pods")

    async def name(self) -> str:
        """Return the namespace's name."""
        return self._name or await self.cluster.namespace()

    async def sandbox_id(self, pod_name: str) -> str:
        """Return the id of the sandbox that a pod is."""
        return f"{await self.name()}/{pod_name}"

    async def path(self, *names: str, group: str = "api/v1", kind: str = "pods") -> str:
        """Return the path of the objects of a kind, or of one of them, on the API server."""
        parts = ["", group, "namespaces", await self.name(), kind, *names]
        return "/".join(quote(part, safe="/") for part in parts)

    async def create_pod(self, pod: Mapping[str, Any]) -> None:
        """Create a pod, if there is none of its name that has not ended."""
        while True:
            try:
                await self.cluster.ask("POST", await self.path(), body=pod)
                return
            except ClusterError as error:
                if error.status != 409 or error.reason != "AlreadyExists":
                    raise
            found = await self.read_pod(name := pod["metadata"]["name"])
            if found is not None and pods.status_of(found) is SandboxStatus.RUNNING:
                return
            await self.end_pod(name)

    async def read_pod(self, name: str) -> Mapping[str, Any] | None:
        """Return a pod; None if there is none of this name."""
        try:
            return await self.cluster.ask("GET", await self.path(name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    async def find_pods(self, owner: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the pods with our label, of one owner or of all."""
        selector = pods.OWNER if owner is None else f"{pods.OWNER}={pods.label_of(owner)}"
        return await self._list(selector)

    async def _list(self, selector: str) -> list[Mapping[str, Any]]:
        return [pod async for page in self.cluster.list_pages(await self.path(), selector) for pod in page]

    async def wait_for_start(self, name: str, config: KubernetesConfig) -> Mapping[str, Any]:
        """Return a pod as soon as its sandbox's container runs.

        Raises:
            ImageError: its image can't be had.
            ProvisionError: it can't start for another reason, or has not started in time.
        """
        pod: Mapping[str, Any] | None = None
        try:
            async with asyncio.timeout(config.start_timeout_s):
                while True:
                    pod = await self._look(name)
                    if pod is None:
                        raise ProvisionError("the pod was deleted while it started", retryable=True)
                    if pods.container_state(pod).get("running") is not None:
                        return pod
                    if (obstacle := starting.find_obstacle(pod)) is not None:
                        raise obstacle
        except TimeoutError as error:
            raise starting.not_started(pod, config) from error

    async def shares_uids(self, pod: Mapping[str, Any]) -> bool:
        """Return whether another pod on the same node has the same block of user ids. It sees this one, too."""
        base, node = pods.uid_base_of(pod), pod["spec"].get("nodeName")
        if base is None or pod["spec"].get("hostUsers") is False:
            return False
        others = await self._list(f"{pods.UIDS}={base}")
        return any(
            other["spec"].get("nodeName") == node and other["metadata"]["name"] != pod["metadata"]["name"]
            for other in others
        )

    async def end_pod(self, name: str) -> None:
        """Delete a pod, and return when its processes have ended and it is gone. Idempotent."""
        loop = asyncio.get_running_loop()
        deadline, query = loop.time() + GONE_S, {"gracePeriodSeconds": 1}
        while await self._delete(name, query):
            while loop.time() < deadline:
                if await self._look(name) is None:
                    return
            log.warning("pod %s of namespace %s does not end, and is removed by force", name, await self.name())
            query = {"gracePeriodSeconds": 0}

    async def _delete(self, name: str, query: Mapping[str, int]) -> bool:
        """Ask for the deletion of a pod. Return whether there was one."""
        try:
            await self.cluster.ask("DELETE", await self.path(name), query=query)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def start_program(self, pod: str, container: str, argv: Sequence[str]) -> ClientWebSocketResponse:
        """Start a program in a pod, and return the websocket to it."""
        return await self.cluster.start_program(await self.path(pod, "exec"), container, argv)

    async def aclose(self) -> None:
        """End the looks. Pods stay."""
        await self._work.aclose()

    async def _look(self, name: str) -> Mapping[str, Any] | None:
        """Return a pod as it is in a moment; None if it is gone. All waiting callers share one list of the pods."""
        return (await self._looks.get(self._work, self._look_at_all)).get(name)

    async def _look_at_all(self) -> dict[str, Mapping[str, Any]]:
        await asyncio.sleep(LOOK_S)
        return {pod["metadata"]["name"]: pod for pod in await self.find_pods()}


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
