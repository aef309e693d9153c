"""Runs the tool calls of one conversation, and records them in the agent's result."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hermes_core.agents.base import AgentResult, AgentTask, CallError, CallErrorKind, ToolAnswer, ToolError, ToolHandler
from hermes_core.agents.replies import ToolCall, decode_arguments, sayable
from hermes_core.aio import together
from hermes_core.errors import InfraError, StaleSlotError, nearest_hint

logger = logging.getLogger(__name__)

PARALLEL_CALLS = 32
"""Maximum number of calls of one turn that run at the same time."""

NumberedCall = tuple[int, ToolCall]
"""A call, with its place in `AgentResult.calls`."""


async def run_calls(task: AgentTask, numbers: Iterable[int]) -> list[ToolAnswer]:
    """Run tool calls of a task, and return their answers. This is for agents with a loop of their own.

    Each answer replaces the call's tool message in the conversation, and `task.result.calls` gets its times, error and
    exit code. A call is answered with an error if the task does not have its tool, if its arguments are not JSON, or if
    the tool fails.

    Args:
        numbers: the calls, as `AgentResult.add_turn` returned them.

    Raises:
        InfraError, StaleSlotError: as the tool handler raised them; these errors end the rollout.
    """
    runner = CallRunner(
        result=task.result,
        names=frozenset(schema["function"]["name"] for schema in task.tool_schemas),
        handler=task.tool_handler,
        task_id=task.trajectory_id,
        parallel_safe=task.parallel_safe,
    )
    calls = [(number, task.result.calls[number]) for number in numbers]
    return await runner.run(
        [
            (number, ToolCall(call.id, call.name, call.arguments, *decode_arguments(call.arguments)))
            for number, call in calls
        ]
    )


@dataclass(frozen=True)
class CallRunner:
    """Runs the tool calls of one conversation."""

    result: AgentResult
    """Where the answers go."""
    names: Collection[str]
    """The tools that may be called; a call of any other is answered with an error."""
    handler: ToolHandler | None
    """Runs one call; may be None only if there are no tools."""
    task_id: str
    parallel_safe: Collection[str] = frozenset()
    """Tools whose calls within one turn may run at the same time."""

    async def run(self, calls: Sequence[NumberedCall]) -> list[ToolAnswer]:
        """Run one turn's calls and return their answers. The calls run together if all of their tools are in
        `parallel_safe`, else in order.

        Raises:
            InfraError, StaleSlotError: as the tool handler raised them.
        """
        if not all(call.name in self.parallel_safe for _, call in calls):
            return [await self._run_one(number, call) for number, call in calls]
        room = asyncio.Semaphore(PARALLEL_CALLS)

        async def run(number: int, call: ToolCall) -> ToolAnswer:
            async with room:
                return await self._run_one(number, call)

        async with together() as group:
            tasks = [group.create_task(run(*each)) for each in calls]
        if any(
            task.cancelled() for task in tasks
        ):  # cancelled by the handler itself: a task group takes this for an ordinary end
            raise asyncio.CancelledError
        return [task.result() for task in tasks]

    async def _run_one(self, number: int, call: ToolCall) -> ToolAnswer:
        """Run one call, and put its answer into its record and its tool message."""
        result = self.result
        result.tool_calls_attempted += 1
        record = result.calls[number] = replace(result.calls[number], started=time.time())
        try:
            answer = await self._answer(call)
        except BaseException:  # the call has no answer, but it took time
            result.calls[number] = replace(record, ended=time.time())
            raise
        content = result.messages[record.message]["content"] = sayable(answer)
        result.calls[number] = replace(
            record,
            ended=time.time(),
            error=answer.error,
            exit_code=answer.exit_code,
            bytes_dropped=answer.bytes_dropped,
        )
        if answer.error is None or answer.exit_code is not None:  # a command that ran is data, however it ended
            result.tool_calls_executed_ok += 1
            return answer
        message = answer.error.message
        result.tool_calls_exec_error += 1
        result.tool_errors.append(ToolError(result.turns_used, call.name, call.text, message, content))
        logger.debug("trajectory %s, turn %d: %s failed: %s", self.task_id, result.turns_used, call.name, message)
        return answer

    async def _answer(self, call: ToolCall) -> ToolAnswer:
        """Return the answer to the model."""
        if call.name not in self.names and (call.name or call.error is None):
            unknown = f"unknown tool {call.name!r}: {nearest_hint(call.name, self.names)}"
            return ToolAnswer.refusal(CallError(CallErrorKind.UNKNOWN_TOOL, unknown))
        if call.arguments is None:
            return ToolAnswer.refusal(CallError(CallErrorKind.INVALID_ARGUMENTS, str(call.error)))
        assert self.handler is not None  # there are no valid names without one
        # Count the call as valid now, because it may be interrupted, and subtract it if the tool refuses the arguments.
        valid = int(not call.repaired)
        self.result.tool_calls_schema_valid += valid
        try:
            content = await self.handler(call.name, call.arguments, self.task_id)
            if not isinstance(content, str):
                raise TypeError(f"a tool handler gives JSON text, not {type(content).__name__}")
        except (InfraError, StaleSlotError):
            raise
        except Exception as error:
            logger.warning("trajectory %s: tool %s raised", self.task_id, call.name, exc_info=True)
            failed = f"{call.name} failed: {type(error).__name__}: {error}"
            return ToolAnswer.refusal(CallError(CallErrorKind.FAILED, failed))
        answer = content if isinstance(content, ToolAnswer) else ToolAnswer.read(content)
        if answer.error is not None and answer.error.kind is CallErrorKind.INVALID_ARGUMENTS:
            self.result.tool_calls_schema_valid -= valid
        return answer
