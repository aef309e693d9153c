"""Asks a server for tokens: sends token ids, and receives sampled token ids and logprobs (`wires` has the formats)."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.endpoint.errors import BadCompletion, HttpRefusal, public_url
from hermes_core.agents.endpoint.http import is_loopback, read_bounded
from hermes_core.agents.endpoint.request import Endpoint
from hermes_core.agents.exact.wires import WIRES, Sampled, Wire, check_sampled
from hermes_core.agents.model import derive_seed
from hermes_core.errors import ConfigError, ModelError, UnknownNameError, nearest_hint

if TYPE_CHECKING:
    import aiohttp


_CLOSED = re.compile(r"--enable-[\w-]+|\bdisabled\b", re.IGNORECASE)
"""Matches a server's message about a path that is off because of the options with which the server was started."""

_UNNAMED = "default"
"""The model name for a server that has only one model and needs no name."""


@dataclass(frozen=True)
class Served:
    """The facts that a server reports about itself at `/v1/models`."""

    kind: str | None = None
    """The type of the server, `vllm` or `sglang`; None if it is another type, or not reported."""
    context: int | None = None
    """Maximum number of tokens of a prompt and its completion; None if the server does not report it."""


class TokenServer(Protocol):
    """A server that takes token ids, and gives the sampled ones with their logprobs. The methods are described at
    `GenerateServer`."""

    settings: AgentSettings
    url: str
    """The server's URL, for messages."""
    endpoint: Endpoint

    @property
    def raw_logprobs(self) -> bool:
        """Return whether a server of this type may give logprobs from before the temperature is applied, depending on
        the options with which it was started."""

    async def fetch_info(self, *, patience_s: float = math.inf) -> Served:
        """Return the facts that the server reports about itself."""

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float | None,
        top_k: int | None = None,
        seed: int | None = None,
        patience_s: float = math.inf,
    ) -> Sampled:
        """Return one completion of the prompt."""

    async def tokenize(self, text: str, *, patience_s: float = math.inf) -> list[int] | None:
        """Return the tokens into which the server splits a text; None if the server can't report them."""

    async def aclose(self) -> None:
        """Close the connections."""


class GenerateServer:
    """One token-exact server that speaks one of the `WIRES`.

    Args:
        settings: `base_url` (with or without `/v1` at its end), the key, the time limit and the retries.
        kind: the type of the server, `vllm` or `sglang`; None asks the server. The first completion finds out which of
            the wires of this type the server speaks.
        at_once: maximum number of requests at the same time; further requests wait.

    Raises:
        ConfigError: the settings have no `base_url`.
        UnknownNameError: there is no such kind.
    """

    def __init__(self, settings: AgentSettings, kind: str | None, *, at_once: int = 512) -> None:
        if kind is not None and kind not in WIRES:
            raise UnknownNameError("kind of server", kind, WIRES)
        if not settings.base_url or not settings.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the base URL {settings.base_url!r} is not the URL of a {kind or ' or '.join(WIRES)} server",
                hint="write http://HOST:PORT/v1",
            )
        self.settings = settings
        self.url = settings.base_url.rstrip("/").removesuffix("/v1")
        self.endpoint = Endpoint(settings, self.url, settings.model or _UNNAMED, lambda: self._exchange("/v1/models"))
        self._wires = WIRES[kind] if kind is not None else ()
        self._served: Served | None = None
        self._name = {"model": settings.model} if settings.model and settings.model != _UNNAMED else {}
        self._room = asyncio.Semaphore(at_once)
        key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._client: aiohttp.ClientSession | None = None

    @property
    def wire(self) -> Wire | None:
        """Return the wire format in use. Before the first completion, this is the first format of the server's type;
        None if the type is not known."""
        return self._wires[0] if self._wires else None

    @property
    def raw_logprobs(self) -> bool:
        """Return whether a server of this type may give logprobs from before the temperature is applied, depending on
        the options with which it was started."""
        return self.wire is not None and self.wire.raw_logprobs

    async def fetch_info(self, *, patience_s: float = math.inf) -> Served:
        """Return the facts that the server reports about itself. The server is asked only once.

        Args:
            patience_s: replaces `endpoint_patience_s` if it is shorter.

        Raises:
            ModelError: the server failed, or its list of models lacks the model of the settings.
        """
        if self._served is None:
            self._served = await self.endpoint.ask(self._ask_served, proves=False, patience_s=patience_s)
        return self._served

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float | None,
        top_k: int | None = None,
        seed: int | None = None,
        patience_s: float = math.inf,
    ) -> Sampled:
        """Return one completion of the prompt. If the server breaks the completion off, for example at an update of its
        weights, further requests continue it from its tokens.

        Args:
            top_k: sample from this many tokens only; None, which training needs, samples from all of them.
            seed: the sampling seed; None lets the server draw one.
            patience_s: see `fetch_info`.

        Raises:
            ModelError: the server failed, permanently or too often, or returned no tokens and logprobs. The error says
                what to do.
            ContextLengthExceeded: the prompt does not fit the model's context.
        """
        if not self._wires:
            self._wires = await self._find_wires(patience_s)
        settings_of_sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        whole = await self._sample(list(prompt), settings_of_sampling, patience_s)
        while whole.finish_reason == "abort":
            settings_of_sampling["max_tokens"] = max_tokens - len(whole.tokens)
            if not settings_of_sampling["max_tokens"]:
                return replace(whole, finish_reason="length")
            settings_of_sampling["seed"] = seed if seed is None else derive_seed(seed, str(max(1, len(whole.parts))))
            whole = whole.then(await self._sample([*prompt, *whole.tokens], settings_of_sampling, patience_s))
        return whole

    async def _sample(self, prompt: list[int], given: Mapping[str, Any], patience_s: float) -> Sampled:
        """Return the completion of one request."""
        sampling = {key: value for key, value in given.items() if value is not None}
        # Encode the body at once: the tokens would take ten times as much memory while the server works.
        bodies = {wire: _json({**wire.write(prompt, sampling), **wire.name_model(self._name)}) for wire in self._wires}
        sent = len(prompt)
        del prompt
        return await self.endpoint.ask(
            lambda: self._ask(bodies, sent, given["max_tokens"]),
            tokens=lambda sampled: sent + len(sampled.tokens),
            patience_s=patience_s,
        )

    async def tokenize(self, text: str, *, patience_s: float = math.inf) -> list[int] | None:
        """Return the tokens into which the server splits a text, without added special tokens; None if the server can't
        report them.

        Args:
            patience_s: see `fetch_info`.

        Raises:
            ModelError: the server failed.
        """
        body = _json({"prompt": text, "add_special_tokens": False, **self._name})
        try:
            content = await self.endpoint.ask(
                lambda: self._request_if_there("/tokenize", body), proves=False, patience_s=patience_s
            )
            return [int(token) for token in json.loads(content)["tokens"]]
        except (KeyError, TypeError, ValueError):
            return None

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.close()

    async def _find_wires(self, patience_s: float) -> tuple[Wire, ...]:
        """Return the wires of the type that the server reports.

        Raises:
            ModelError: the server reports no type, or a type without wires.
        """
        kind = (await self.fetch_info(patience_s=patience_s)).kind
        if kind is None:
            raise ModelError(
                f"the server at {public_url(self.url)} does not say at /v1/models that it is {' or '.join(WIRES)}: no "
                "other is known to give token ids",
                hint=f"if it is one of them, set server_type to {' or '.join(WIRES)}; for any other leave out the "
                "parser: its OpenAI API gives text only",
            )
        return WIRES[kind]

    async def _ask_served(self) -> Served:
        content = await self._request_if_there("/v1/models")
        try:
            cards = {str(card["id"]): card for card in json.loads(content)["data"]}
            model = self._name.get("model", next(iter(cards)))
            kind, context = (cards.get(model, {}).get(key) for key in ("owned_by", "max_model_len"))
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
            return Served()
        if model not in cards:
            raise ModelError(
                f"the server at {public_url(self.url)} has no model {model!r}", hint=nearest_hint(model, cards)
            )
        return Served(kind if kind in WIRES else None, context if isinstance(context, int) else None)

    async def _ask(self, bodies: Mapping[Wire, bytes], sent: int, max_tokens: int) -> Sampled:
        """Return the completion from the first wire that the server knows. Later requests use only this wire."""
        closed: HttpRefusal | None = None
        for wire in self._wires:
            try:
                content = await self._request(wire.path, bodies[wire])
            except HttpRefusal as refused:
                if refused.status_code == 403:  # this path is off, or the key is refused: then all wires get 403
                    closed = closed or refused
                elif len(self._wires) == 1 or not _lacks_path(refused):
                    raise
                continue
            try:
                sampled = check_sampled(wire.read(json.loads(content)), sent, max_tokens)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
                _no_tokens(self.url, wire, content, error)
            self._wires = (wire,)
            return sampled
        if closed is not None and not _CLOSED.search(str(closed)):
            raise closed
        if closed is not None:
            raise ModelError(
                f"the server at {public_url(self.url)} gives token ids only with another setting: {closed}",
                hint="start vLLM with --enable-scale-out, or have it serve /v1/completions",
            )
        paths, takes = ", ".join(wire.path for wire in self._wires), dict.fromkeys(wire.server for wire in self._wires)
        raise ModelError(
            f"the server at {public_url(self.url)} gives no token ids: it has none of {paths} (HTTP 404)",
            hint=f"this server_type takes {', '.join(takes)}; any other server has only its OpenAI API, without tokens",
        )

    async def _request(self, path: str, body: bytes | None = None) -> bytes:
        """Return the answer to a POST of this body, or, without a body, to a GET."""
        async with self._room:
            return await self._exchange(path, body)

    async def _exchange(self, path: str, body: bytes | None = None) -> bytes:
        """Send a request at once, even if the maximum number of requests is in flight, and return the answer."""
        async with (
            asyncio.timeout(self.settings.request_timeout_s),
            self._session().request("GET" if body is None else "POST", f"{self.url}{path}", data=body) as response,
        ):
            self.endpoint.learn_limits(response.headers)
            content = await read_bounded(response.content.iter_any(), self.settings.max_response_bytes)
        if response.status >= 400:
            raise HttpRefusal.of(response.status, content, response)
        return content

    async def _request_if_there(self, path: str, body: bytes | None = None) -> bytes:
        """Return the answer; empty if the server does not have this path or does not allow it."""
        try:
            return await self._request(path, body)
        except HttpRefusal as refused:
            if refused.status_code in (400, 403, 404, 405, 501):
                return b""
            raise

    def _session(self) -> aiohttp.ClientSession:
        # aiohttp instead of httpx: with a hundred answers at a time, httpx needs five times as long for each answer,
        # which would stall the event loop.
        import aiohttp

        if self._client is None:
            self._client = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                # Ignore a proxy from the environment for a server on this host.
                trust_env=not is_loopback(self.settings.base_url),
            )
        return self._client


def _lacks_path(refusal: HttpRefusal) -> bool:
    """Return whether the server refused the request because it lacks the path, and not because it lacks the model."""
    # For a missing model, the error of vLLM has the type `NotFoundError`.
    return refusal.status_code in (404, 405) and refusal.type != "NotFoundError"


def _no_tokens(url: str, wire: Wire, content: bytes, error: Exception) -> NoReturn:
    beginning = content[:200].decode("utf-8", "replace")
    raise BadCompletion(
        f"{public_url(url)}{wire.path} gave no token ids with logprobs as {wire.server} does "
        f"({type(error).__name__}: {error}): {beginning}",
        hint=f"check server_type; if it is right, {wire.advice}",
    ) from error


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
