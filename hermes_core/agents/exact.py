"""A conversation recorded token by token: the model's prompts and what it sampled, never reconstructed from text."""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_core.agents.base import MASKED, AgentResult, AgentSettings, AgentTask, Message
from hermes_core.agents.chat import Chat
from hermes_core.agents.failures import BadCompletion, ContextLengthExceeded, public_url
from hermes_core.agents.generate import TokenServer
from hermes_core.agents.model import ModelAgent, derived_seed
from hermes_core.agents.parsers.base import Parser
from hermes_core.agents.replies import Reply
from hermes_core.agents.retries import Choice
from hermes_core.agents.trial import try_out
from hermes_core.agents.wires import Sampled
from hermes_core.errors import ConfigError

PROMPT_LOGPROB = 1.0
"""The logprob of a token that the model did not write. No real logprob can have this value."""


@dataclass(frozen=True)
class Turn:
    """One answer inside a node: its position, and the data to check that nothing was changed since."""

    start: int
    """The position of its first token. Everything before it is what the model was asked."""
    sampled: array[int]
    """The server's token ids, as C integers."""
    logprobs: array[float]
    """The server's logprobs, one for each token."""
    prompt_checksum: int
    """CRC-32 of the tokens before `start`, as C integers, at the time they were sent."""
    finish_reason: str

    @property
    def stop(self) -> int:
        """Return the position after its last token."""
        return self.start + len(self.sampled)


@dataclass(eq=False)
class Node:
    """One sequence for a trainer: arrays of one length, not shifted. They need a tenth of the memory of lists."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    masked_tokens: array[int] = field(default_factory=lambda: array("i"))
    """For each token, the token itself if the model wrote it, else -100."""
    turns: list[Turn] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    """`finish_reason` of the last answer."""
    heard: list[tuple[Any, ...]] = field(default_factory=list)
    """Keys that identify the messages in this sequence."""

    @property
    def logprobs(self) -> array[float]:
        """Return the server's logprobs where the model wrote the token, else 1.0. Computed anew each time, because most
        are 1.0."""
        spread = array("d", [PROMPT_LOGPROB]) * len(self.tokens)
        for turn in self.turns:
            spread[turn.start : turn.stop] = turn.logprobs
        return spread

    def ask(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model did not write."""
        self.tokens.extend(tokens)
        self.masked_tokens.extend([MASKED] * len(tokens))

    def answer(self, sampled: Sampled) -> None:
        """Add what the model sampled."""
        own, logprobs = array("i", sampled.tokens), array("d", sampled.logprobs)
        self.turns.append(Turn(len(self.tokens), own, logprobs, zlib.crc32(self.tokens), sampled.finish_reason))
        self.tokens.extend(own)
        self.masked_tokens.extend(own)
        self.metadata["finish_reason"] = sampled.finish_reason


class ExactSession:
    """One conversation: `chat_completion` for the agent loop, `get_state` for the trainer.

    A conversation that continues from an answer keeps its tokens, and only what is new is encoded. If its past was
    changed, a new node begins, and the earlier nodes stay.

    Args:
        server: samples the tokens.
        chat: renders the prompts.
        parser: reads calls and reasoning in the answers.
        max_length: maximum number of tokens of a sequence, prompt and answers together.
        end_thinking: whether a call inside thinking that was never closed is made, and not only reported.
    """

    def __init__(
        self, server: TokenServer, chat: Chat, parser: Parser, *, max_length: int, end_thinking: bool = False
    ) -> None:
        self._server = server
        self._chat = chat
        self._parser = parser
        self.max_length = max_length
        self._end_thinking = end_thinking
        self._answers = 0
        self.nodes: list[Node] = []

    def get_state(self) -> Mapping[str, Any]:
        """Return the sequences so far, under `nodes`."""
        return {"nodes": self.nodes, "end_tokens": self._chat.closing_tokens}

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Reply:
        """Return the model's answer, with its calls read by the parser.

        Args:
            extra_body: only its `seed` is used. Each answer is sampled with a seed that is derived from it.

        Raises:
            ContextLengthExceeded: there is no room left for an answer.
            ModelError: as `GenerateServer.sample` does.
            UsageError: the chat template refuses the conversation.
        """
        offered = tools or ()
        async with self._chat.turnstile:  # one per round of the event loop, even if many rollouts are ready
            await asyncio.sleep(0)
            node, prompt = self._next(messages, offered)
        asked = len(node.tokens) + len(prompt.tokens)
        room = self.max_length - asked
        if room < 1:
            raise ContextLengthExceeded(
                f"the conversation has {asked} tokens, of {self.max_length} at most",
                hint="allow fewer turns or shorter tool results, or raise max_token_length",
            )
        limit = min(max_tokens or room, room)
        seed = (extra_body or {}).get("seed")
        if seed is not None:  # with one seed for all answers, their draws would be the same
            seed = derived_seed(seed, str(self._answers))
        sampled = await self._server.sample(
            node.tokens + array("i", prompt.tokens), max_tokens=limit, temperature=temperature, seed=seed
        )
        self._check(sampled)
        async with self._chat.turnstile:
            await asyncio.sleep(0)
        # Only now, so that a request that failed or was cancelled leaves no trace in the sequences.
        node.ask(prompt.tokens)
        node.answer(sampled)
        if node not in self.nodes:
            self.nodes.append(node)
        self._answers += 1
        sampling = {"temperature": temperature, "max_tokens": limit, "seed": seed}
        sent = {key: value for key, value in sampling.items() if value is not None}
        reply = replace(self._read(sampled, offered, asked, prompt.begun), sampling=sent)
        node.heard = [_told(message) for message in (*messages, reply.as_message())]
        return reply

    def _next(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Node, Any]:
        """Return the node in which the conversation continues, and what must be added to it before the answer."""
        told = [_told(message) for message in messages]
        for node in reversed(self.nodes):
            known = len(node.heard)
            if known < len(told) and told[:known] == node.heard:
                prompt = self._chat.continuation(messages, known - 1, tools)
                return node, self._chat.follows(node.tokens[-1], prompt)
        return Node(), self._chat.prompt(messages, tools)

    def _check(self, sampled: Sampled) -> None:
        """Refuse tokens that the tokenizer does not have.

        Raises:
            BadCompletion: there are some.
        """
        if (largest := max(sampled.tokens)) >= self._chat.vocabulary:
            raise BadCompletion(
                f"the server gave the token {largest}, and {self._chat.name} has {self._chat.vocabulary}",
                hint="set tokenizer_name to the tokenizer of the model that the server has loaded",
            )

    def _read(self, sampled: Sampled, tools: Sequence[Mapping[str, Any]], prompt_tokens: int, begun: str) -> Reply:
        written = sampled.tokens[:-1] if sampled.tokens[-1] in self._chat.end_tokens else sampled.tokens
        text = self._chat.decode(written)
        parsed = self._parser.parse(f"{begun}{text}", tools)
        calls = parsed.tool_calls(self._answers, cut=sampled.finish_reason == "length", end_thinking=self._end_thinking)
        return Reply(
            content=parsed.content,
            calls=calls,
            reasoning=parsed.reasoning,
            reasoning_details=None,
            finish_reason=sampled.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(sampled.tokens),
            cached_tokens=sampled.cached_tokens,
            weight_version=sampled.weight_version,
            parts=sampled.parts,
        )


def _told(message: Message) -> tuple[Any, ...]:
    """Return a key that identifies a message, ignoring other fields that a loop may keep in it."""
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    content = message.get("content") or ""
    return message["role"], content.strip() if isinstance(content, str) else repr(content), calls


class ExactAgent:
    """The model loop on token-exact servers. Each rollout has a session of its own, on the least busy server.

    Args:
        settings: how to sample; `base_url` and `extra_body` are not used.
        servers: the servers; this agent closes them.
        chat: see `ExactSession`.
        parser: see `ExactSession`.
        max_length: see `ExactSession`; None is the context of the server's model.
        end_thinking: see `ExactSession`.
    """

    name = "model"

    def __init__(
        self,
        settings: AgentSettings,
        servers: Sequence[TokenServer],
        chat: Chat,
        parser: Parser,
        max_length: int | None,
        *,
        end_thinking: bool = False,
    ) -> None:
        self.settings = settings.model_copy(update={"extra_body": None})
        self.max_length = max_length
        self._chat = chat
        self._parser = parser
        self._end_thinking = end_thinking
        self._servers = servers
        self._choice = Choice([server.endpoint for server in servers])

    def on(self, server: TokenServer) -> ExactAgent:
        """Return the same agent on another server."""
        return ExactAgent(
            self.settings, [server], self._chat, self._parser, self.max_length, end_thinking=self._end_thinking
        )

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until the model is done or has to stop; see `Agent.run`."""
        async with self.session() as session:
            return await ModelAgent(self.settings, session, context=session.max_length).run(task)

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[ExactSession]:
        """Open a session for one rollout.

        Args:
            options: further arguments of `ExactSession`.
        """
        with self._choice.one() as chosen:
            server = self._servers[chosen]
            options = {"max_length": await self._length(server), "end_thinking": self._end_thinking, **options}
            yield ExactSession(server, self._chat, self._parser, **options)

    async def check_endpoint(self) -> None:
        """Check that every server gives tokens with logprobs, and that they are those of the tokenizer.

        Raises:
            ModelError: a server can't be reached, refuses the key or the model, or gives no tokens with logprobs.
            ConfigError: a server has another tokenizer, its logprobs are not of what it draws from, or nobody says how
                long a conversation may be.
        """
        temperature = 1.0 if self.settings.temperature is None else self.settings.temperature
        for server in self._servers:
            await self._length(server, server.settings.check_patience_s)
            await try_out(server, self._chat.tokenizer, temperature)

    async def aclose(self) -> None:
        """Close the connections to the servers."""
        for server in self._servers:
            await server.aclose()

    async def _length(self, server: TokenServer, patience_s: float = math.inf) -> int:
        """Return the maximum number of tokens of a conversation with this server."""
        length = self.max_length or (await server.served(patience_s=patience_s)).context
        if length is None:
            raise ConfigError(
                f"the server at {public_url(server.url)} does not say how long a conversation may be",
                hint="set max_token_length to the context of its model",
            )
        return length
