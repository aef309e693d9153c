"""The connection to a cluster's API server: requests with time limits and bounded retries, and errors of ours."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml
from kubernetes_asyncio.client import ApiClient, ApiException, Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from kubernetes_asyncio.stream import WsApiClient

from hermes_core import ConfigError, InfraError, SingleFlight, TaskSet, repeat_call
from hermes_kubernetes.config import Address

CALL_S = 30.0
"""Time limit of one request in seconds."""
PATIENCE_S = 45.0
"""Seconds for which a request is repeated that the server can't serve now, or that did not reach it."""
EXEC_PATIENCE_S = 10.0
"""Seconds for which the start of a program is repeated. They are few, because the pod may be gone."""
MOST_ASKED_S = 30.0
"""The longest pause in seconds that the server can ask for (`Retry-After`)."""
CONNECTIONS = 32
"""Maximum number of requests at the same time. Channels have connections of their own."""
PAGE = 100
"""Number of objects that a list is asked for at a time."""
PING_S = 40.0
"""Seconds of silence after which a channel's connection is tested. It is dead without an answer in half that time."""
MAX_MESSAGE = 1000
"""Maximum number of characters of the server's message in an error."""

_TEMPORARY = frozenset({408, 429, 500, 502, 503, 504})
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NO_CONFIG = "set `kubeconfig` in the profile, or KUBECONFIG; `kubectl config view` shows what kubectl uses"
_WRONG_CONFIG = "`kubectl get pods` with the same kubeconfig and context shows whether kubectl can use it"

T = TypeVar("T")


class ClusterError(InfraError):
    """The API server refused a request or failed. `status` is the HTTP status; None if the server can't be reached."""

    def __init__(
        self, message: str, *, status: int | None = None, reason: str = "", retry_after_s: float = 0.0, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s

    @property
    def is_temporary(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.status is None or self.status in _TEMPORARY


@dataclass
class _Clients:
    """The SDK's clients: one for requests, and one for websockets, each of which keeps its connection."""

    configuration: Configuration
    requests: ApiClient
    sockets: WsApiClient
    namespace: str

    @classmethod
    def make(cls, configuration: Configuration, namespace: str) -> _Clients:
        configuration.connection_pool_maxsize = CONNECTIONS
        requests = ApiClient(configuration)
        configuration.connection_pool_maxsize = 0  # no limit: a channel lasts as long as its sandbox
        sockets = WsApiClient(configuration, heartbeat=PING_S)
        requests.user_agent = sockets.user_agent = "hermes-rl"
        return cls(configuration, requests, sockets, namespace)

    async def aclose(self) -> None:
        await self.requests.close()
        await self.sockets.close()


class Cluster:
    """The API server at one address. The first request reads the kubeconfig and connects."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._work = TaskSet()
        self._clients: SingleFlight[_Clients] = SingleFlight("the connection to the cluster", keep=True)
        self._logins: SingleFlight[None] = SingleFlight("reading the credentials of the cluster again")

    async def namespace(self) -> str:
        """Return the namespace that the kubeconfig's context, or the service account, is in."""
        return (await self._connected()).namespace

    async def server(self) -> str:
        """Return the URL of the API server."""
        return str((await self._connected()).configuration.host)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: Mapping[str, Any] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> dict[str, Any]:
        """Send a request, and return the answer.

        Temporary failures are waited out. So a request must be one that can be repeated, as the creation of an object
        with a name can.

        Raises:
            ClusterError: the server refuses, or still fails after `patience_s` seconds.
            ConfigError: there is no usable kubeconfig.
        """

        async def send() -> dict[str, Any]:
            answer = await (await self._connected()).requests.call_api(
                path,
                method,
                query_params=[*(query or {}).items()],
                header_params={"Accept": "application/json"},
                body=body,
                response_types_map=dict.fromkeys((200, 201, 202), "object"),
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _request_timeout=CALL_S,
            )
            return answer if isinstance(answer, dict) else {}

        return await self._attempt(send, patience_s)

    async def list_pages(self, path: str, selector: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        """Yield the objects with these labels, page by page."""
        query: dict[str, str | int] = {"labelSelector": selector, "limit": PAGE}
        while True:
            answer = await self.ask("GET", path, query=query)
            yield answer.get("items") or []
            if not (more := (answer.get("metadata") or {}).get("continue")):
                return
            query["continue"] = more

    async def start_program(
        self, path: str, container: str, argv: Sequence[str], *, patience_s: float = EXEC_PATIENCE_S
    ) -> aiohttp.ClientWebSocketResponse:
        """Start a program in a container, and return the websocket to it. Raises as `ask` does.

        Args:
            path: the pod's path, and `/exec`.
        """
        query: list[tuple[str, Any]] = [("command", list(argv)), ("container", container)]
        query += [(stream, "true") for stream in ("stdin", "stdout", "stderr")]

        async def send() -> aiohttp.ClientWebSocketResponse:
            connecting = await (await self._connected()).sockets.call_api(
                path, "GET", query_params=query, auth_settings=["BearerToken"], _preload_content=False
            )
            async with asyncio.timeout(CALL_S):
                socket: aiohttp.ClientWebSocketResponse = await connecting
            return socket

        return await self._attempt(send, patience_s)

    async def aclose(self) -> None:
        """Close the connections. Pods stay."""
        await self._work.aclose()
        if (clients := self._clients.kept.pop(None, None)) is not None:
            await clients.aclose()

    async def _connected(self) -> _Clients:
        return await self._clients.get(self._work, self._connect)

    async def _attempt(self, send: Callable[[], Awaitable[T]], patience_s: float) -> T:
        may_log_in = True

        async def attempt() -> T:
            nonlocal may_log_in
            try:
                return await send()
            except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as error:
                ours = await self._translate(error)
                if ours.status != 401 or not may_log_in:
                    raise ours from error
                may_log_in = False  # the token may have expired
                await self._logins.get(self._work, self._log_in)
                return await attempt()

        return await repeat_call(attempt, _pause_asked, patience_s=patience_s)

    async def _translate(self, error: Exception) -> ClusterError:
        """Return our error for one of the SDK."""
        if isinstance(error, ApiException) and error.status:
            return _refusal(error)
        if isinstance(error, aiohttp.WSServerHandshakeError):
            hint = "`hermes-rl doctor kubernetes` says whether you may exec in pods" if error.status == 403 else None
            return ClusterError(f"the API server refuses an exec: {error.status}", status=error.status, hint=hint)
        reason = "no answer in time" if isinstance(error, TimeoutError) else f"{error}" or type(error).__name__
        return ClusterError(
            f"the API server {await self.server()} can't be reached: {reason[:MAX_MESSAGE]}",
            hint="check the network and the VPN; `hermes-rl doctor kubernetes` says whether it answers",
        )

    async def _connect(self) -> _Clients:
        configuration, namespace = await self._load()
        try:
            return _Clients.make(configuration, namespace)
        except OSError as error:  # a certificate
            raise ConfigError(f"the kubeconfig can't be used: {error}", hint=_WRONG_CONFIG) from error

    async def _log_in(self) -> None:
        clients = await self._connected()
        configuration, _ = await self._load()
        clients.configuration.api_key.update(configuration.api_key)

    async def _load(self) -> tuple[Configuration, str]:
        configuration, files = Configuration(), self._files()
        try:
            if files is None:
                load_incluster_config(client_configuration=configuration)
                return configuration, _SERVICE_ACCOUNT.read_text().strip()  # noqa: ASYNC240 - a line
            loader = await load_kube_config(
                config_file=files,
                context=self.address.context,
                client_configuration=configuration,
                persist_config=False,
            )
            context = loader.current_context or {}
            return configuration, context["context"].get("namespace") or "default"
        except (ConfigException, yaml.YAMLError, OSError, ValueError, LookupError, TypeError, AssertionError) as error:
            where = "the service account's files" if files is None else f"kubeconfig {files}"
            raise ConfigError(f"{where} can't be used: {error or type(error).__name__}", hint=_WRONG_CONFIG) from error

    def _files(self) -> str | None:
        """Return the files of the kubeconfig, divided by `:`; None in a pod that has a service account."""
        files = self.address.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        if any(Path(file).expanduser().is_file() for file in files.split(os.pathsep) if file):
            return files
        if self.address.kubeconfig is None and _SERVICE_ACCOUNT.is_file():
            return None
        raise ConfigError(f"there is no kubeconfig {files}", hint=_NO_CONFIG)


def _pause_asked(error: Exception) -> float | None:
    return error.retry_after_s if isinstance(error, ClusterError) and error.is_temporary else None


def _refusal(error: ApiException) -> ClusterError:
    """Return our error for the server's answer, which is an object `Status`, or a text of a proxy before it."""
    text = str(error.body or error.reason or "")
    try:
        status = json.loads(text)
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    message = str(status.get("message") or text).strip()[:MAX_MESSAGE]
    asked = str((error.headers or {}).get("Retry-After", ""))
    return ClusterError(
        f"the API server says: {message or error.status}",
        status=error.status,
        reason=str(status.get("reason") or ""),
        retry_after_s=min(float(asked), MOST_ASKED_S) if asked.isdigit() else 0.0,
    )
