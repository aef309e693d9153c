"""Passes requests of programs on, unchanged, to a provider's own API: for the evaluation of agents."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from hermes_agents.serving.dialects import ModelRequest, mappings
from hermes_agents.serving.providers import PROVIDERS, one_message_each
from hermes_core import (
    AgentSettings,
    BadCompletion,
    ConfigError,
    Endpoint,
    EndpointDown,
    HttpRefusal,
    ModelError,
    ModelReply,
)
from hermes_core.agents.endpoint.http import client_options, read_bounded
from hermes_core.agents.replies import read_reply

if TYPE_CHECKING:
    import httpx

_EVENTS = "text/event-stream"
_BETWEEN_EVENTS = re.compile(rb"\r?\n\r?\n")
_OURS = ("temperature", "max_tokens", "extra_body", "seed", "cache_control")
"""Settings of the run that would change the program's request."""


@dataclass(frozen=True)
class Passage:
    """A request as it is sent to the provider."""

    query: bytes
    headers: Mapping[str, str]
    body: bytes
    streamed: bool
    dropped: list[str]
    """The names of the tools and servers that were removed from the request."""

    @property
    def digest(self) -> str:
        """Return a hash of the request."""
        return hashlib.sha256(self.query + b"\0" + self.body).hexdigest()


class Upstream:
    """The API at `base_url`, in the place of the agent `model`. Its `session` yields this object itself.

    A body is passed on byte for byte, unless it names another model, or asks the provider to work outside of the slot.
    Then the body is written anew, with the run's model and without tools and servers of the provider.

    Args:
        settings: the model, the key, the limits and the patience. The sampling is the program's.
        name: the API, one of `PROVIDERS`.

    Raises:
        ConfigError: a setting is missing, or would change the program's requests.
    """

    def __init__(self, settings: AgentSettings, name: str) -> None:
        self.api = PROVIDERS[name]
        if not settings.model:
            raise ConfigError(f"no model is named for upstream {name!r}", hint="give --model")
        fields = type(settings).model_fields
        if ours := [key for key in _OURS if getattr(settings, key) != fields[key].default]:
            raise ConfigError(
                f"{', '.join(ours)}: with upstream, the requests are passed on as the program makes them",
                hint="leave that out, and set it in the program's own way: see --agent.args and --agent.variables",
            )
        self.url = (settings.base_url or self.api.url).rstrip("/").removesuffix("/v1")
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"the base URL {self.url!r} is not the URL of a server", hint="write https://HOST")
        if settings.base_url is None and settings.api_key is None:
            raise ConfigError(
                f"there is no API key for {self.url}", hint=f"set {settings.key_variable}, or give a --base-url"
            )
        self.settings = settings
        self.model = settings.model
        whole = f"{self.url}/v1"
        self.endpoint = Endpoint(settings, whole, self.model, lambda: self._exchange("GET", "/v1/models", {}))
        self._client: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def session(self, **_: Any) -> AsyncIterator[Self]:
        """Yield this object, which answers the model calls of one rollout."""
        yield self

    async def check_endpoint(self) -> None:
        """Check that the API can be used, by a request for a very short answer.

        Raises:
            ModelError: the API can't be used.
        """
        body = json.dumps(self.api.trial(self.model)).encode()
        headers = {"content-type": "application/json"}
        patience_s = self.settings.check_patience_s

        async def ask() -> None:
            answer = await self._exchange("POST", self.api.path, headers, body, limit_s=patience_s)
            self._read(*answer, streamed=False, number=0)

        try:
            await self.endpoint.ask(ask, patience_s=patience_s)
        except EndpointDown:
            raise
        except ModelError as error:
            refusal = error.__cause__
            if not (isinstance(refusal, HttpRefusal) and refusal.status_code in (400, 422)):
                raise  # otherwise the API refused only this request, which says nothing about others

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.aclose()

    def passage(
        self, asked: ModelRequest, body: bytes, value: Mapping[str, Any], *, query: str, headers: Any
    ) -> Passage:
        """Return the request for the provider, and change `asked` so that each answer in it is one message.

        Args:
            asked: the request that was read.
            body, value: the request's body, and the JSON value of the body.
            query, headers: the request's query and headers.

        Raises:
            BadRequest: the provider would have to fetch a file or an image for this request.
        """
        kept, dropped = self.api.drop_remote_work(value)
        asked.messages = one_message_each(asked.messages)
        asked.passed_on, asked.dropped = True, dropped
        asked.unknown.clear()  # the provider's model gets these blocks
        if kept.get("model") != self.model:
            kept = {**kept, "model": self.model}
        if kept is not value:
            body = json.dumps(kept, separators=(",", ":")).encode()
        passed = {name: headers[name] for name in ("content-type", *self.api.headers) if name in headers}
        return Passage(query.encode("latin-1"), passed, body, asked.stream, dropped)

    async def answer(self, passage: Passage, number: int) -> tuple[ModelReply, bytes]:
        """Return the provider's answer twice: as a reply for the record, and as bytes.

        Args:
            number: the number of the call, for calls without an id.

        Raises:
            ModelError: the API failed, permanently or too often.
        """

        async def ask() -> tuple[ModelReply, bytes]:
            content, kind = await self._exchange(
                "POST", self.api.path, passage.headers, passage.body, query=passage.query
            )
            return self._read(content, kind, streamed=passage.streamed, number=number), content

        return await self.endpoint.ask(ask, tokens=lambda answer: answer[0].prompt_tokens + answer[0].completion_tokens)

    def _read(self, content: bytes, kind: str, *, streamed: bool, number: int) -> ModelReply:
        """Return the reply in an answer. This is called where a broken answer can still be retried."""
        if kind.startswith(_EVENTS) is not streamed:
            raise BadCompletion(
                f"the endpoint answered with {kind or 'no type'} instead of {_EVENTS if streamed else 'JSON'}",
                hint="check that the base URL is that of such an API",
            )
        answer = self.api.collect_stream(_events(content)) if streamed else _json(content)
        if not isinstance(answer, dict):
            said = content[:200].decode("utf-8", "replace")
            raise BadCompletion(
                f"the endpoint's answer is no JSON object: it says {said}",
                hint="check that the base URL is that of such an API",
            )
        return read_reply(self.api.completion(answer), number)

    async def _exchange(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        query: bytes = b"",
        limit_s: float = math.inf,
    ) -> tuple[bytes, str]:
        """Send a request. Return the body of the answer, and its content type.

        Raises:
            HttpRefusal: the answer is an error.
        """
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)  # rollouts are limited instead
            options = client_options(self.settings.base_url)
            self._client = httpx.AsyncClient(timeout=self.settings.request_timeout_s, limits=limits, **options)
        url = httpx.URL(self.url + path).copy_with(query=query or None)
        key = self.settings.api_key.get_secret_value() if self.settings.api_key else ""
        sent = {**(self.api.authorization(key) if key else {}), **headers}
        async with (
            asyncio.timeout(min(limit_s, self.settings.request_timeout_s)),
            self._client.stream(method, url, content=body, headers=sent) as response,
        ):
            self.endpoint.learn_limits(response.headers)
            content = await read_bounded(response.aiter_bytes(), self.settings.max_response_bytes)
        if response.status_code >= 400:
            raise HttpRefusal.of(response.status_code, content, response)
        return content, response.headers.get("content-type", "")


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _events(content: bytes) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a stream's events."""
    for event in _BETWEEN_EVENTS.split(content):
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if data and data != b"[DONE]":
            yield from mappings([json.loads(data)])
