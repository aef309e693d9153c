"""E2B's API through its SDK: sandboxes are created, found, kept alive and ended. Each call has a time limit.

The module imports parts of the SDK that its documentation does not mention, because the documented ones give no access
token of an existing sandbox, and decode the output of programs. A test names each of these parts.
"""

from __future__ import annotations

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
class VirtualMachine:
    """A sandbox of E2B's, and the client of the process service inside of it."""

    sandbox_id: str
    processes: ProcessClient


class E2bApi:
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

    @property
    def has_key(self) -> bool:
        """Return whether there is a key."""
        return ConnectionConfig(**self._options()).api_key is not None

    def _options(self, limit_s: float = CALL_LIMIT_S) -> dict[str, Any]:
        return {"api_key": self._api_key, "debug": False, "request_timeout": limit_s}

    async def create(self, request: Mapping[str, Any]) -> VirtualMachine:
        """Create a sandbox. If the answer is lost, the sandbox may exist all the same.

        The SDK's own `create` uses `POST /v2/sandboxes`, which servers other than E2B's often lack.

        Args:
            request: the body of `POST /sandboxes`, as E2B's API describes it.
        """
        client = get_api_client(ConnectionConfig(**self._options(CREATE_LIMIT_S)))
        answer = await post_sandboxes.asyncio_detailed(client=client, body=NewSandbox.from_dict(request))
        if answer.status_code >= 300:
            raise handle_api_exception(answer)
        if not isinstance(answer.parsed, CreatedSandbox):
            raise SandboxException(f"E2B answered with no sandbox: {answer.content[:200]!r}")
        return self.machine(answer.parsed)

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

    def machine(self, about: CreatedSandbox | SandboxDetail) -> VirtualMachine:
        """Return the machine of a sandbox from the domain and the token in an answer of the API."""
        headers = {"E2b-Sandbox-Id": about.sandbox_id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if isinstance(about.envd_access_token, str):
            headers["X-Access-Token"] = about.envd_access_token
        connection = ConnectionConfig(extra_sandbox_headers=headers, **self._options())
        domain = about.domain if isinstance(about.domain, str) else connection.domain
        url = connection.get_sandbox_url(about.sandbox_id, domain)
        return VirtualMachine(about.sandbox_id, create_rpc_client(ProcessClient, url, connection))

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
