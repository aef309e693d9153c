"""The agent loop: ask the model, run its tool calls, and return the results to the model, until the model is done."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from hermes_core.agents.base import Agent, AgentResult, Message, StopReason, ToolHandler, nothing_more
from hermes_core.agents.calls import CallRunner, NumberedCall
from hermes_core.agents.compaction import REQUEST, Context, refuse_call
from hermes_core.agents.endpoint.errors import (
    ContextLengthExceeded,
    ConversationRefused,
    ResponseTooLarge,
    as_model_error,
)
from hermes_core.agents.endpoint.prices import TokenPrices
from hermes_core.agents.endpoint.request import count_waits
from hermes_core.agents.replies import ModelReply, read_reply
from hermes_core.errors import HermesError, ModelError, UsageError

_ENDS: dict[type[Exception], StopReason] = {
    ContextLengthExceeded: StopReason.CONTEXT_LENGTH,
    ConversationRefused: StopReason.REFUSED,
    ResponseTooLarge: StopReason.LENGTH,
}
"""Errors that end a conversation after its first answer, and that are not failures of the server."""


class ChatServer(Protocol):
    """The server for the loop: a wrapper of an endpoint, or a trainer's server that keeps tokens."""

    async def chat_completion(self, *, messages: Sequence[Message], **request: Any) -> Any:
        """Return one completion of `messages`, in the shape of the OpenAI API, as an object or as a dict; or a
        `ModelReply`."""
        ...


class SharesModel(Protocol):
    """An agent whose model another agent can ask, such as `model`."""

    def session(
        self, *, own: Callable[[], Collection[int]], keep_thinking: bool
    ) -> AbstractAsyncContextManager[ChatServer]:
        """Open the server that answers the model calls of one rollout.

        Args:
            own: returns the numbers of the answers to train on, for a server that keeps tokens: see `ExactSession`.
            keep_thinking: whether thinking stays in the conversation if the agent drops it: see `ExactSession`.
        """
        ...

    async def check_endpoint(self) -> None:
        """Check that the model can be used; see `CanCheckEndpoint`."""
        ...

    async def aclose(self) -> None:
        """Close the connections to the model."""
        ...


@runtime_checkable
class CanUseModel(Protocol):
    """The factory of agents that call a model themselves, so that another agent, such as a trainer's, can give them its
    model."""

    def on_model(self, settings: Any, model: SharesModel) -> Agent:
        """Return an agent with these settings that asks this model. The agent's `aclose` closes the model, too.

        Args:
            settings: an instance of the factory's `config_class`.

        Raises:
            ConfigError: the settings can't be used with a given model.
        """
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A server that keeps a record of its conversation, such as the tokens."""

    def get_state(self) -> Mapping[str, Any]:
        """Return the record, which becomes `AgentResult.managed_state` unchanged."""
        ...


def state_of(server: object) -> Mapping[str, Any] | None:
    """Return the record that a server keeps of its conversation; None if it keeps none."""
    return server.get_state() if isinstance(server, KeepsState) else None


class HermesAgentLoop:
    """One conversation between a model and its tools.

    Args:
        server: anything with `await chat_completion(messages=…, tools=…, n=1, temperature=…, …)`. If it also has
            `get_state()`, the return value becomes the result's `managed_state`.
        tool_schemas: the tools in the OpenAI function form.
        valid_tool_names: the tools that may be called; a call of any other is answered with an error.
        max_turns: maximum number of answers from the model.
        task_id: passed to the tool handler; generated if None.
        temperature, max_tokens, extra_body: for each request; None leaves them out.
        tool_handler: runs one call; may be None only if there are no tools.
        parallel_safe: tools whose calls within one turn may run at the same time.
        waiting: entered while waiting for the server, as `AgentTask.waiting`.
        price: what the model's tokens cost; None takes the cost that the server reports.
        compact_at: number of tokens from which the conversation is summarised by the model, and goes on from the
            summary; None lets it grow until it no longer fits the model's context.
        follow_up: awaited when the model is done, as `AgentTask.follow_up`.
    """

    def __init__(  # noqa: PLR0917 (callers know these by position)
        self,
        server: ChatServer,
        tool_schemas: Sequence[Mapping[str, Any]],
        valid_tool_names: Collection[str],
        max_turns: int = 30,
        task_id: str | None = None,
        temperature: float | None = 1.0,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        tool_handler: ToolHandler | None = None,
        *,
        parallel_safe: Collection[str] = frozenset(),
        waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        price: TokenPrices | None = None,
        compact_at: int | None = None,
        follow_up: Callable[[], Awaitable[Message | None]] = nothing_more,
    ) -> None:
        if tool_handler is None and valid_tool_names:
            raise UsageError("tools are given but nothing runs them", hint="pass a tool_handler")
        self.server = server
        self.valid_tool_names = frozenset(valid_tool_names)
        self.max_turns = max_turns
        self.task_id = task_id or str(uuid.uuid4())
        self.tool_handler = tool_handler
        self.parallel_safe = frozenset(parallel_safe)
        self._waiting = waiting
        self._price = price
        self._compact_at = compact_at
        self._follow_up = follow_up
        self._refusals = 0
        self.result = AgentResult()
        """The result of the current run, complete up to this moment. It survives cancellation and errors."""
        options = {
            "tools": list(tool_schemas) or None,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "extra_body": dict(extra_body) if extra_body else None,
        }
        self._options = {key: value for key, value in options.items() if value is not None}
        sampling = {"temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
        self._sampling = {key: value for key, value in sampling.items() if value is not None}

    async def run(self, messages: Sequence[Mapping[str, Any]], result: AgentResult | None = None) -> AgentResult:
        """Continue until the model is done or has to stop, and return `self.result`. One run at a time.

        Args:
            messages: the prompt; it is copied, never changed.
            result: an empty result to fill, for a caller that needs it even after an error.

        Raises:
            ModelError: the server failed; carries the result.
            InfraError, StaleSlotError: as the tool handler raised them.
        """
        self.result = result if result is not None else AgentResult()
        self._refusals = 0
        self.result.messages.extend(_prompt(messages))
        context = Context(self.result, self._compact_at)
        runner = CallRunner(self.result, self.valid_tool_names, self.tool_handler, self.task_id, self.parallel_safe)
        while self.result.turns_used < self.max_turns:
            try:
                compacts = context.is_full and self._can_go_on_after_one
                reason = await (self._compact(context) if compacts else self._turn(context, runner))
            except tuple(_ENDS) as failure:
                if not self.result.turns_used:
                    raise  # no answer so far: this is a wrong setting, which must not look like a failed task
                # The server accepted the same conversation when it was shorter. If this error failed the rollout, a
                # model could provoke it, and so have its bad rollouts removed from their group.
                reason = _ENDS[type(failure)]
            if reason is StopReason.FINISHED and (message := await self._follow_up()) is not None:
                context.ask(message)
            elif reason is not None:
                return self._stop(reason)
        return self._stop(StopReason.MAX_TURNS)

    @property
    def _can_go_on_after_one(self) -> bool:
        """Return whether the limit of turns allows two more answers of the model."""
        return self.result.turns_used + 1 < self.max_turns

    async def _turn(self, context: Context, runner: CallRunner) -> StopReason | None:
        """Have the model answer, and run its calls. Return why the conversation ends; None if it goes on."""
        started, waited_s = time.time(), self.result.waited_s
        try:
            reply = await self._ask(context.messages)
        except (ContextLengthExceeded, ConversationRefused) as failure:
            # An endpoint may refuse a conversation as too long with a message that `is_about_context` does not know.
            self._refusals += isinstance(failure, ConversationRefused)
            if not context.can_shrink or not self._can_go_on_after_one or self._refusals > 1:
                raise
            return await self._compact(context, fits=False)
        calls = self._record(reply, started, self.result.waited_s - waited_s)
        if not reply.calls:
            return _why_it_ended(reply)
        await runner.run(calls)
        return None

    async def _compact(self, context: Context, *, fits: bool = True) -> StopReason | None:
        """Have the model write a summary from which the conversation goes on. Return why the conversation ends; None if
        it goes on.

        If the context has no room for the summary, the last answers of the tools are left out.

        Args:
            fits: whether to try the conversation with these answers first.

        Raises:
            ContextLengthExceeded: there is no room even without these answers.
        """
        request: Message = {"role": "user", "content": REQUEST}
        started, waited_s = time.time(), self.result.waited_s
        try:
            if not fits:
                context.leave_out_last_answers()
            reply = await self._ask([*context.messages, request])
        except ContextLengthExceeded:
            if not fits:
                raise
            return await self._compact(context, fits=False)
        summary = reply.content.strip()
        self.result.messages.append(request)
        calls = self._record(reply, started, self.result.waited_s - waited_s, compacted=bool(summary))
        if summary:
            context.go_on_from(summary)
        await CallRunner(self.result, self.valid_tool_names, refuse_call, self.task_id).run(calls)
        return None if summary else StopReason.CONTEXT_LENGTH

    async def _ask(self, messages: Sequence[Message]) -> ModelReply:
        """Return one answer of the model to these messages."""
        try:
            return read_reply(await self._completion(messages), self.result.turns_used + 1)
        except Exception as error:
            if isinstance(error, UsageError) and self.result.turns_used:
                raise ConversationRefused(error.message, hint=error.hint) from error
            if isinstance(error, HermesError) and not isinstance(error, ModelError):
                raise
            failure = as_model_error(error)
            failure.result = self.result
            failure.trajectory_id = failure.trajectory_id or self.task_id
            self.result.stop(StopReason.MODEL_ERROR)
            if failure is error:
                raise
            raise failure from error

    async def _completion(self, messages: Sequence[Message]) -> Any:
        """Return the server's completion, and add the time that the request waited to `waited_s` of the result."""
        with count_waits() as waits:
            try:
                async with self._waiting():
                    return await self.server.chat_completion(messages=messages, n=1, **self._options)
            finally:
                self.result.waited_s += sum(waits)

    def _record(
        self, reply: ModelReply, started: float, waited_s: float, *, compacted: bool = False
    ) -> list[NumberedCall]:
        """Add the answer to the result, and return its calls.

        Args:
            started: when the answer was requested, in seconds since the epoch.
            waited_s: seconds since `started` in which the request waited for its turn at the server.
            compacted: whether the answer is a summary from which the conversation goes on.
        """
        result = self.result
        numbers = result.add_turn(
            reply.as_message(),
            started=started,
            reasoning=reply.reasoning,
            model=reply.model or result.model,
            waited_s=round(waited_s, 6),
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            cached_tokens=reply.cached_tokens,
            reasoning_tokens=reply.reasoning_tokens,
            cost=self._cost(reply),
            sampling=self._sampling if reply.sampling is None else reply.sampling,
            stop_reason=reply.finish_reason,
            weight_version=reply.weight_version,
            parts=reply.parts,
            compacted=compacted,
        )
        result.managed_state = state_of(self.server)
        return list(zip(numbers, reply.calls, strict=True))

    def _cost(self, reply: ModelReply) -> float | None:
        """Return the price of an answer in US dollars; None if it is not known."""
        if self._price is None:
            return reply.cost
        return self._price.cost(reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens or 0)

    def _stop(self, reason: StopReason) -> AgentResult:
        self.result.stop(reason)
        return self.result


def _prompt(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a copy of the prompt in which each message has a role and a content."""
    return [{"role": "user", "content": "", **copy.deepcopy(dict(message))} for message in messages]


def _why_it_ended(reply: ModelReply) -> StopReason:
    """Return why the conversation ends with this answer, which has no tool calls."""
    if reply.finish_reason == "length":
        return StopReason.LENGTH
    if reply.finish_reason == "content_filter":
        return StopReason.CONTENT_FILTER
    return StopReason.FINISHED if reply.content.strip() else StopReason.EMPTY_RESPONSE
