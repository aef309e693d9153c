"""E2B's API through its SDK: sandboxes are created, found, kept alive and ended. Each call has a time limit.

The module imports parts of the SDK that its documentation does not mention, because the documented ones give no access
token of an existing sandbox, and decode the output of programs. A test names each of these parts.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from e2b import AsyncSandbox, ConnectionConfig, SandboxException, SandboxQuery
from e2b import SandboxInfo as ListedSandbox
from e2b.api import handle_api_exception
from e2b.api.client.api.sandboxes import get_sandboxes_sandbox_id, post_sandboxes
from e2b.api.client.models import NewSandbox, SandboxDetail
from e2b.api.client.models import Sandbox as CreatedSandbox
from e2b.api.client_async import get_api_client
from e2b.envd.client_async import create_rpc_client
from e2b.envd.process.process_connect import ProcessClient
from e2b.exceptions import SandboxNotFoundException

from hermes_core import ProvisionError

CALL_LIMIT_S = 30.0
"""Time limit of a call in seconds, with the SDK's own attempts after a refusal."""
CREATE_LIMIT_S = 90.0
"""Time limit of a creation in seconds, with the SDK's own attempts after a refusal."""
EXTEND_LIMIT_S = 10.0
"""Time limit in seconds of a call that keeps a sandbox alive, because other sandboxes wait for it."""
PAGE = 100
"""Number of sandboxes in a page of a list, E2B's maximum."""
MOST_PAGES = 200
"""Maximum number of pages of a list."""


@dataclass(frozen=True)
class SandboxRequest:
    """What a new sandbox is to have, in the words of E2B's API.

    Args:
        timeout_s: seconds after which E2B ends the sandbox, unless `ControlPlane.extend` moves its end.
        environment: variables of all programs in the sandbox.
        allow_internet_access: None leaves the choice to the rules of `network`.
        network: a dictionary with the lists `allow_out` and `deny_out`; None has no rules.
    """

    template: str
    timeout_s: int
    metadata: Mapping[str, str]
    environment: Mapping[str, str]
    allow_internet_access: bool | None = None
    network: Any = None

    def body(self) -> dict[str, Any]:
        """Return the request's body for `POST /sandboxes`."""
        body: dict[str, Any] = {
            "templateID": self.template,
            "timeout": self.timeout_s,
            "autoPause": False,
            "secure": True,
            "metadata": dict(self.metadata),
            "envVars": dict(self.environment),
        }
        if self.allow_internet_access is not None:
            body["allow_internet_access"] = self.allow_internet_access
        if self.network is not None:
            names = {"allow_out": "allowOut", "deny_out": "denyOut"}
            body["network"] = {names[key]: [*value] for key, value in self.network.items()}
        return body


@dataclass(frozen=True)
class Machine:
    """A sandbox of E2B's, and the client of the process service inside of it."""

    sandbox_id: str
    processes: ProcessClient


class ControlPlane:
    """The API of the E2B account that a key names. E2B_DOMAIN, E2B_API_URL and E2B_SANDBOX_URL name another server.

    Args:
        api_key: None is the value of E2B_API_KEY.
    """

    def __init__(self, api_key: str | None) -> None:
        self._api_key = api_key

    @property
    def url(self) -> str:
        """Return the address of the API."""
        return str(ConnectionConfig(**self._options()).api_url)

    def _options(self, limit_s: float = CALL_LIMIT_S) -> dict[str, Any]:
        return {"api_key": self._api_key, "debug": False, "request_timeout": limit_s}

    async def create(self, request: SandboxRequest) -> Machine:
        """Create a sandbox. If the answer is lost, the sandbox may exist all the same."""
        try:
            made = await AsyncSandbox.create(
                request.template,
                timeout=request.timeout_s,
                metadata=dict(request.metadata),
                envs=dict(request.environment),
                allow_internet_access=request.allow_internet_access,
                network=request.network,
                lifecycle={"on_timeout": "kill"},
                idempotency_key=str(uuid.uuid4()),
                **self._options(CREATE_LIMIT_S),
            )
        except SandboxException as error:
            if not _lacks_route(error):
                raise
            return await self._create_by_older_route(request)
        return self._machine(made.sandbox_id, made.envd_api_url, made.connection_config)

    async def _create_by_older_route(self, request: SandboxRequest) -> Machine:
        """Create a sandbox on a server without `POST /v2/sandboxes`, such as AgentENV."""
        client = get_api_client(ConnectionConfig(**self._options(CREATE_LIMIT_S)))
        answer = await post_sandboxes.asyncio_detailed(client=client, body=NewSandbox.from_dict(request.body()))
        if answer.status_code >= 300:
            raise handle_api_exception(answer)
        if not isinstance(answer.parsed, CreatedSandbox):
            raise ProvisionError(f"E2B answered with no sandbox: {answer.content[:200]!r}")
        return self._reach(answer.parsed.sandbox_id, answer.parsed)

    async def find(self, sandbox_id: str) -> SandboxDetail | None:
        """Return all about a sandbox; None if there is none with this id."""
        client = get_api_client(ConnectionConfig(**self._options()))
        answer = await get_sandboxes_sandbox_id.asyncio_detailed(sandbox_id, client=client)
        if answer.status_code == 404:
            return None
        if answer.status_code >= 300:
            raise handle_api_exception(answer)
        if not isinstance(answer.parsed, SandboxDetail):
            raise SandboxException(f"E2B answered with no sandbox: {answer.content[:200]!r}")
        return answer.parsed

    def machine(self, detail: SandboxDetail) -> Machine:
        """Return the machine of a sandbox that was found."""
        return self._reach(detail.sandbox_id, detail)

    async def list(self, metadata: Mapping[str, str]) -> list[ListedSandbox]:
        """Return the running and paused sandboxes with these values in their metadata."""
        pages = AsyncSandbox.list(query=SandboxQuery(metadata=dict(metadata)), limit=PAGE, **self._options())
        found: list[ListedSandbox] = []
        for _ in range(MOST_PAGES):
            if not pages.has_next:
                break
            found += await pages.next_items()
        return found

    async def extend(self, sandbox_id: str, timeout_s: int) -> bool:
        """Let the sandbox end in `timeout_s` seconds from now. Return whether there is one with this id."""
        try:
            await AsyncSandbox.set_timeout(sandbox_id, timeout_s, **self._options(EXTEND_LIMIT_S))
        except SandboxNotFoundException:
            return False
        return True

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox, if it exists."""
        await AsyncSandbox.kill(sandbox_id, **self._options())

    def _reach(self, sandbox_id: str, about: CreatedSandbox | SandboxDetail) -> Machine:
        """Return the machine of a sandbox from the domain and the token in an answer of the API."""
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if isinstance(about.envd_access_token, str):
            headers["X-Access-Token"] = about.envd_access_token
        connection = ConnectionConfig(extra_sandbox_headers=headers, **self._options())
        domain = about.domain if isinstance(about.domain, str) else connection.domain
        return self._machine(sandbox_id, connection.get_sandbox_url(sandbox_id, domain), connection)

    def _machine(self, sandbox_id: str, url: str, connection: ConnectionConfig) -> Machine:
        return Machine(sandbox_id, create_rpc_client(ProcessClient, url, connection))


def _lacks_route(error: SandboxException) -> bool:
    """Return whether a server refused `POST /v2/sandboxes` because it only knows the older `POST /sandboxes`."""
    return error.status_code == 405 or (error.status_code == 404 and "page not found" in str(error).lower())
