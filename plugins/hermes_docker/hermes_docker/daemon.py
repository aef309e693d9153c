"""The way to the daemon: its SDK called in threads of our own, and what it answers as errors of ours."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import docker
import docker.errors
import requests
from docker import APIClient

from hermes_core import InfraError, Workers

ASK_THE_DOCTOR = "`hermes-rl doctor docker` says what to do"
CALL_S = 60
"""Seconds that the daemon may keep silent in one call."""

_THREADS = 16
_FORWARD = (
    "forward it, `ssh -L /tmp/docker.sock:/var/run/docker.sock HOST`, and set DOCKER_HOST=unix:///tmp/docker.sock"
)

T = TypeVar("T")


SAID = 1000
"""Characters of the daemon's words that an error repeats at most."""


class DaemonError(InfraError):
    """The daemon refused something or failed at it; `status` is that of its answer, None if it can't be reached."""

    def __init__(self, message: str, *, status: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.status = status


class Daemon:
    """The daemon that DOCKER_HOST names, or the one of this host. Connected to when first called."""

    def __init__(self) -> None:
        self._threads = Workers(_THREADS)  # which can also be called while the program ends
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
        """Do something with the SDK, in a thread.

        Cancelled, it goes on to its end there; its outcome, which nobody takes any more, is given to `undo`. With
        `settle` the cancelled call ends when that is done.

        Raises:
            DaemonError: the daemon can't be reached, or says no.
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

    async def info(self) -> dict[str, Any]:
        """What the daemon says of itself, asked once."""
        if self._info is None:
            self._info = dict(await self.call(lambda api: api.info()))
        return self._info

    async def aclose(self) -> None:
        """Drop the connections. Calls that are under way end by themselves. Idempotent."""
        self._threads.shutdown(wait=False)
        if self._api is not None:
            await asyncio.to_thread(self._api.close)

    def _work(self, function: Callable[[APIClient], T]) -> T:
        try:
            return function(self._connected())
        except Exception as error:
            raised = translated(error)
            if raised is error:
                raise
            raise raised from error

    def _connected(self) -> APIClient:
        with self._connecting:
            if self._api is None:
                if os.environ.get("DOCKER_HOST", "").startswith("ssh://"):
                    raise DaemonError(
                        "DOCKER_HOST=ssh://… is not supported: its streams are not sockets", hint=_FORWARD
                    )
                self._api = docker.DockerClient.from_env(timeout=CALL_S, max_pool_size=_THREADS).api
            return self._api

    def _undo(self, undo: Callable[[APIClient, T], object], future: Future[T]) -> None:
        if not future.cancelled() and future.exception() is None:  # waits for its end, which has a thread of its own
            undo(self._connected(), future.result())


def translated(error: Exception) -> Exception:
    """An error of the SDK as ours; another one as it is."""
    if isinstance(error, docker.errors.APIError):
        said = str(error.explanation or error).strip()  # it may repeat a path that a slot has made, of any length
        return DaemonError(f"the Docker daemon says: {said[:SAID]}", status=error.status_code)
    if isinstance(error, docker.errors.DockerException | requests.RequestException | OSError):
        return DaemonError(f"the Docker daemon can't be reached: {reason(error)}", hint=ASK_THE_DOCTOR)
    return error


def reason(error: BaseException) -> str:
    """The system's own words, if there are some below what the libraries wrapped around them."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return str(error)
