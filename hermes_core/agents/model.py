"""The `model` agent: the agent loop with any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, Message
from hermes_core.agents.endpoint.errors import BadCompletion, EndpointDown, ResponseTooLarge, is_timeout, status_of
from hermes_core.agents.endpoint.http import client_options, read_bounded
from hermes_core.agents.endpoint.request import Endpoint
from hermes_core.agents.loop import ChatServer, HermesAgentLoop, KeepsState
from hermes_core.agents.replies import count_tokens, decode_arguments, read_reply
from hermes_core.errors import ConfigError, ModelError, UsageError, nearest_hint

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SHORT_TOKENS, SHORT_S = 256, 60.0
"""Maximum tokens and seconds of a short answer. If one arrives, the endpoint works, and only the model does not come to
an end."""

_GATEWAY = frozenset({502, 503, 504})
"""HTTP statuses that mean that the server behind a gateway is not ready yet. Other failures of a request for the list
of models may only mean that the server has no list."""

_NO_KEY = "none"  # the SDK needs a key, and would otherwise send OPENAI_API_KEY to any endpoint
_OF_THE_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})

_ROLES = ("system", "user", "assistant", "tool")
_UNRECORDED = frozenset({"ephemeral_system_prompt", "prefill_messages"})
"""Settings whose messages are sent to the model and not recorded."""


class ExactSettings(AgentSettings):
    """Settings of agents that ask a model, and whose rollouts can be token-exact."""

    tool_call_parser: str | None = None
    """Parser of the model's tool calls, or `auto` to choose it by the chat template; rollouts are then token-exact,
    with a vLLM or SGLang server. Token ids go to the server, and the ids that it sampled come back with their logprobs.
    None uses the OpenAI API, which gives no tokens. The settings from `server_type` to `calls_end_thinking` are only
    for token-exact rollouts."""
    server_type: Literal["vllm", "sglang"] | None = None
    """Type of the server. None asks the server."""
    tokenizer_name: str | None = None
    """Folder or hub name of the model's tokenizer. None is the name of the model."""
    max_token_length: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of a conversation, prompts and answers together. None is the model's context, which the
    server knows."""
    chat_template: str | None = None
    """A Jinja file, or the text of a template, to use instead of the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    calls_end_thinking: bool = False
    """Whether to make calls inside thinking that was never closed, instead of only reporting them to the model."""

    @model_validator(mode="after")
    def _fit_tokens(self) -> Self:
        fields = ExactSettings.model_fields
        if self.tool_call_parser is None:
            own = fields.keys() - AgentSettings.model_fields.keys()
            if unused := sorted(name for name in own if getattr(self, name) != fields[name].default):
                raise ValueError(f"{', '.join(unused)}: only for token-exact rollouts, so set tool_call_parser, too")
            return self
        if self.extra_body or any(choice.extra_body for choice in (self.models or {}).values()):
            raise ValueError(
                "extra_body goes to the OpenAI API only: what changes the sampling would make the logprobs wrong, and "
                "for the chat template there is chat_template_kwargs"
            )
        if self.temperature is None:
            raise ValueError("temperature must be set with tool_call_parser, because the logprobs depend on it")
        return self


class ModelSettings(ExactSettings):
    """Settings of the agent `model`."""

    ephemeral_system_prompt: str | None = Field(default=None, min_length=1)
    """Text after the system prompt that the model is sent, and that no record has."""
    prefill_messages: tuple[Message, ...] = ()
    """Messages between the system prompt and the rest that the model is sent, and that no record has: examples of how
    to work. Each has a `role`, and what else the endpoint wants."""
    compact_at: float | None = Field(default=None, gt=0)
    """Number of tokens from which the model summarises the conversation, and goes on from its summary. In token-exact
    rollouts also a share of the context, up to 1. None lets the conversation grow until it no longer fits."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for number, message in enumerate(self.prefill_messages, 1):
            if message.get("role") not in _ROLES:
                raise ValueError(f"prefill_messages: the role of message {number} must be one of {', '.join(_ROLES)}")
        unkept = sorted(name for name in _UNRECORDED if getattr(self, name))
        if unkept and self.tool_call_parser is not None:
            raise ValueError(f"{', '.join(unkept)}: not with tool_call_parser, because every token sent is recorded")
        return self


class ModelAgent:
    """Lets a model work on tasks with `HermesAgentLoop`, many at a time over one connection pool.

    Args:
        settings: the model, its endpoint, and how to sample. With a `tool_call_parser`, use an `ExactAgent` instead.
        server: used instead of an endpoint; the caller closes it. To keep token ids and logprobs, pass one that has
            `get_state()`: its return value becomes `AgentResult.managed_state`, unchanged.
        context: the model's context in tokens; None if it is not known.

    Raises:
        ConfigError: no model is named, the endpoint is OpenAI's own and there is no key, or `compact_at` is a share of
            a context that is not known.
        UsageError: there is a `tool_call_parser`, which only an `ExactAgent` uses.
    """

    name = "model"
    config_class = ModelSettings

    def __init__(
        self, settings: AgentSettings, server: ChatServer | None = None, *, context: int | None = None
    ) -> None:
        if server is None and isinstance(settings, ExactSettings) and settings.tool_call_parser is not None:
            raise UsageError(
                "this agent uses the OpenAI API, which gives no tokens, and tool_call_parser asks for tokens",
                hint="make it with Runtime.agent, or with open_exact_agent of hermes_core.agents.exact.factory",
            )
        self.settings = settings
        self._compact_at = _compaction_tokens(settings, context)
        self._owned: OpenAIServer | None = None
        if server is None:
            server = self._owned = OpenAIServer(settings)
        self._server = _Primed.of(server, settings)

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until the model is done or has to stop; see `Agent.run`."""
        task.result.model = self.settings.model
        loop = HermesAgentLoop(
            server=self._server,
            tool_schemas=task.tool_schemas,
            valid_tool_names={schema["function"]["name"] for schema in task.tool_schemas},
            max_turns=self.settings.max_turns,
            task_id=task.trajectory_id,
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens,
            extra_body=self._extra_body(task.seed_key or task.trajectory_id),
            tool_handler=task.tool_handler,
            parallel_safe=task.parallel_safe,
            waiting=task.waiting,
            price=self.settings.price,
            compact_at=self._compact_at,
            follow_up=task.follow_up,
        )
        return await loop.run(task.messages, task.result)

    @asynccontextmanager
    async def session(self, **_: Any) -> AsyncIterator[ChatServer]:
        """Open the server that answers the model calls of one rollout, for an agent that makes these calls itself."""
        yield self._server

    async def check_endpoint(self) -> None:
        """Check that this agent's own endpoint can be used. A `server` given by the caller is not checked.

        Raises:
            ModelError: as `OpenAIServer.check` raises it.
        """
        if self._owned is not None:
            await self._owned.check()

    async def aclose(self) -> None:
        """Close the connections to the endpoint."""
        if self._owned is not None:
            await self._owned.aclose()

    def _extra_body(self, seed_key: str) -> dict[str, Any]:
        """Return the settings' `extra_body` with a seed for this rollout. With the same seed, all rollouts of a group
        would be equal."""
        extra = dict(self.settings.extra_body or {})
        if self.settings.seed is not None:
            extra.setdefault("seed", derive_seed(self.settings.seed, seed_key))
        return extra


def _compaction_tokens(settings: AgentSettings, context: int | None) -> int | None:
    """Return the number of tokens from which a conversation is summarised; None if it never is.

    Raises:
        ConfigError: `compact_at` is a share of a context that is not known.
    """
    limit = settings.compact_at if isinstance(settings, ModelSettings) else None
    if limit is None:
        return None
    if limit > 1:
        return int(limit)
    if context is None:
        raise ConfigError(
            f"compact_at is {limit:g}, a share of the context, and the OpenAI API does not say how long that is",
            hint="give a number of tokens, well below the model's context",
        )
    return int(limit * context)


def derive_seed(seed: int, key: str) -> int:
    """Return a sampling seed that depends only on `seed` and `key`: 31 bits, which all servers accept."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:4]) >> 1


class _Primed:
    """A server that adds messages to each request, which are not part of the conversation, and so are not recorded."""

    def __init__(self, server: ChatServer, system: str | None, examples: Sequence[Message]) -> None:
        self._server = server
        self._system = system
        self._examples = examples

    @classmethod
    def of(cls, server: ChatServer, settings: AgentSettings) -> ChatServer:
        """Return the server, wrapped if the settings have messages to add.

        Raises:
            UsageError: the server records every token that it is sent.
        """
        if not isinstance(settings, ModelSettings):
            return server
        system, examples = settings.ephemeral_system_prompt, settings.prefill_messages
        if not system and not examples:
            return server
        if isinstance(server, KeepsState):
            raise UsageError(
                "this server records every token that it is sent",
                hint=f"leave out {' and '.join(sorted(_UNRECORDED))}",
            )
        return cls(server, system, examples)

    async def chat_completion(self, *, messages: Sequence[Message], **request: Any) -> Any:
        """Return one completion of the conversation with the added messages."""
        begin = 1 if messages and messages[0]["role"] == "system" else 0
        texts = [message["content"] for message in messages[:begin]] + ([self._system] if self._system else [])
        system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
        return await self._server.chat_completion(messages=[*system, *self._examples, *messages[begin:]], **request)


class OpenAIServer:
    """`chat_completion` over an OpenAI-compatible endpoint: one client, limited answers, limited retries.

    Connection failures, time-outs, HTTP 408, 409, 425, 429 and 5xx, and answers that are not chat completions are
    retried by `Endpoint`, after as long as `Retry-After` says, or after a longer time with each attempt, but after at
    most `max_retry_wait_s`.

    Args:
        settings: the model, its endpoint, the limits and the patience.
        at_once: maximum number of completions at the same time; further requests wait.
    """

    def __init__(self, settings: AgentSettings, *, at_once: int = sys.maxsize) -> None:
        if not settings.model:
            raise ConfigError(
                "no model is named for the model agent", hint="give --model and, for your own, --base-url"
            )
        if settings.base_url is None and settings.api_key is None:
            raise ConfigError(
                "there is no API key for api.openai.com", hint="set OPENAI_API_KEY, or give your own --base-url"
            )
        if settings.base_url is not None and not re.match(r"https?://[^/]", settings.base_url):
            raise ConfigError(
                f"the base URL {settings.base_url!r} is not the URL of a server",
                hint="write http://HOST:PORT/v1 or https://…",
            )
        self.settings = settings
        self.model = settings.model
        self._client = _open_client(settings, self._learn)
        url = settings.base_url or str(self._client.base_url)
        self.endpoint = Endpoint(settings, url, self.model, self._list_models)
        self._room = asyncio.Semaphore(at_once)
        self._turnstile = asyncio.Lock()

    async def chat_completion(self, *, messages: Sequence[Message], **request: Any) -> Any:
        """Return one completion, as the SDK's object.

        Args:
            messages: the conversation.
            request: `tools`, `n`, `temperature`, `max_tokens`, `extra_body`, and so on, as the SDK takes them.

        Raises:
            ModelError: the endpoint failed, permanently or too often; the error says what to do.
            ContextLengthExceeded: the conversation does not fit the model's context.
        """
        sent = sendable(messages)
        if self.settings.cache_control:
            sent = with_cache_marks(sent)
        async with self._room:
            return await self.endpoint.ask(
                lambda: self._ask_in_time({"model": self.model, "messages": sent, **request}),
                tokens=count_tokens,
            )

    async def check(self) -> None:
        """Check that the endpoint answers, and accepts the key and the model, within about twice `check_patience_s`.

        The endpoint is asked for its models. If this list leaves a doubt, the endpoint is asked for one token: it may
        accept other names than it lists, and may list its models for any key.

        Raises:
            ModelError: the endpoint can't be used with these settings.
        """
        patience_s = self.settings.check_patience_s
        names = await self.endpoint.ask(self._models, proves=False, patience_s=patience_s)
        if self.settings.api_key is None and (names is None or self.model in names):
            return
        body = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            await self.endpoint.ask(lambda: self._ask_once(body, patience_s), patience_s=patience_s)
        except EndpointDown as error:
            if status_of(error.__cause__ or error) == 404 and names and self.model not in names:
                error.hint = nearest_hint(self.model, names)
            raise
        except BadCompletion:
            raise
        except ModelError:  # a refusal of this request says nothing about other requests
            return

    async def _list_models(self) -> object:
        return await self._client.get("/models", cast_to=object)

    async def _models(self) -> list[str] | None:
        """Return the names of the models that the endpoint lists: empty if the key or the path may be wrong, None if
        the endpoint has no list."""
        try:
            async with asyncio.timeout(min(self.settings.request_timeout_s, self.settings.check_patience_s)):
                answer = await self._list_models()
        except Exception as error:
            status = status_of(error)
            if status in (401, 403, 404):
                return []
            if status is None or status == 429 or status in _GATEWAY:
                raise
            return None
        listed = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            return []
        return [str(model["id"]) for model in listed if isinstance(model, dict) and "id" in model] or None

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.close()

    def _learn(self, headers: Mapping[str, str]) -> None:
        self.endpoint.learn_limits(headers)

    async def _ask_in_time(self, body: dict[str, Any]) -> Any:
        """Return one completion, or a short, cut one if the model does not come to an end.

        A model could otherwise make its requests fail with endless answers, and its bad rollouts would be discarded. So
        if no length was set and the answer is late, a short answer is requested. If the short answer arrives, the whole
        answer is requested again. If the whole answer is late again, the model is the reason, because the endpoint
        works.
        """
        try:
            return await self._ask_once(body)
        except Exception as late:
            if not is_timeout(late) or not self.endpoint.circuit.closed or _sets_length(body):
                raise
            try:
                short = await self._ask_once({**body, "max_tokens": SHORT_TOKENS}, SHORT_S)
            except Exception as error:
                raise late from error
        if short.choices[0].finish_reason != "length":
            return short
        try:
            return await self._ask_once(body)
        except Exception as late:
            if not is_timeout(late):
                raise
            return short

    async def _ask_once(self, body: dict[str, Any], limit_s: float = math.inf) -> Any:
        from openai.types.chat import ChatCompletion

        body = {**body, **(body.get("extra_body") or {})}
        body.pop("extra_body", None)
        async with self._turnstile:  # one request per round of the event loop, even if many rollouts are ready
            await asyncio.sleep(0)
        try:
            # The client's own time limit is for each read, so an endpoint that sends slowly would never reach it.
            async with asyncio.timeout(min(limit_s, self.settings.request_timeout_s)):
                # `chat.completions.create` would convert the whole conversation through its types each time, which
                # stalls the event loop: a request takes 5 ms with it, and 2 ms without.
                completion = await self._client.post("/chat/completions", cast_to=ChatCompletion, body=body)
        except Exception as error:
            if isinstance(error.__cause__, ResponseTooLarge):
                raise error.__cause__ from None
            raise
        read_reply(completion, turn=1)  # raises here, where a retry is possible, if this is not a completion
        return completion


def _sets_length(body: Mapping[str, Any]) -> bool:
    """Return whether a request limits the length of its answer."""
    return any(key.startswith("max_") for key in (*body, *(body.get("extra_body") or {})))


def sendable(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with every tool call well-formed, as endpoints and chat templates require.

    The record keeps what the model wrote, including errors. But endpoints that load the arguments of past calls as JSON
    (such as vLLM) would refuse the whole conversation because of such an error.
    """
    return [_well_formed(message) if message.get("tool_calls") else message for message in messages]


def _well_formed(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments, _, repaired = decode_arguments(function["arguments"])
        if arguments is None:
            arguments, repaired = {"malformed_arguments": function["arguments"]}, True
        text = json.dumps(arguments) if repaired else function["arguments"].strip() or "{}"
        name = re.sub(r"[^\w-]", "_", function["name"], flags=re.ASCII)[:64] or "unnamed"
        calls.append({**call, "function": {"name": name, "arguments": text}})
    return {**message, "tool_calls": calls}


def with_cache_marks(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with Anthropic's cache marks. Each mark asks the endpoint to cache the prompt up to that
    place: the system message, the end of the previous request, and the end of this request.

    The mark at the end of the previous request finds the prompt that this request left in the cache, even if one turn
    has more messages than Anthropic searches back.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    marked = {len(messages) - 1, *(index - 1 for index in answers[-1:])}
    marked |= {0} if messages and messages[0]["role"] == "system" else set()
    return [_with_mark(message) if index in marked else message for index, message in enumerate(messages)]


def _with_mark(message: Message) -> Message:
    """Return the message with a cache mark at its last part, if this part is a text and not empty."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    if not parts or not isinstance(parts[-1], Mapping) or not parts[-1].get("text"):
        return message
    return {**message, "content": [*parts[:-1], {**parts[-1], "cache_control": {"type": "ephemeral"}}]}


def _open_client(settings: AgentSettings, learn: Callable[[Mapping[str, str]], None]) -> AsyncOpenAI:
    """Return the SDK's client, without its own retries, and with answers limited in size.

    Args:
        learn: called with the headers of each answer.
    """
    import openai
    import openai.types.chat  # slow to import: do it here, not on the event loop with the first request

    limit = settings.max_response_bytes

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        """A client that reads whole answers, up to the size limit, with any encoding and status."""

        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            response = await super().send(request, stream=True, **options)
            learn(response.headers)
            try:
                body = await read_bounded(response.aiter_bytes(), limit)
            finally:
                await response.aclose()
            kept = [(key, value) for key, value in response.headers.multi_items() if key not in _OF_THE_TRANSFER]
            return type(response)(response.status_code, headers=kept, content=body, request=response.request)

    return openai.AsyncOpenAI(
        api_key=settings.api_key.get_secret_value() if settings.api_key else _NO_KEY,
        base_url=settings.base_url,
        timeout=settings.request_timeout_s,
        max_retries=0,
        http_client=BoundedClient(
            **client_options(settings.base_url),
            limits=type(openai.DEFAULT_CONNECTION_LIMITS)(
                max_keepalive_connections=100
            ),  # rollouts are limited instead
        ),
    )
