"""Calls of tools in slots: found by name, held to their time limit; many at a time in a batch."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hermes_core.errors import ErrorKind, HermesError, InfraError, StaleSlotError, UnknownNameError, UsageError
from hermes_core.sandbox.pool.leases import Lease
from hermes_core.sandbox.results import ExecutionResult, Slot, SlotState
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.slot_tools import SLOT_TOOLS

log = logging.getLogger(__name__)

OVERTIME_S = 15.0
"""How long after its time limit, and the time in which a lost channel may come back, a tool is cut off, in seconds."""

Watch = Callable[[Slot, str, float], float]
"""Begins to watch a background process of a slot, every so many seconds; the interval that holds."""


class ToolCalls:
    """The tool calls of one tool backend, which documents them.

    Args:
        find_lease: the lease of a slot; raises if it has ended.
    """

    def __init__(self, tools: ToolRegistry, find_lease: Callable[[Slot], Lease], watch: Watch) -> None:
        self._tools = tools
        self._find_lease = find_lease
        self._watch = watch

    async def execute(
        self, slot: Slot, tool: str | Tool, args: Mapping[str, Any], timeout_s: float | None
    ) -> ExecutionResult:
        """`ToolBackend.execute`."""
        lease = self._find_lease(slot)
        if timeout_s is not None:
            check_time_limit(timeout_s, timeout_s)
        began = time.monotonic()
        lease.executing += 1
        slot.state = SlotState.EXECUTING
        try:
            result = await lease.call(self._call, lease, tool, args, timeout_s)
        finally:
            lease.executing -= 1
            if lease.executing == 0 and slot.state is SlotState.EXECUTING:
                slot.state = SlotState.ACQUIRED
        return replace(
            result,
            slot_id=slot.slot_id,
            execution_id=result.execution_id or uuid.uuid4().hex,
            metadata={"duration_s": time.monotonic() - began, **result.metadata},
        )

    async def _call(
        self, lease: Lease, wanted: str | Tool, args: Mapping[str, Any], timeout_s: float | None
    ) -> ExecutionResult:
        try:
            tool = self.tool(wanted) if isinstance(wanted, str) else wanted
            if tool.where != "sandbox":
                raise UnknownNameError("tool of the slot", tool.name, self._names())
        except UnknownNameError as error:
            return ExecutionResult(False, error=str(error), error_kind=ErrorKind.COMMAND)
        limit = tool.time_limit(timeout_s, lease.config.execution_timeout_s)
        context = CallContext(
            trajectory_id=lease.slot.trajectory_id,
            timeout_s=limit,
            commands=lease.commands,
            slot=lease.slot,
            state=lease.state,
            watch=lambda process_id, interval_s: self._watch(lease.slot, process_id, interval_s),
        )
        try:
            async with asyncio.timeout(limit + lease.config.orphan_ttl_s + OVERTIME_S):
                return await self._tools.call(tool, context, args)
        except TimeoutError:
            log.error("tool %s did not keep its time limit of %g s and was cut off", tool.name, limit)
            error_text = f"{tool.name} was cut off: it did not keep its time limit of {limit:g} s"
            return ExecutionResult(False, error=error_text, error_kind=ErrorKind.TIMEOUT, metadata={"timed_out": True})

    def tool(self, name: str) -> Tool:
        """`ToolBackend.tool`."""
        if (tool := SLOT_TOOLS.get(name)) is not None:
            return tool
        if name in self._names():
            return self._tools.get(name)
        raise UnknownNameError("tool of the slot", name, self._names())

    def _names(self) -> set[str]:
        """The tools that can be called by name."""
        return {*SLOT_TOOLS, *(each for each in self._tools.names() if self._tools.get(each).where == "sandbox")}

    async def execute_batch(
        self, requests: Sequence[tuple[Slot, str, Mapping[str, Any]]], timeout_s: float | None
    ) -> list[ExecutionResult]:
        """`ToolBackend.execute_batch`."""
        if timeout_s is not None:
            check_time_limit(timeout_s, timeout_s)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._execute_one(*request, timeout_s)) for request in requests]
        return [task.result() for task in tasks]

    async def _execute_one(
        self, slot: Slot, tool_name: str, args: Mapping[str, Any], timeout_s: float | None
    ) -> ExecutionResult:
        try:
            return await self.execute(slot, tool_name, args, timeout_s)
        except StaleSlotError as error:
            return _failed(slot, error, ErrorKind.POLICY)
        except InfraError as error:
            return _failed(slot, error, ErrorKind.INFRA)
        except Exception as error:
            log.exception("a request of a batch failed in slot %s", slot.slot_id)
            return _failed(slot, error, ErrorKind.INFRA)


def check_time_limit(timeout_s: float | None, default: float) -> float:
    """The time limit in seconds, or the default if None; fractions stay.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    if timeout_s is None:
        return default
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise UsageError(f"a time limit is a positive number of seconds, not {timeout_s!r}", hint="leave it out")
    return timeout_s


def _failed(slot: Slot, error: Exception, kind: ErrorKind) -> ExecutionResult:
    text = str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
    return ExecutionResult(False, error=text, slot_id=slot.slot_id, execution_id=uuid.uuid4().hex, error_kind=kind)
