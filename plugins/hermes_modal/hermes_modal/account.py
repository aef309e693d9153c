"""The connection to Modal: one client, a time limit for every call, and our errors for Modal's."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import modal
from modal import exception
from modal.config import config as modal_config

from hermes_core import (
    ChannelLost,
    ConfigError,
    HermesError,
    ImageError,
    ProvisionError,
    SandboxLost,
    SingleFlight,
    TaskSet,
)
from hermes_modal.config import ModalSandboxConfig

log = logging.getLogger(__name__)

CALL_LIMIT_S = 30.0
"""Time limit of an ordinary call in seconds, because the SDK may retry without end."""
CREATE_LIMIT_S = 600.0
"""Time limit in seconds for creating a sandbox, including the build of its image."""
AT_A_TIME = 8
"""Maximum number of creations at the same time, over all pools of the process."""
PER_SECOND = 5.0
"""Maximum number of creations started per second, over all pools of the process."""
LOOK_S = 0.02
"""Seconds between checks for a free place."""

FAILURES = (exception.Error, TimeoutError, OSError)
"""The errors that a call of the SDK within a time limit may raise."""

T = TypeVar("T")

_QUOTA = "check the Modal dashboard for quota limits; lower max_sandboxes, or end other sandboxes"
_TOKEN = "`modal token new` makes a token; MODAL_TOKEN_ID and MODAL_TOKEN_SECRET name one"
_IMAGE = (
    "verify that the image exists and is accessible; a private registry needs registry_secret; "
    "`--backend.image=NAME` names another image"
)
_HINTS: dict[type[Exception], tuple[str, bool]] = {
    exception.AuthError: (_TOKEN, False),
    exception.PermissionDeniedError: ("ask for the right in Modal's workspace settings", False),
    exception.ResourceExhaustedError: (_QUOTA, True),
    exception.ImageBuildError: (_IMAGE, False),
    exception.RemoteError: (_IMAGE, False),
    exception.NotFoundError: ("check the names of secrets, volumes and snapshots in the profile", False),
    exception.InvalidError: ("change what the profile asks for", False),
    exception.VersionError: ("install the version of the SDK that Modal asks for", False),
}
"""For each class of error a hint, and whether the problem may be temporary."""


class CreationPace:
    """Limits the rate of creations, and their number at the same time, over all event loops of the process."""

    def __init__(self, at_a_time: int, per_second: float) -> None:
        self._places = threading.BoundedSemaphore(at_a_time)
        self._lock = threading.Lock()
        self._pause_s = 1 / per_second
        self._next_start = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place for one creation, and for the time that the rate allows. Hold the place during the block."""
        while not self._places.acquire(blocking=False):  # noqa: ASYNC110 - a place may be freed in another loop
            await asyncio.sleep(LOOK_S)
        try:
            with self._lock:
                start = max(time.monotonic(), self._next_start)
                self._next_start = start + self._pause_s
            await asyncio.sleep(start - time.monotonic())
            yield
        finally:
            self._places.release()


pace = CreationPace(AT_A_TIME, PER_SECOND)
"""One pace for the whole process, because Modal's limits are per account."""


class Account:
    """The client of one backend. It connects when it is first used."""

    def __init__(self) -> None:
        self._work = TaskSet()
        self._client: SingleFlight[Any] = SingleFlight("the connection to Modal", keep=True)
        self._apps: dict[str, Any] = {}

    async def client(self) -> Any:
        """Return the SDK's client.

        Raises:
            ConfigError: there is no token.
            exception.Error, TimeoutError: Modal refuses the token, or can't be reached.
        """
        return await self._client.get(self._work, self._connect)

    async def _connect(self) -> Any:
        token = modal_config.get("token_id"), modal_config.get("token_secret")
        if not all(token):
            raise ConfigError("there is no Modal token", hint=_TOKEN)
        await _check_there(str(modal_config.get("server_url")))
        return await self.call(modal.Client.from_credentials.aio(*token))

    async def call(self, work: Awaitable[T], limit_s: float = CALL_LIMIT_S) -> T:
        """Return the outcome of a call of the SDK. Raises `TimeoutError` after `limit_s` seconds."""
        async with asyncio.timeout(limit_s):
            return await work

    async def app(self, name: str, *, create: bool) -> Any:
        """Return the app with this name; None if there is none and `create` is false."""
        if name not in self._apps:
            look_up = modal.App.lookup.aio(name, client=await self.client(), create_if_missing=create)
            try:
                self._apps[name] = await self.call(look_up)
            except exception.NotFoundError:
                return None
        return self._apps[name]

    async def aclose(self) -> None:
        """Close the connection. Sandboxes stay."""
        await self._work.aclose()
        client = self._client.kept.pop(None, None)
        self._apps.clear()
        if client is not None:
            await self.call(client.close.aio())


async def _check_there(url: str) -> None:
    """Check that the server listens, if it is on this host, because the SDK would retry for minutes.

    Raises:
        ProvisionError: nothing listens there.
    """
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        return
    try:
        async with asyncio.timeout(CALL_LIMIT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as error:
        raise ProvisionError(
            f"no Modal server is at {url} ({error.strerror or type(error).__name__})",
            hint="unset MODAL_SERVER_URL for Modal itself, or start the emulator: python -m hermes_modal_emulator",
            retryable=False,
        ) from error
    writer.close()


def not_created(error: Exception, config: ModalSandboxConfig, step: str) -> HermesError:
    """Return our error for one of `FAILURES` that was raised while a sandbox was created."""
    hint, temporary = _advice(error)
    reason = "it took too long" if isinstance(error, TimeoutError) else f"{error}" or type(error).__name__
    if hint == _IMAGE and config.image is not None:
        reason = f"image {config.image!r}: {reason}"
    message = f"profile {config.name!r}: {step} failed: {reason}"
    if isinstance(error, exception.ImageBuildError):
        return ImageError(message, hint=hint)
    return ProvisionError(message, hint=hint, retryable=temporary)


def not_reached(error: Exception, sandbox_id: str) -> HermesError:
    """Return our error for one of `FAILURES` that was raised by a call about a sandbox."""
    if isinstance(error, exception.NotFoundError | exception.ConflictError | exception.SandboxTerminatedError):
        return SandboxLost(f"the sandbox has ended: {error}", sandbox_id=sandbox_id)
    reason = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    return ChannelLost(f"Modal could not be reached: {reason}", hint=_advice(error)[0], sandbox_id=sandbox_id)


@contextmanager
def errors_of(sandbox_id: str) -> Iterator[None]:
    """Raise our errors for `FAILURES` of the calls in the block, which are about this sandbox."""
    try:
        yield
    except FAILURES as error:
        raise not_reached(error, sandbox_id) from error


def _advice(error: Exception) -> tuple[str, bool]:
    for kind in type(error).__mro__:
        if kind in _HINTS:
            return _HINTS[kind]
    return "see https://status.modal.com; `hermes-rl doctor modal` says whether Modal answers", True
