"""The log of a hook's commands: how each ended, and how much is kept."""

from __future__ import annotations

import asyncio

import pytest

from hermes_core.records.record import SandboxCommand
from hermes_core.rollout.command_log import MAX_COMMAND, MAX_OUTPUT, MOST_COMMANDS, CommandLog
from hermes_core.sandbox.commands import CommandResult, ExecutionResult

LATE = "\n[ended at its time limit]"


async def logged(result: CommandResult | ExecutionResult | BaseException, command: str = "true") -> SandboxCommand:
    async def work() -> CommandResult:
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[return-value]

    log = CommandLog()
    try:
        assert await log.run(command, work()) is result
    except BaseException as error:
        assert error is result
    (entry,) = log
    return entry


@pytest.mark.parametrize(
    ("result", "exit_code", "output", "dropped"),
    [
        (CommandResult(1, stdout=b"out", stderr=b"err", stdout_bytes=3, stderr_bytes=3), 1, "outerr", 0),
        (CommandResult(0, stdout=b"a", stdout_bytes=100), 0, "a", 99),
        (CommandResult(None, signal=9, stdout=b"a"), None, "a\n[killed by signal 9]", 0),
        (CommandResult(0, timed_out=True), None, LATE, 0),
        (ExecutionResult(False, "out", "err", {"exit_code": 2, "bytes_dropped": 5}), 2, "outerr", 5),
        (
            ExecutionResult(False, metadata={"exit_code": 124, "timed_out": True}),
            None,
            LATE,
            0,
        ),
        (ExecutionResult(False, error="it is no command"), None, "it is no command", 0),
        (OSError("the wire"), None, "the wire", 0),
        (asyncio.CancelledError(), None, "cancelled", 0),
    ],
)
async def test_a_command_is_logged_however_it_ends(
    result: CommandResult | ExecutionResult | BaseException, exit_code: int | None, output: str, dropped: int
) -> None:
    entry = await logged(result)
    assert (entry.exit_code, entry.output, entry.bytes_dropped) == (exit_code, output, dropped)
    assert entry.started <= entry.ended


@pytest.mark.parametrize("letter", ["x", "€"])
async def test_a_long_output_keeps_its_head_and_tail_and_counts_the_rest(letter: str) -> None:
    text = f"begin{letter * MAX_OUTPUT}end".encode()
    entry = await logged(CommandResult(0, stdout=text, stdout_bytes=len(text) + 1000))
    assert entry.output.startswith("begin" + letter) and entry.output.endswith(letter + "end")
    assert "\ufffd" not in entry.output and len(entry.output.encode()) < MAX_OUTPUT + 100
    head, _, tail = entry.output.partition("\n... [")
    tail = tail.partition("] ...\n")[2]
    assert entry.bytes_dropped == len(text) + 1000 - len(head.encode()) - len(tail.encode())


async def test_a_long_command_is_cut() -> None:
    entry = await logged(CommandResult(0), "cat " + "x" * 2 * MAX_COMMAND)
    assert entry.command.startswith("cat x") and len(entry.command) < MAX_COMMAND + 100


async def test_the_first_and_the_last_of_many_commands_are_kept() -> None:
    async def work() -> CommandResult:
        return CommandResult(0)

    log = CommandLog()
    for number in range(3 * MOST_COMMANDS):
        await log.run(str(number), work())
    half = MOST_COMMANDS // 2
    kept = [int(entry.command) for entry in log]
    assert kept == [*range(half), *range(3 * MOST_COMMANDS - half, 3 * MOST_COMMANDS)]
    assert log.left_out == 2 * MOST_COMMANDS
