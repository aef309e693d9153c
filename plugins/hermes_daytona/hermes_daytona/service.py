"""The calls of Daytona's API: a time limit for each, waiting when there were too many, and one kind of failure."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import aiohttp
from daytona_api_client_async import ApiClient, ConfigApi, Configuration, CreateSandbox, SandboxApi
from daytona_api_client_async.exceptions import ApiException, OpenApiException
from pydantic import ValidationError

from hermes_core import ChannelLost, ConfigError, HermesError, ImageError, ProvisionError, SandboxLost, SandboxStatus
from hermes_daytona.config import DaytonaConfig

API_URL = "https://app.daytona.io/api"
CALL_LIMIT_S = 30.0
"""Time limit in seconds of an ordinary call, including the pauses that Daytona asks for."""
REQUEST_LIMIT_S = 20.0
"""Time limit in seconds of one request."""
LONGEST_PAUSE_S = 60.0
POLL_S, LONGEST_POLL_S = 0.1, 2.0
"""The first and the longest time in seconds between two looks at a sandbox's state."""
PAGE = 100
TOKEN_MINUTES = 24 * 60
"""How long an SSH token is valid. Each connection has its own."""
UNTRUSTED = 526
"""The status of a failure because the SSH gateway has another key than it should have."""
ATTEMPTS = 3
"""How often a request is sent that may be sent twice, if the server fails."""

_KEY_HINT = "make one at https://app.daytona.io/dashboard/keys, and set DAYTONA_API_KEY"
_PENDING = {
    *("creating", "restoring", "starting", "pending_build", "building_snapshot", "pulling_snapshot", "unknown"),
    *("resizing", "snapshotting", "forking", "resuming"),
}
_GONE = {"destroyed", "destroying"}

T = TypeVar("T")


class ServiceFailed(Exception):
    """A call of Daytona's API failed.

    Args:
        message: what Daytona says, or what became of the request.
        status: the HTTP status; None if there was no answer.
        hint: what to do, if it is not the usual advice for the status.
    """

    def __init__(self, message: str, status: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.hint = hint

    @property
    def unknown_outcome(self) -> bool:
        """Whether the request may have been carried out nevertheless."""
        return self.status is None or self.status >= 500


class BuildFailed(ServiceFailed):
    """The image could not be pulled."""


@dataclass(frozen=True)
class SshAccess:
    """What it takes to log in to a sandbox."""

    host: str
    port: int
    token: str
    host_keys: tuple[str, ...]
    """Public keys of the gateway, each `<type> <base64>`."""


class DaytonaService:
    """The API of the account that a key belongs to. It connects when it is first used.

    Args:
        key: the API key; None if there is none, which the first call reports.
    """

    def __init__(self, key: str | None) -> None:
        self.url = os.environ.get("DAYTONA_API_URL") or API_URL
        self._key = key
        self._host_key = os.environ.get("DAYTONA_SSH_HOST_KEY")
        self._client: Any = None

    @property
    def client(self) -> Any:
        """Return the client of the SDK. Raises `ConfigError` if there is no key."""
        if self._client is None:
            if not self._key:
                raise ConfigError("there is no Daytona API key", hint=_KEY_HINT)
            self._client = ApiClient(Configuration(host=self.url))
            self._client.default_headers["Authorization"] = f"Bearer {self._key}"
        return self._client

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def describe_deployment(self) -> Any:
        """Return what the deployment says of itself, such as the SSH gateway's keys."""
        return await self._call(ConfigApi(self.client).config_controller_get_config)

    async def create(self, sandbox: CreateSandbox) -> Any:
        """Create a sandbox, and return its description without waiting for its start. The request is sent once."""
        return await self._call(partial(self._api.create_sandbox, sandbox), attempts=1)

    async def find(self, name: str) -> Any:
        """Return the description of a sandbox by its name or id; None if there is none."""
        try:
            found = await self._call(partial(self._api.get_sandbox, name))
        except ServiceFailed as error:
            if error.status in (404, 410):
                return None
            raise
        return None if found.state == "destroyed" else found

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[Any]:
        """Yield the descriptions of all sandboxes with these labels, a page at a time."""
        words, cursor = json.dumps(dict(labels)), None
        while True:
            page = await self._call(partial(self._api.list_sandboxes, labels=words, cursor=cursor, limit=PAGE))
            for each in page.items:
                if each.state not in _GONE:
                    yield each
            cursor = page.next_cursor
            if not cursor:
                return

    async def wait_for_start(self, sandbox_id: str, limit_s: float) -> Any:
        """Return the sandbox's description once it has started.

        Raises:
            ServiceFailed: it did not start; with status 404 if it is gone.
            TimeoutError: it took longer than `limit_s` seconds.
        """
        async with asyncio.timeout(limit_s):
            pause = POLL_S
            while True:
                found = await self.find(sandbox_id)
                if found is None:
                    raise ServiceFailed("the sandbox is gone", 404)
                if found.state == "started":
                    return found
                if status_of(found) is not SandboxStatus.RUNNING:
                    failure = BuildFailed if found.state == "build_failed" else ServiceFailed
                    reason = found.error_reason or f"its state is {_word(found.state)}"
                    raise failure(f"it did not start: {reason[:2000]}", 422)
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, LONGEST_POLL_S)

    async def delete(self, sandbox_id: str, limit_s: float = 2 * CALL_LIMIT_S) -> None:
        """Delete a sandbox, by its name or id, and wait until it is gone. Idempotent.

        Raises:
            ServiceFailed: Daytona refuses, or it takes longer than `limit_s` seconds.
        """
        asked, pause = False, POLL_S
        try:
            async with asyncio.timeout(limit_s):
                while (found := await self.find(sandbox_id)) is not None:
                    if not asked and found.state != "destroying":
                        asked = await self._ask_to_delete(sandbox_id)
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, LONGEST_POLL_S)
        except TimeoutError as error:
            raise ServiceFailed(f"the sandbox was not gone after {limit_s:.0f} s") from error

    async def _ask_to_delete(self, sandbox_id: str) -> bool:
        """Ask for the deletion. Return False if the sandbox is changing its state, so that it has to be asked again."""
        try:
            await self._call(partial(self._api.delete_sandbox, sandbox_id))
        except ServiceFailed as error:
            if error.status == 409:
                return False
            if error.status not in (404, 410):
                raise
        return True

    async def refresh(self, sandbox_id: str) -> None:
        """Tell Daytona that the sandbox is in use."""
        await self._call(partial(self._api.update_last_activity, sandbox_id))

    async def grant_access(self, sandbox_id: str) -> SshAccess:
        """Return a fresh token for the sandbox's SSH gateway.

        Raises:
            ConfigError: neither DAYTONA_SSH_HOST_KEY nor the API names a key of the gateway.
        """
        granted = await self._call(partial(self._api.create_ssh_access, sandbox_id, expires_in_minutes=TOKEN_MINUTES))
        host, port = _address(granted.ssh_command, granted.token)
        keys = (self._host_key,) if self._host_key else (await self.describe_deployment()).ssh_gateway_host_keys
        if not keys:
            hint = "set DAYTONA_SSH_HOST_KEY to `<type> <base64>`, as the administrator of the deployment says it"
            raise ConfigError(f"the API at {self.url} names no key of the SSH gateway {host}", hint=hint)
        return SshAccess(host, port, granted.token, tuple(keys))

    @property
    def _api(self) -> Any:
        return SandboxApi(self.client)

    async def _call(self, request: Callable[..., Awaitable[T]], *, attempts: int = ATTEMPTS) -> T:
        """Return the answer to a request. A request that Daytona did not take, because there were too many, is sent
        again after the pause that it asks for.

        Raises:
            ServiceFailed: there is none.
        """
        end, failures = time.monotonic() + CALL_LIMIT_S, 0
        while True:
            try:
                return await request(_request_timeout=REQUEST_LIMIT_S)
            except ApiException as error:
                failure, cause, pause = ServiceFailed(_message(error), error.status), error, _pause_s(error)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure, cause, pause = ServiceFailed(f"{type(error).__name__}: {error}"), error, 0.5
            except (OpenApiException, ValidationError) as error:
                raise ServiceFailed(f"Daytona's answer is not understood: {error}"[:500], 502) from error
            failures += failure.unknown_outcome
            again = failure.status == 429 or (failure.unknown_outcome and failures < attempts)
            if not again or time.monotonic() + pause > end:
                raise failure from cause
            await asyncio.sleep(pause)


def status_of(sandbox: Any) -> SandboxStatus:
    """Return our word for the state of a sandbox."""
    state = _word(sandbox.state)
    if state == "started" or state in _PENDING:
        return SandboxStatus.RUNNING
    return SandboxStatus.GONE if state in _GONE else SandboxStatus.ENDED


_HINTS: Mapping[int | None, tuple[str, bool]] = {
    400: ("change what the profile asks for; a snapshot must exist, and be active", False),
    401: (_KEY_HINT, False),
    403: ("https://app.daytona.io/dashboard/limits shows your limits; the key needs WRITE_SANDBOXES", True),
    404: ("check the names of the snapshot, the volumes and the secrets in the profile", False),
    422: ("the sandbox's page on the Daytona dashboard says more; `--backend.image=NAME` names another image", False),
    429: ("lower max_sandboxes, or ask Daytona for higher rate limits", True),
    UNTRUSTED: ("do not go on; DAYTONA_SSH_HOST_KEY names the key of a gateway of your own", False),
}
"""For each status a hint, and whether the problem may be temporary."""


_NETWORK = ("check the network, and https://status.daytona.io", True)


def advice(error: Exception) -> str:
    """Return what to do about a failure."""
    hint, _ = _HINTS.get(getattr(error, "status", None), _NETWORK)
    return getattr(error, "hint", None) or hint


def not_created(error: Exception, config: DaytonaConfig) -> HermesError:
    """Return our error for a failure to create a sandbox."""
    _, temporary = _HINTS.get(getattr(error, "status", None), _NETWORK)
    message = f"profile {config.name!r}: no sandbox could be created: {_reason(error)}"
    if isinstance(error, BuildFailed):
        return ImageError(f"{message} (image {config.image!r})", hint=advice(error))
    return ProvisionError(message, hint=advice(error), retryable=temporary)


def not_reached(error: Exception, sandbox_id: str) -> HermesError:
    """Return our error for a failure to reach a sandbox."""
    if getattr(error, "status", None) in (404, 410):
        return SandboxLost(f"the sandbox does not exist any more: {error}", sandbox_id=sandbox_id)
    return ChannelLost(f"the sandbox can't be reached: {_reason(error)}", hint=advice(error), sandbox_id=sandbox_id)


def _reason(error: Exception) -> str:
    return "it took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _word(state: Any) -> str:
    return str(getattr(state, "value", state))


def _message(error: ApiException) -> str:
    """Return what the body of an answer says."""
    try:
        body = json.loads(error.body or "")
    except ValueError:
        body = None
    said = body.get("message") if isinstance(body, dict) else None
    return str(said or error.reason or f"HTTP status {error.status}")[:2000]


def _pause_s(error: ApiException) -> float:
    """Return the pause that Daytona asks for, in seconds. The header's name ends with the limit that was exceeded."""
    asked = [value for name, value in (error.headers or {}).items() if name.lower().startswith("retry-after")]
    seconds = [float(value) for value in asked if value.isdigit()]
    return min(max(seconds, default=1.0), LONGEST_PAUSE_S)


def _address(command: str, token: str) -> tuple[str, int]:
    """Return host and port of an `ssh` command for this token. Raises `ServiceFailed` if it is no such command."""
    words = shlex.split(command)
    hosts = [word.removeprefix(f"{token}@") for word in words if word.startswith(f"{token}@")]
    ports = [following for word, following in pairwise(words) if word == "-p"] or ["22"]
    if len(hosts) != 1 or not hosts[0] or not ports[0].isdigit():
        raise ServiceFailed("Daytona's SSH command is not understood", 502)
    return hosts[0], int(ports[0])
