"""Calls of a Nomad cluster's HTTP API, with patience for a busy or leaderless cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from hermes_core import PluginError, Settings, SingleFlight, TaskSet, repeat_call

try:
    import aiohttp
except ModuleNotFoundError as missing:
    raise PluginError(f"the package aiohttp is not installed: {missing}", hint="`pip install aiohttp`") from missing

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_LIMIT_S = 30.0
"""Time limit in seconds for one answer, without the wait of a blocking query."""
PATIENCE_S = 45.0
"""Seconds during which a call that the cluster can't answer at present is repeated."""
WAIT_S = 20.0
"""The wait of a blocking query. Longer ones would meet the time limits of proxies."""
AT_A_TIME = 24
"""Maximum number of calls at the same time. An agent of Nomad accepts 100 connections of one address, and each channel
needs one."""
ANSWER_BYTES, FRAME_BYTES = 32 << 20, 1 << 20
"""Maximum size of an answer, and of a frame of a websocket."""
CLOSE_LIMIT_S = 1.0
"""Seconds for a websocket to end in order."""
_LONGEST_PAUSE_S = 8.0
_FINAL = ("Enforcing job modify index", "error occurred", "errors occurred", "Permission denied", "ACL token")
"""Parts of errors with status 500 that say that the request is wrong, so that no repetition helps."""


class NomadError(Exception):
    """A call failed.

    Args:
        message: what Nomad or the network said.
        status: the HTTP status; None if there was no answer.
        pause_s: how long Nomad asks to wait before the next attempt, in seconds.
    """

    def __init__(self, message: str, status: int | None = None, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.message, self.status, self.pause_s = message, status, pause_s

    @property
    def passing(self) -> bool:
        """Return whether the same call may succeed later."""
        if self.status is None or self.status == 429:
            return True
        return self.status >= 500 and not any(part in self.message for part in _FINAL)


def _pause_asked(error: Exception) -> float | None:
    return error.pause_s if isinstance(error, NomadError) and error.passing else None


class Answer(NamedTuple):
    """The JSON value of an answer, and what its headers say."""

    data: Any
    position: int
    """The index for the next blocking query."""
    next_token: str
    """The place of the next page; empty if this is the last one."""


class NomadApi:
    """The HTTP API of the cluster at one address, and in one region."""

    def __init__(self, address: str, region: str | None, settings: Settings | None) -> None:
        self.address, self.region = address, region
        secret = None if settings is None else settings.secrets.get("NOMAD_TOKEN")
        self._headers = {} if secret is None else {"X-Nomad-Token": secret.get_secret_value()}
        self._work = TaskSet()
        self._opened: SingleFlight[aiohttp.ClientSession] = SingleFlight("the connection to Nomad", keep=True)
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._tls_context: ssl.SSLContext | None = None

    @property
    def has_token(self) -> bool:
        """Return whether calls carry an ACL token."""
        return bool(self._headers)

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        patience_s: float = PATIENCE_S,
    ) -> Answer:
        """Make a call, and repeat it while the cluster can't answer. All calls that we make may be repeated.

        Args:
            wait_s: the wait of a blocking query in seconds.
            patience_s: how long it is repeated, in seconds.

        Raises:
            NomadError: the call failed, or there was no answer in time.
        """
        return await repeat_call(
            partial(self._call_once, method, path, body, dict(query or {}), wait_s), _pause_asked, patience_s=patience_s
        )

    async def _call_once(self, method: str, path: str, body: Any, query: dict[str, str], wait_s: float) -> Answer:
        session = await self._opened.get(self._work, self._open_session)
        limit = aiohttp.ClientTimeout(total=CALL_LIMIT_S + wait_s * 1.1)  # Nomad adds a sixteenth to a wait
        try:
            async with (
                self._places,
                session.request(method, path, params=self._complete(query), json=body, timeout=limit) as response,
            ):
                raw = await _read_bounded(response)
                if response.status >= 400:
                    after = response.headers.get("Retry-After", "")
                    pause_s = min(float(after), _LONGEST_PAUSE_S) if after.isdigit() else 0.0
                    raise NomadError(_text(raw) or response.reason or "no reason given", response.status, pause_s)
                index, next_token = response.headers.get("X-Nomad-Index", ""), response.headers.get("X-Nomad-NextToken")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise NomadError(f"{self.address} could not be reached: {reason}") from error
        try:
            data = _check_shape(json.loads(raw or b"null"))
            return Answer(data, int(index) if index.isdigit() else 0, next_token or "")
        except (TypeError, ValueError) as error:
            raise NomadError(f"{self.address} answered {path} with nonsense: {_text(raw)}", 400) from error

    async def get_until(
        self, path: str, query: Mapping[str, str], enough: Callable[[T], Any], *, limit_s: float, kind: type[T]
    ) -> T:
        """Return the value of `path` once it is `enough`, or as it is after `limit_s` seconds. Raise as `call`, and if
        the value is of another kind."""
        loop = asyncio.get_running_loop()
        deadline, index = loop.time() + limit_s, 0
        while True:
            wait_s = min(WAIT_S, max(0.0, deadline - loop.time())) if index else 0.0
            blocking = {"index": str(index), "wait": f"{wait_s * 1000:.0f}ms"} if index and wait_s else {}
            answer = await self.call("GET", path, query={**query, **blocking}, wait_s=wait_s)
            if not isinstance(answer.data, kind):
                raise NomadError(f"{self.address} answered {path} with nonsense", 400)
            if enough(answer.data) or loop.time() >= deadline:
                return answer.data
            index = max(answer.position, 1) if answer.position >= index else 0  # an index that went back: begin anew
            await asyncio.sleep(0.05)  # an index may move for other reasons; don't turn that into a busy loop

    async def get_pages(self, path: str, query: Mapping[str, str], patience_s: float = PATIENCE_S) -> list[Any]:
        """Return the entries of all pages of a list."""
        entries: list[Any] = []
        token = ""
        while True:
            page = {"per_page": "500", **({"next_token": token} if token else {})}
            answer = await self.call("GET", path, query={**query, **page}, patience_s=patience_s)
            entries += answer.data if isinstance(answer.data, list) else []
            if not (token := answer.next_token):
                return entries

    async def open_websocket(self, path: str, query: Mapping[str, str]) -> WebSocket:
        """Open a websocket.

        Raises:
            NomadError: it can't be opened.
        """
        sockets: list[socket.socket] = []

        def make_socket(address: Any) -> socket.socket:
            made = socket.socket(*address[:3])
            made.setblocking(False)
            sockets.append(made)
            return made

        connector = aiohttp.TCPConnector(limit=0, ssl=await self._tls(), socket_factory=make_socket)
        session = aiohttp.ClientSession(self.address, connector=connector, headers=self._headers)
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                # No `heartbeat`: while a program does not read its input, Nomad reads no frames, and answers no ping.
                wire = await session.ws_connect(path, params=self._complete(query), max_msg_size=FRAME_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            await session.close()
            status = error.status if isinstance(error, aiohttp.WSServerHandshakeError) else None
            raise NomadError(f"{self.address} opens no websocket: {type(error).__name__}: {error}", status) from error
        except BaseException:  # it was cancelled
            await session.close()
            raise
        return WebSocket(wire, session, sockets)

    def _complete(self, query: Mapping[str, str]) -> dict[str, str]:
        return {**query, "region": self.region} if self.region else {**query}

    async def _open_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, ssl=await self._tls())
        return aiohttp.ClientSession(self.address, connector=connector, headers=self._headers)

    async def _tls(self) -> ssl.SSLContext | bool:
        if not self.address.startswith("https:"):
            return True
        if self._tls_context is None:
            self._tls_context = await asyncio.to_thread(_load_tls_context)
        return self._tls_context

    async def aclose(self) -> None:
        """Close the connections."""
        await self._work.aclose()
        session = self._opened.kept.pop(None, None)
        if session is not None:
            await session.close()


class WebSocket:
    """A websocket with a session and a connection of its own, so that it can be broken off."""

    def __init__(
        self, wire: aiohttp.ClientWebSocketResponse, session: aiohttp.ClientSession, sockets: list[socket.socket]
    ) -> None:
        self._wire, self._session, self._sockets = wire, session, sockets

    async def receive(self) -> Any:
        """Return the JSON value of the next frame.

        Raises:
            NomadError: the connection ended, with Nomad's reason if it gave one.
        """
        frame = await self._wire.receive()
        if frame.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            try:
                return json.loads(frame.data)
            except ValueError as error:
                raise NomadError("a frame of the exec is no JSON") from error
        reason = frame.extra if frame.type is aiohttp.WSMsgType.CLOSE else None
        raise NomadError(str(reason or "the websocket was closed"))

    async def send(self, value: Any) -> None:
        """Send a JSON value. Return when the connection has taken it. Raise `NomadError` if the connection ended."""
        try:
            await self._wire.send_json(value)
        except (aiohttp.ClientError, OSError) as error:
            raise NomadError(f"the websocket was closed: {error}") from error

    async def close(self) -> None:
        """Close the websocket, after what was sent has left; break it off if that takes too long."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._wire.close()
        except TimeoutError:
            log.debug("a websocket was broken off")
        finally:
            for each in self._sockets:
                with contextlib.suppress(OSError):  # it is closed already
                    each.shutdown(socket.SHUT_RDWR)
            await self._session.close()


def find_part(value: Any, *keys: str, kind: type[T]) -> T:
    """Return what is at these keys of an answer; an empty `kind` if it is missing or of another type."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, kind) else kind()


def _check_shape(data: Any) -> Any:
    """Return an answer, if it is an object, a list of objects, a text, or nothing; otherwise raise `ValueError`."""
    if data is None or isinstance(data, dict | str) or all(isinstance(each, dict) for each in data):
        return data
    raise ValueError("neither an object nor a list of objects")


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > ANSWER_BYTES:
            raise NomadError(f"an answer has more than {ANSWER_BYTES >> 20} MiB", 400)
    return bytes(raw)


def _text(raw: bytes) -> str:
    """Return an error's text in one line, without what Nomad puts before it."""
    text = " ".join(raw[:2000].decode("utf-8", "replace").split())
    return text.removeprefix("rpc error: ")[:600]


def _load_tls_context() -> ssl.SSLContext:
    """Return the TLS settings that Nomad's variables name. Blocks while files are read."""
    context = ssl.create_default_context(
        cafile=os.environ.get("NOMAD_CACERT") or None, capath=os.environ.get("NOMAD_CAPATH") or None
    )
    if certificate := os.environ.get("NOMAD_CLIENT_CERT"):
        context.load_cert_chain(certificate, os.environ.get("NOMAD_CLIENT_KEY") or None)
    if os.environ.get("NOMAD_SKIP_VERIFY", "").lower() in ("1", "true", "yes"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
