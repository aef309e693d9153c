"""The agent loop: ask the model, run its tool calls, return the results to it, until it is done."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from hermes_core.agents.base import (
    AgentResult,
    CallError,
    CallErrorKind,
    CallRecord,
    Message,
    StopReason,
    ToolAnswer,
    ToolError,
    ToolHandler,
    TurnRecord,
    Usage,
)
from hermes_core.agents.failures import (
    ContextLengthExceeded,
    ConversationRefused,
    ResponseTooLarge,
    as_model_error,
)
from hermes_core.agents.prices import TokenPrices
from hermes_core.agents.replies import Reply, ToolCall, encodable, read_reply
from hermes_core.agents.traffic import counted_waits
from hermes_core.errors import (
    HermesError,
    InfraError,
    ModelError,
    StaleSlotError,
    UsageError,
    nearest_hint,
)

logger = logging.getLogger(__name__)

PARALLEL_CALLS = 32
"""Maximum number of calls of one turn that run at the same time."""

_ENDS: dict[type[Exception], StopReason] = {
    ContextLengthExceeded: StopReason.CONTEXT_LENGTH,
    ConversationRefused: StopReason.REFUSED,
    ResponseTooLarge: StopReason.LENGTH,
}
"""Errors that end a conversation that had begun, and are not the server's failure."""

_Call = tuple[int, ToolCall]
"""A call, with its place in `AgentResult.calls`."""

_INTERRUPTED = CallError(CallErrorKind.INTERRUPTED, "interrupted before the tool had answered")


class ChatServer(Protocol):
    """The server for the loop: a wrapper of an endpoint, or a trainer's server that keeps tokens."""

    async def chat_completion(self, *, messages: Sequence[Message], **request: Any) -> Any:
        """Return one completion of `messages`, in the shape of the OpenAI API, as an object or as a dict; or a
        `Reply`."""
        ...


class HermesAgentLoop:
    """One conversation between a model and its tools.

    Args:
        server: anything with `await chat_completion(messages=…, tools=…, n=1, temperature=…, …)`. If it also has
            `get_state()`, that becomes the result's `managed_state`.
        tool_schemas: the tools in the OpenAI function form.
        valid_tool_names: the tools that may be called; a call of any other is answered with an error.
        max_turns: maximum number of answers from the model.
        task_id: passed to the tool handler; generated if None.
        temperature, max_tokens, extra_body: for each request; None leaves them out.
        tool_handler: runs one call; may be None only if there are no tools.
        parallel_safe: tools whose calls within one turn may run at the same time.
        waiting: entered while waiting for the server, as `AgentTask.waiting`.
        price: what the model's tokens cost; None takes the cost that the server reports.
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
        self.result.messages.extend(_prompt(messages))
        for _ in range(self.max_turns):
            started, waited_s = time.time(), self.result.waited_s
            try:
                reply = await self._ask()
            except tuple(_ENDS) as failure:
                if not self.result.turns_used:
                    raise  # no answer so far: this is a wrong setting, which must not look like a failed task
                # The server accepted the same conversation with less in it. If this failed the rollout, a model could
                # write something that makes its bad rollouts be removed from their group.
                return self._stop(_ENDS[type(failure)])
            calls = self._record(reply, started, self.result.waited_s - waited_s)
            if not reply.calls:
                return self._stop(_why_it_ended(reply))
            await self._run_calls(calls)
        return self._stop(StopReason.MAX_TURNS)

    async def _ask(self) -> Reply:
        """Return one answer of the model to the conversation so far."""
        try:
            return read_reply(await self._completion(), self.result.turns_used + 1)
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

    async def _completion(self) -> Any:
        """Return the server's completion, and count the time that it was waited for."""
        with counted_waits() as waits:
            try:
                async with self._waiting():
                    return await self.server.chat_completion(messages=[*self.result.messages], n=1, **self._options)
            finally:
                self.result.waited_s += waits.seconds

    def _record(self, reply: Reply, started: float, waited_s: float) -> list[_Call]:
        """Add the answer to the result, with a tool message for each call, to be filled in when the call has ended.

        There is no await in between, so the conversation is complete at any moment.

        Args:
            started: when the answer was asked for, in seconds since the epoch.
            waited_s: for how much of the time since then the request waited for the server's turn.
        """
        result, cost = self.result, self._cost(reply)
        turn, message, number = len(result.turns), len(result.messages), len(result.calls)
        answers: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _refusal(_INTERRUPTED)}
            for call in reply.calls
        ]
        result.messages += [reply.as_message(), *answers]
        result.turns_used += 1
        result.reasoning_per_turn.append(reply.reasoning)
        result.turns.append(
            TurnRecord(
                message=message,
                model=reply.model or result.model,
                started=started,
                ended=time.time(),
                waited_s=round(waited_s, 6),
                prompt_tokens=reply.prompt_tokens,
                completion_tokens=reply.completion_tokens,
                cached_tokens=reply.cached_tokens,
                reasoning_tokens=reply.reasoning_tokens,
                cost=cost,
                sampling=self._sampling if reply.sampling is None else reply.sampling,
                stop_reason=reply.finish_reason,
            )
        )
        result.calls += [
            CallRecord(turn, place, call.id, call.name, call.text, error=_INTERRUPTED)
            for place, call in enumerate(reply.calls, message + 1)
        ]
        result.usage.add(Usage(1, reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens or 0, cost))
        get_state = getattr(self.server, "get_state", None)
        result.managed_state = get_state() if get_state is not None else None
        return list(enumerate(reply.calls, number))

    def _cost(self, reply: Reply) -> float | None:
        """Return the price of an answer in US dollars; None if it is not known."""
        if self._price is None:
            return reply.cost
        return self._price.cost(reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens or 0)

    async def _run_calls(self, calls: Sequence[_Call]) -> None:
        """Run one turn's calls: together if all of them are safe, else in order."""
        if not all(call.name in self.parallel_safe for _, call in calls):
            for number, call in calls:
                await self._run_call(number, call)
            return
        failure: BaseException | None = None
        room = asyncio.Semaphore(PARALLEL_CALLS)

        async def run(number: int, call: ToolCall) -> None:
            async with room:
                await self._run_call(number, call)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(*each)) for each in calls]
        except BaseExceptionGroup as errors:
            failure = errors.exceptions[0]
        if failure is not None:  # raised outside the group, so that it keeps its own cause
            raise failure
        if any(
            task.cancelled() for task in tasks
        ):  # cancelled by the handler itself: a group treats that as an ordinary end
            raise asyncio.CancelledError

    async def _run_call(self, number: int, call: ToolCall) -> None:
        """Run one call, and put its result into its record and its tool message."""
        result = self.result
        result.tool_calls_attempted += 1
        record = result.calls[number] = replace(result.calls[number], started=time.time())
        answer = await self._answer(call)
        content = result.messages[record.message]["content"] = encodable(answer)
        result.calls[number] = replace(
            record,
            ended=time.time(),
            error=answer.error,
            exit_code=answer.exit_code,
            bytes_dropped=answer.bytes_dropped,
        )
        if answer.error is None or answer.exit_code is not None:  # a command that ran is data, however it ended
            result.tool_calls_executed_ok += 1
            return
        said = answer.error.message
        result.tool_calls_exec_error += 1
        result.tool_errors.append(ToolError(result.turns_used, call.name, call.text, said, content))
        logger.debug("trajectory %s, turn %d: %s failed: %s", self.task_id, result.turns_used, call.name, said)

    async def _answer(self, call: ToolCall) -> ToolAnswer:
        """Return the answer to the model."""
        if call.name not in self.valid_tool_names and (call.name or call.error is None):
            unknown = f"unknown tool {call.name!r}: {nearest_hint(call.name, self.valid_tool_names)}"
            return _refusal(CallError(CallErrorKind.UNKNOWN_TOOL, unknown))
        if call.arguments is None:
            return _refusal(CallError(CallErrorKind.INVALID_ARGUMENTS, str(call.error)))
        assert self.tool_handler is not None  # see __init__: there are no valid names without one
        # Count now, and take it back if the tool refuses the arguments, because a call that is interrupted was valid.
        valid = int(not call.repaired)
        self.result.tool_calls_schema_valid += valid
        try:
            content = await self.tool_handler(call.name, call.arguments, self.task_id)
            if not isinstance(content, str):
                raise TypeError(f"a tool handler gives JSON text, not {type(content).__name__}")
        except (InfraError, StaleSlotError):
            raise
        except Exception as error:
            logger.warning("trajectory %s: tool %s raised", self.task_id, call.name, exc_info=True)
            failed = f"{call.name} failed: {type(error).__name__}: {error}"
            return _refusal(CallError(CallErrorKind.FAILED, failed))
        answer = content if isinstance(content, ToolAnswer) else _read(content)
        if answer.error is not None and answer.error.kind is CallErrorKind.INVALID_ARGUMENTS:
            self.result.tool_calls_schema_valid -= valid
        return answer

    def _stop(self, reason: StopReason) -> AgentResult:
        self.result.stop(reason)
        return self.result


def _prompt(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a copy of the prompt in which each message has a role and a content."""
    return [{"role": "user", "content": "", **copy.deepcopy(dict(message))} for message in messages]


def _why_it_ended(reply: Reply) -> StopReason:
    """Return why an answer without tool calls is the last one."""
    if reply.finish_reason == "length":
        return StopReason.LENGTH
    if reply.finish_reason == "content_filter":
        return StopReason.CONTENT_FILTER
    return StopReason.FINISHED if reply.content.strip() else StopReason.EMPTY_RESPONSE


def _refusal(error: CallError) -> ToolAnswer:
    """Return the answer to a call that was not carried out."""
    return ToolAnswer(json.dumps({"error": error.message}, ensure_ascii=False), error)


def _read(content: str) -> ToolAnswer:
    """Return what the JSON text of an answer says. With an exit code it is from a command that ran, so it is data."""
    if '"error"' not in content and '"exit_code"' not in content:
        return ToolAnswer(content)
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return ToolAnswer(content)
    if not isinstance(said, dict):
        return ToolAnswer(content)
    if (exit_code := said.get("exit_code")) is not None or not said.get("error"):
        return ToolAnswer(content, exit_code=exit_code if isinstance(exit_code, int) else None)
    kind = CallErrorKind.INVALID_ARGUMENTS if said.get("invalid_arguments") else CallErrorKind.FAILED
    return ToolAnswer(content, CallError(kind, str(said["error"])))
