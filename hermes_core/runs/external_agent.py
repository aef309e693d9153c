"""A rollout whose agent is the caller: a trainer that runs the model itself, and sends the model's tool calls."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, Message, nothing_more
from hermes_core.agents.model import ModelAgent
from hermes_core.agents.replies import ModelReply, ToolCall
from hermes_core.aio import TaskSet
from hermes_core.environment import Item
from hermes_core.errors import FailureKind, RolloutEnded, describe
from hermes_core.records.record import Record
from hermes_core.rollout.rollout import RolloutContext, begin, run_rollout

_SETTINGS = AgentSettings(max_turns=sys.maxsize, temperature=None)


class DrivenRollout:
    """One rollout, with the usual stages and failures, whose tool calls come from the caller, one by one.

        rollout = DrivenRollout(context, item)
        if await rollout.begin():
            answer = await rollout.call("terminal", {"command": "ls"})
        record = await rollout.end("Done.")

    The time between two calls counts as the model's time (`model_timeout`). The slot is held from `begin` to `end`.

    Args:
        context: the values that all rollouts share; its agent is not used.
        item: the task.
        group: the rollouts of a group get slots of one sandbox, as far as there is room. None is the item's id.
        index: the number of the rollout in its group.
    """

    def __init__(self, context: RolloutContext, item: Item, *, group: str | None = None, index: int = 0) -> None:
        item_id = context.environment.item_id(item)
        self._caller = _Caller()
        # Only `begin` can repeat an attempt: later, the caller has seen answers on which its calls depend.
        limits = context.limits.model_copy(update={"infra_retries": 0})
        self._context = replace(context, agent=self._caller, limits=limits)
        self._retries = context.limits.infra_retries
        self._item = item
        self._trajectory = begin(self._context, item, item_id, group or item_id, index)
        self._tasks = TaskSet()
        self._running: asyncio.Task[Any] | None = None
        self._record: Record | None = None

    async def begin(self) -> bool:
        """Lease a slot and set it up. After an infrastructure failure, try again with a fresh slot, up to the limit.

        Returns:
            Whether calls can be made. If not, the record that `end` returns has the failure.

        Raises:
            UsageError, PolicyError: neither this nor any other rollout can get a slot with these settings.
        """
        for attempts_left in range(self._retries, -1, -1):
            work = run_rollout(self._context, self._item, self._trajectory)
            self._running = self._tasks.spawn(work, f"rollout {self._trajectory.trajectory_id}")
            try:
                if await self._wait_for_call(self._running):
                    return True
                self._running.result()
            except BaseException:
                await self.aclose()
                raise
            failure = self._trajectory.failure
            if failure is None or failure.kind is not FailureKind.INFRA or not attempts_left:
                break
            self._trajectory.begin_again()
        self._caller.close(failure.message if failure is not None else "it could not begin")
        return False

    async def _wait_for_call(self, running: asyncio.Task[Any]) -> bool:
        """Wait until the agent loop waits for the first call, or the rollout ends. Return True in the first case."""
        asked = self._tasks.spawn(self._caller.asked.wait(), "the first call")
        await asyncio.wait([running, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        return not running.done()

    @property
    def tool_schemas(self) -> Sequence[dict[str, Any]]:
        """Return the schemas of the rollout's tools; after `begin`, also those of MCP servers."""
        return self._trajectory.tool_schemas

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Run one tool call and return the answer for the model, as JSON text. Calls run one after the other.

        Raises:
            RolloutEnded: the rollout has ended, or ends before the call is answered; the message says why.
        """
        return await self._caller.ask(tool, arguments)

    async def end(self, text: str = "") -> Record:
        """Verify the work, release the slot, and return the record, with a reward or a failure. Idempotent.

        Args:
            text: the model's last message.
        """
        self._caller.say(text)
        if self._running is not None:
            await asyncio.wait([self._running])
        return self._finish()

    async def aclose(self) -> None:
        """Cancel the rollout unless it has ended, and release its slot. Idempotent."""
        await self._tasks.aclose()
        self._finish()

    def _finish(self) -> Record:
        if self._record is None:
            self._record = self._trajectory.to_record(self._context.redact)
            self._context.hooks.events.emit(
                "trajectory_finished", trajectory_id=self._record.trajectory_id, record=self._record.to_json()
            )
        return self._record


class _Caller:
    """The agent of a driven rollout: the ordinary agent loop, whose model is the caller."""

    name = ModelAgent.name

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set when the agent loop waits for the first call."""
        self._replies: asyncio.Queue[tuple[ModelReply, asyncio.Future[str]]] = asyncio.Queue()
        self._open: list[asyncio.Future[str]] = []
        """The calls without an answer so far, in order, including the model's last message."""
        self._ended: str | None = None
        self._calls = 0

    async def run(self, task: AgentTask) -> AgentResult:
        """Run the caller's calls until the caller gives the last message; see `Agent.run`."""
        reason = "the model was done"
        try:
            # The caller's last message ends the rollout, as nothing can tell the caller that the task goes on.
            return await ModelAgent(_SETTINGS, self).run(replace(task, follow_up=nothing_more))
        except asyncio.CancelledError:
            reason = "its time is up"
            raise
        except Exception as error:
            reason = describe(error)
            raise
        finally:
            self.close(reason)

    async def aclose(self) -> None:
        """Do nothing: this agent holds nothing open."""

    async def chat_completion(self, *, messages: Sequence[Message], **_: Any) -> ModelReply:
        """Give the caller the answer to its previous call, which is in `messages`, and wait for the next call."""
        if self.asked.is_set() and not (answered := self._open.pop(0)).done():
            answered.set_result(messages[-1]["content"])
        self.asked.set()
        reply, answer = await self._replies.get()
        self._open.append(answer)
        return reply

    async def ask(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Pass a call to the agent loop, and return the answer. Raise as `DrivenRollout.call`."""
        if self._ended is not None:
            raise self._over()
        self._calls += 1
        text = json.dumps(arguments, ensure_ascii=False, default=str)
        call = ToolCall(f"call_{self._calls}", tool, text, arguments)
        return await self._say("", (call,))

    def say(self, text: str) -> None:
        """Pass the model's last message to the agent loop, which ends the loop."""
        if self._ended is None:
            self._say(text, ())

    def close(self, reason: str) -> None:
        """Refuse all calls without an answer, and all later calls."""
        self._ended = reason
        while not self._replies.empty():
            self._open.append(self._replies.get_nowait()[1])
        for answer in self._open:
            if not answer.done():
                answer.set_exception(self._over())
                answer.exception()  # marks the error as seen: nobody awaits the last message's answer
        self._open.clear()

    def _say(self, text: str, calls: tuple[ToolCall, ...]) -> asyncio.Future[str]:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reply = ModelReply(
            content=text,
            calls=calls,
            reasoning=None,
            reasoning_details=None,
            finish_reason="tool_calls" if calls else "stop",
            prompt_tokens=0,
            completion_tokens=0,
        )
        self._replies.put_nowait((reply, answer))
        return answer

    def _over(self) -> RolloutEnded:
        return RolloutEnded(f"the rollout has ended: {self._ended}", hint="no call can be made any more")
