"""The connection to the daemon: calls the SDK in threads, and turns the SDK's errors into ours."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, TypeVar

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker import APIClient
from docker.credentials.errors import StoreError

from hermes_core import ImageError, InfraError, Workers

ASK_THE_DOCTOR = "`hermes-rl doctor docker` says what to do"
CALL_S = 60
"""Seconds that the daemon may be silent during a call."""

CUT_S = 10.0
"""Seconds to wait for a thread after its connection was cut."""

_THREADS = 16
_FORWARD = (
    "forward it, `ssh -L /tmp/docker.sock:/var/run/docker.sock HOST`, and set DOCKER_HOST=unix:///tmp/docker.sock"
)

T = TypeVar("T")


MAX_MESSAGE = 1000
"""Maximum number of characters of the daemon's message in an error. It may have a path of any length made by a slot."""


class DaemonError(InfraError):
    """The daemon refused a request or failed. `status` is the HTTP status; None if the daemon can't be reached."""

    def __init__(self, message: str, *, status: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.status = status


class DockerDaemon:
    """The daemon that DOCKER_HOST names, or this host's daemon. The first call connects."""

    def __init__(self) -> None:
        self._threads = Workers(_THREADS)  # unlike asyncio's threads, they work while the program ends
        self._connecting = threading.Lock()
        self._api: APIClient | None = None
        self._info: dict[str, Any] | None = None

    async def call(
        self,
        function: Callable[[APIClient], T],
        *,
        undo: Callable[[APIClient, T], object] | None = None,
        settle: bool = False,
    ) -> T:
        """Call the SDK in a thread, and return the result.

        If the caller is cancelled, the call still completes in its thread.

        Args:
            undo: called with the result if the caller was cancelled.
            settle: whether a cancelled caller waits until `undo` is done.

        Raises:
            DaemonError: the daemon can't be reached, or refuses.
        """
        future = self._threads.submit(self._work, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                undone = self._threads.submit(self._undo, undo, future)
                if settle:
                    await asyncio.wait([asyncio.wrap_future(undone)])
            raise

    async def follow(self, function: Callable[[APIClient], T]) -> T:
        """Call the SDK in a thread, on a connection of its own, without a limit on the daemon's silence.

        If the caller is cancelled, the connection is cut, at which the daemon stops a pull or a build. The cancelled
        caller waits for the thread, for `CUT_S` seconds at most.

        Raises:
            DaemonError: the daemon can't be reached, or refuses.
        """
        line = _CuttableLine()
        future = self._threads.submit(self._work_on, line, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            line.cut()
            if not future.cancelled():
                await asyncio.wait([asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)], timeout=CUT_S)
            raise

    async def info(self) -> dict[str, Any]:
        """Return the answer of `docker info`, which is requested once."""
        if self._info is None:
            self._info = dict(await self.call(lambda api: api.info()))
        return self._info

    async def aclose(self) -> None:
        """Close the connections. Running calls end by themselves. Idempotent."""
        self._threads.shutdown(wait=False)
        if self._api is not None:
            await asyncio.to_thread(self._api.close)

    def _work(self, function: Callable[[APIClient], T]) -> T:
        try:
            return function(self._connect())
        except Exception as error:
            ours = translate_error(error)
            if ours is error:
                raise
            raise ours from error

    def _work_on(self, line: _CuttableLine, function: Callable[[APIClient], T]) -> T:
        def work(known: APIClient) -> T:
            client = docker.DockerClient.from_env(timeout=None, version=known.api_version)  # type: ignore[arg-type]
            with closing(client.api) as api, closing(line):
                api.hooks["response"].append(line.began)
                return function(api)

        return self._work(work)

    def _connect(self) -> APIClient:
        with self._connecting:
            if self._api is None:
                if os.environ.get("DOCKER_HOST", "").startswith("ssh://"):
                    raise DaemonError(
                        "DOCKER_HOST=ssh://… is not supported: its streams are not sockets", hint=_FORWARD
                    )
                self._api = docker.DockerClient.from_env(timeout=CALL_S, max_pool_size=_THREADS).api
            return self._api

    def _undo(self, undo: Callable[[APIClient, T], object], future: Future[T]) -> None:
        """Undo a call once it has ended. Its result may be long in coming, so this runs in a thread, too."""
        if not future.cancelled() and future.exception() is None:  # `exception` waits for the end of the call
            undo(self._connect(), future.result())


class _CuttableLine:
    """A connection that another thread can cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._response: requests.Response | None = None
        self._is_cut = False

    def began(self, response: requests.Response, **_: Any) -> None:
        """Keep the daemon's response, whose body may take long, for `cut`.

        Raises:
            ConnectionAbortedError: the connection was cut before.
        """
        with self._lock:
            self._response = response
            if self._is_cut:
                raise ConnectionAbortedError("the caller has left")

    def cut(self) -> None:
        """Shut the connection down, which ends a read in another thread. Idempotent."""
        with self._lock:
            self._is_cut = True
            if self._response is not None:
                with suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
                    self._response.raw.shutdown()

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()


def translate_error(error: Exception) -> Exception:
    """Return our error for an error of the SDK. Other errors are returned unchanged."""
    if isinstance(error, docker.errors.APIError):
        message = str(error.explanation or error).strip()
        return DaemonError(f"the Docker daemon says: {message[:MAX_MESSAGE]}", status=error.status_code)
    if isinstance(error, StoreError) or isinstance(error.__cause__, StoreError):
        return ImageError(
            f"the credentials for registries can't be read: {str(error.__cause__ or error).strip()[:MAX_MESSAGE]}",
            hint="install the program that credsStore or credHelpers names in Docker's configuration "
            "(~/.docker/config.json), or remove that entry: public images need none",
        )
    if isinstance(
        error, docker.errors.DockerException | requests.RequestException | urllib3.exceptions.HTTPError | OSError
    ):
        return DaemonError(f"the Docker daemon can't be reached: {reason(error)}", hint=ASK_THE_DOCTOR)
    return error


def reason(error: BaseException) -> str:
    """Return the operating system's message from the chain of causes, or else the error's own text."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return str(error)
