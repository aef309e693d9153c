"""Asks a server's `/generate` for tokens: token ids in, the sampled token ids and their logprobs out.

Two wire formats: `vllm`, that of the API server of Atropos' example trainer (`POST /generate` with
`{"prompt": {"prompt_token_ids": […]}, "logprobs": 0, …}`), and `sglang`, SGLang's native one.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.failures import BadCompletion, ResponseTooLarge
from hermes_core.agents.retries import explained, is_loopback, persist
from hermes_core.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True)
class Sampled:
    """One completion as the server sampled it; both lists have the same length."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop` or `length`."""


class GenerateServer:
    """One token-exact server.

    Args:
        settings: `base_url` (with or without `/v1` at its end), the key, the time limit and the retries.
        kind: the wire format, `vllm` or `sglang`.
        at_once: requests under way at a time, at most; more of them wait here.

    Raises:
        ConfigError: no server is named.
        UnknownNameError: there is no such wire format.
    """

    def __init__(self, settings: AgentSettings, kind: str, *, at_once: int = 512) -> None:
        if kind not in _FORMATS:
            raise UnknownNameError("wire format", kind, _FORMATS)
        if not settings.base_url or not settings.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the base URL {settings.base_url!r} is no URL of a {kind} server", hint="write http://HOST:PORT/v1"
            )
        self.settings = settings
        self.kind = kind
        self.url = f"{settings.base_url.rstrip('/').removesuffix('/v1')}/generate"
        self._write, self._read = _FORMATS[kind]
        self._room = asyncio.Semaphore(at_once)
        key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._client: aiohttp.ClientSession | None = None

    async def sample(self, prompt: Sequence[int], *, max_tokens: int, temperature: float | None) -> Sampled:
        """One completion of the prompt.

        Raises:
            ModelError: the server failed, for good or too often, or gave no tokens and logprobs; says what to do.
            ContextLengthExceeded: the prompt does not fit the model's context.
        """
        sampling = {"max_tokens": max_tokens, **({} if temperature is None else {"temperature": temperature})}
        # Written out at once: the tokens would take ten times as much memory for as long as the server thinks.
        body = json.dumps(self._write(list(prompt), sampling), separators=(",", ":")).encode()
        del prompt
        return await persist(lambda: self._ask(body), self.settings, self._explain)

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._client is not None:
            await self._client.close()

    async def _ask(self, body: bytes) -> Sampled:
        async with (
            self._room,
            asyncio.timeout(self.settings.request_timeout_s),
            self._session().post(self.url, data=body) as response,
        ):
            content = await _bounded(response, self.settings.max_response_bytes)
        if response.status >= 400:
            raise _Refused(response, content)
        try:
            answer = json.loads(content)
            return _checked(self._read(answer))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
            _no_tokens(self, content, error)

    def _session(self) -> aiohttp.ClientSession:
        # Not httpx: with a hundred answers at a time, its five times as long per answer would stall the event loop.
        import aiohttp

        if self._client is None:
            self._client = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                # A proxy from the environment is never meant for a server on this host.
                trust_env=not is_loopback(self.settings.base_url),
            )
        return self._client

    def _explain(self, error: Exception, attempts: int) -> Exception:
        name = self.settings.model or "default"
        return explained(error, self.settings, endpoint=self.url, model=name, attempts=attempts)


class _Refused(Exception):
    """The server answered with an error status; in the shape that `failures` reads."""

    def __init__(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        text = content[:2000].decode("utf-8", "replace")
        super().__init__(text)
        self.status_code = response.status
        self.response = response
        try:
            self.body = json.loads(content)
        except ValueError:
            self.body = text


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ResponseTooLarge(
                f"the server's answer is longer than {limit} bytes", hint="set max_tokens, or raise max_response_bytes"
            )
    return bytes(body)


def _no_tokens(server: GenerateServer, content: bytes, error: Exception) -> NoReturn:
    said = content[:200].decode("utf-8", "replace")
    raise BadCompletion(
        f"{server.url} gave no token ids with logprobs as {server.kind} does ({type(error).__name__}: {error}): {said}",
        hint="check server_type, and that the server is one that gives them: for vllm Atropos' own API server, not "
        "stock vLLM; for sglang its native /generate",
    ) from error


def _checked(sampled: Sampled) -> Sampled:
    if not sampled.tokens:
        raise ValueError("no token")
    for token, logprob in zip(sampled.tokens, sampled.logprobs, strict=True):
        if type(token) is not int or token < 0:
            raise ValueError(f"{token!r} is no token id")
        if not (isinstance(logprob, int | float) and math.isfinite(logprob)):
            raise ValueError(f"{logprob!r} is no logprob")
    return sampled


def _write_vllm(prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "n": 1, **sampling}


def _read_vllm(answer: Mapping[str, Any]) -> Sampled:
    # Each place is a list of one mapping of one token id, as text, to its logprob.
    places = [next(iter(place[0].items())) for place in answer["logprobs"][0]]
    return Sampled(
        [int(token) for token, _ in places], [logprob for _, logprob in places], _reason(answer["finish_reasons"][0])
    )


def _write_sglang(prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {("max_new_tokens" if key == "max_tokens" else key): value for key, value in sampling.items()}
    return {"input_ids": prompt, "sampling_params": renamed, "return_logprob": True, "return_text_in_logprobs": False}


def _read_sglang(answer: Any) -> Sampled:
    about = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
    places = about["output_token_logprobs"]
    return Sampled(
        [place[1] for place in places], [place[0] for place in places], _reason(about["finish_reason"]["type"])
    )


def _reason(said: Any) -> str:
    """`abort` and the like are no end of an answer that could be trained on."""
    if said not in ("stop", "length"):
        raise ValueError(f"the completion ended with {said!r}")
    return str(said)


_Format = tuple[Callable[[list[int], Mapping[str, Any]], dict[str, Any]], Callable[[Any], Sampled]]
_FORMATS: Mapping[str, _Format] = {"vllm": (_write_vllm, _read_vllm), "sglang": (_write_sglang, _read_sglang)}
