"""A conversation recorded token by token: the prompts and the sampled answers, never reconstructed from text."""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, Message
from hermes_core.agents.endpoint.balancer import LoadBalancer
from hermes_core.agents.endpoint.errors import BadCompletion, ContextLengthExceeded, public_url
from hermes_core.agents.exact.chat import Chat, Prompt
from hermes_core.agents.exact.generate import TokenServer
from hermes_core.agents.exact.probe import try_out
from hermes_core.agents.exact.token_tree import Node, TokenTree, TreeRequest, tokens_after
from hermes_core.agents.exact.wires import Sampled
from hermes_core.agents.model import ModelAgent, derive_seed
from hermes_core.agents.parsers.base import Parser
from hermes_core.agents.replies import ModelReply
from hermes_core.errors import ConfigError

_CHARACTERS_PER_TOKEN = 16
"""An upper bound: in no conversation does a token have more characters on average."""


class ExactSession:
    """The conversations of one rollout: the agent calls `chat_completion`, and the trainer calls `get_state`.

    A request goes on from an earlier answer: the last answer in the longest known history with which the request
    begins. All tokens up to this answer are kept, and only the messages after it are encoded. So a program may send its
    history in another form, leave an answer out, go back, or send several requests at once. If a conversation forks,
    both paths are kept (`TokenTree`). Calls may overlap.

    Args:
        server: samples the tokens.
        chat: renders the prompts.
        parser: reads calls and reasoning in the answers.
        max_length: maximum number of tokens of a sequence, prompt and answers together.
        end_thinking: whether a call inside thinking that was never closed is made, and not only reported.
        keep_thinking: see `TokenTree`.
        own: returns the numbers (`ModelReply.number`) of the answers to train on. It is called when the sequences are
            first read. A program needs it, because not all of its requests belong to its conversation. None means all
            answers.
    """

    def __init__(
        self,
        server: TokenServer,
        chat: Chat,
        parser: Parser,
        *,
        max_length: int,
        end_thinking: bool = False,
        keep_thinking: bool = True,
        own: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self._server = server
        self._chat = chat
        self._parser = parser
        self.max_length = max_length
        self._end_thinking = end_thinking
        self._tree = TokenTree(keep_thinking=keep_thinking)
        self._own = own
        self._under_way = 0

    @property
    def nodes(self) -> list[Node]:
        """Return the sequences so far, made anew each time."""
        return self._tree.nodes(None if self._own is None else self._own())

    def get_state(self) -> Mapping[str, Any]:
        """Return the sequences under `nodes`, and two counts: `forks` by cause, and `thinking_kept`. The latter is the
        number of requests that leave out the thinking of earlier answers, and yet continue those answers' tokens.

        The model loop asks for the state after each answer, so the sequences are made only when they are first read.
        """
        return {
            "nodes": _Nodes(self),
            "end_tokens": self._chat.closing_tokens,
            "forks": self._tree.forks,
            "thinking_kept": self._tree.thinking_kept,
        }

    async def chat_completion(
        self,
        *,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> ModelReply:
        """Return the model's answer, with its calls read by the parser.

        Args:
            extra_body: only its `seed` is used, from which a seed for each answer is derived.

        Raises:
            ContextLengthExceeded: there is no room left for an answer.
            ModelError: as `GenerateServer.sample` does.
            UsageError: the chat template refuses the conversation.
        """
        offered = tools or ()
        async with self._turn():
            asked = self._tree.ask(messages, offered)
            self._check_size(asked)
            added = self._prompt(asked, messages, offered)
            prompt = tokens_after(asked.before) + array("i", added.tokens)
        room = self.max_length - len(prompt)
        if room < 1:
            raise self._too_long(f"{len(prompt)} tokens")
        limit, seed = min(max_tokens or room, room), (extra_body or {}).get("seed")
        if seed is not None:  # with one seed for all answers, their draws would be the same
            seed = derive_seed(seed, str(len(self._tree.answers) + self._under_way))
        self._under_way += 1
        try:
            sampled = await self._server.sample(prompt, max_tokens=limit, temperature=temperature, seed=seed)
            self._check(sampled)
            async with self._turn():
                pass
        finally:
            self._under_way -= 1
        sampling = {"temperature": temperature, "max_tokens": limit, "seed": seed}
        sent = {key: value for key, value in sampling.items() if value is not None}
        reply = replace(self._read(sampled, offered, len(prompt), added.begun), sampling=sent)
        # Add the answer only now, so that a request that failed or was cancelled leaves no trace in the sequences.
        answer = self._tree.add(asked, array("i", added.tokens), sampled, zlib.crc32(prompt), reply)
        return replace(reply, number=answer.number)

    def _check_size(self, asked: TreeRequest) -> None:
        """Refuse a conversation that can't fit. This comes before rendering and encoding, which block the event loop.

        Raises:
            ContextLengthExceeded: the conversation has too many characters.
        """
        characters = sum(len(form.text) for form in asked.forms)
        if characters > self.max_length * _CHARACTERS_PER_TOKEN:
            raise self._too_long(f"{characters} characters")

    def _too_long(self, size: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the conversation has {size}, of {self.max_length} tokens at most",
            hint="allow fewer turns or shorter tool results, or raise max_token_length",
        )

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for an iteration of the event loop that no other session of this `Chat` uses.

        Rendering or parsing a conversation blocks the loop. With one session per iteration, other tasks run in between.
        """
        async with self._chat.turnstile:
            await asyncio.sleep(0)
            yield

    def _prompt(self, asked: TreeRequest, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Return the tokens between the known tokens and the answer."""
        if asked.before is None:
            return self._chat.prompt(messages, tools)
        answered = asked.known - 2  # the first known form is that of the tools
        prompt = self._chat.continuation(messages, answered, tools)
        return self._chat.follows(asked.before.sampled[-1], prompt)

    def _check(self, sampled: Sampled) -> None:
        """Refuse tokens that the tokenizer does not have.

        Raises:
            BadCompletion: the tokenizer does not have one of the tokens.
        """
        if (largest := max(sampled.tokens)) >= self._chat.vocabulary:
            raise BadCompletion(
                f"the server gave the token {largest}, and {self._chat.name} has {self._chat.vocabulary}",
                hint="set tokenizer_name to the tokenizer of the model that the server has loaded",
            )

    def _read(self, sampled: Sampled, tools: Sequence[Mapping[str, Any]], prompt_tokens: int, begun: str) -> ModelReply:
        written = sampled.tokens[:-1] if sampled.tokens[-1] in self._chat.end_tokens else sampled.tokens
        text = self._chat.decode(written)
        parsed = self._parser.parse(f"{begun}{text}", tools)
        calls = parsed.tool_calls(
            len(self._tree.answers) + 1, cut=sampled.finish_reason == "length", end_thinking=self._end_thinking
        )
        return ModelReply(
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


class _Nodes(Sequence[Node]):
    """The sequences of a session, made when they are first read, and then unchanged."""

    def __init__(self, session: ExactSession) -> None:
        self._session = session

    @cached_property
    def _nodes(self) -> list[Node]:
        return self._session.nodes

    @overload
    def __getitem__(self, index: int) -> Node: ...

    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...

    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)


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
        self.chat = chat
        self._parser = parser
        self._end_thinking = end_thinking
        self._servers = servers
        self._balancer = LoadBalancer([server.endpoint for server in servers])

    def on(self, server: TokenServer) -> ExactAgent:
        """Return the same agent on another server."""
        return ExactAgent(
            self.settings, [server], self.chat, self._parser, self.max_length, end_thinking=self._end_thinking
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
        with self._balancer.choose() as chosen:
            server = self._servers[chosen]
            options = {"max_length": await self._length(server), "end_thinking": self._end_thinking, **options}
            yield ExactSession(server, self.chat, self._parser, **options)

    async def check_endpoint(self) -> None:
        """Check that every server gives tokens with logprobs, and that its tokens are the tokenizer's.

        Raises:
            ModelError: a server can't be reached, refuses the key or the model, or gives no tokens with logprobs.
            ConfigError: a server has another tokenizer, its logprobs do not belong to the distribution from which it
                samples, or the maximum length of a conversation is not known.
        """
        temperature = 1.0 if self.settings.temperature is None else self.settings.temperature
        for server in self._servers:
            await self._length(server, server.settings.check_patience_s)
            await try_out(server, self.chat.tokenizer, temperature)

    async def aclose(self) -> None:
        """Close the connections to the servers."""
        for server in self._servers:
            await server.aclose()

    async def _length(self, server: TokenServer, patience_s: float = math.inf) -> int:
        """Return the maximum number of tokens of a conversation with this server."""
        length = self.max_length or (await server.fetch_info(patience_s=patience_s)).context
        if length is None:
            raise ConfigError(
                f"the server at {public_url(server.url)} does not say how long a conversation may be",
                hint="set max_token_length to the context of its model",
            )
        return length
