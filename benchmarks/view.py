"""How long `show` and `view` take to open a run of 20,000 rollouts, and how much memory they need."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import MB, Row, Rows, Target
from hermes_core.agents.base import CallError, CallErrorKind, CallRecord, Message, TurnRecord, Usage
from hermes_core.errors import FailureKind
from hermes_core.records.record import Failure, Record, SandboxCommand, ToolCalls
from hermes_core.records.store import TRAJECTORIES, OutputFolder
from hermes_core.records.summary import Tally

LOG = """
import sys, time
from pathlib import Path
began, times = time.perf_counter(), []
from hermes_core.export.eval_log import RunLog
from hermes_core.records.index import RecordedRun
log = RunLog(RecordedRun(Path(sys.argv[1])), Path(sys.argv[2]))
log.update(lambda done, of: times.append(time.perf_counter() - began))
last = time.perf_counter() - began
print(times[0] if times else last, last)
"""
"""What `view` does before the viewer has all rollouts. Prints the seconds to the first ones, and to all."""

TOOLS = ("terminal", "read_file", "patch", "search")
WORDS = ["build", "error", "in", "module", "test", "passed", "failed", "line", "return", "value", "of", "function"]


def make_run(folder: Path, items: int, group: int, turns: int = 5, output: int = 1500) -> None:
    """Write a run as `rollout` does, of made-up records.

    Args:
        output: characters of a tool's output.
    """
    drawn = random.Random(7)
    out = OutputFolder(folder)
    configuration = {
        "environment": "tasks",
        "agent": "model",
        "agent_settings": {"model": "scripted", "max_turns": 30},
        "backend": "local",
        "env": {},
        "group_size": group,
    }
    out.open(configuration, {"versions": {"hermes-rl": "0.1.0"}, "seed": 7, "concurrency": 4}, Tally(), resume=False)
    tally = Tally()
    for number in range(items * group):
        record = _record(drawn, number // group, number % group, turns, output, number)
        out.append(record.line())
        tally.add(record)
    out.write_summary(tally.summary(items * group, out_dir=str(folder)))
    out.close()


def _record(drawn: random.Random, item: int, index: int, turns: int, output: int, number: int) -> Record:
    """Return a record; what came out of it is drawn: a reward, a limit, or a failure."""
    begin = time.time() + number * 0.5
    clock = begin + 1.5
    messages: list[Message] = [
        {"role": "system", "content": "You are an agent with tools. " * 20},
        {"role": "user", "content": f"Task {item}: make the tests pass. " + _text(drawn, 600)},
    ]
    answers, calls = [], []
    for turn in range(turns):
        took, tool = drawn.uniform(0.5, 4.0), drawn.choice(TOOLS)
        arguments = f'{{"command": "pytest -q tests/test_{turn}.py"}}'
        answers.append(
            TurnRecord(len(messages), "scripted", clock, clock + took, 0.0, 900 * (turn + 1), 80, 0, None, 0.002)
        )
        function = {"name": tool, "arguments": arguments}
        asked = {"id": f"c{turn}", "type": "function", "function": function}
        thought = {"reasoning_content": _text(drawn, 300)} if turn % 2 else {}
        messages.append({"role": "assistant", "content": "I will look.", "tool_calls": [asked], **thought})
        clock += took
        failed = drawn.random() < (0.2 if tool == "patch" else 0.03)
        error = CallError(CallErrorKind.FAILED, "the text to replace was not found") if failed else None
        code = drawn.choice([0, 0, 0, 1]) if tool == "terminal" else None
        calls.append(CallRecord(turn, len(messages), f"c{turn}", tool, arguments, clock, clock + 0.3, error, code, 0))
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "name": tool, "content": _text(drawn, output)})
        clock += 0.3
    outcome = drawn.random()
    solved = outcome < 0.4
    failure = Failure(FailureKind.INFRA, "verify", "the sandbox was lost") if outcome > 0.95 else None
    report = {"reason": "all tests passed" if solved else "2 of 9 tests failed", "failing": ["tests/a.py::test_b"]}
    return Record(
        *(f"{number:032x}", "tasks", f"task-{item:05}", f"task-{item:05}", index, "model", "local", "scripted", 7),
        started=begin,
        ended=clock + 2.0,
        reward=None if failure else float(solved),
        details={} if failure else {**report, "output": _text(drawn, 800)},
        failure=failure,
        messages=messages,
        turns=tuple(answers),
        calls=tuple(calls),
        stop_reason="max_turns" if 0.4 < outcome < 0.5 else "finished",
        timings={"acquire_s": 0.5, "setup_s": 1.0, "agent_s": clock - begin - 1.5, "verify_s": 2.0, "release_s": 0.1},
        tool_calls=ToolCalls(turns, turns, turns, 0),
        usage=Usage(turns, 450 * turns * (turns + 1), 80 * turns, 0, 0.002 * turns),
        sandbox_commands=(
            SandboxCommand("verify", "pytest -q", clock, clock + 1.9, int(not solved), _text(drawn, 500)),
        ),
        isolation="namespace",
        versions={"hermes-rl": "0.1.0", "python": "3.11.7"},
    )


def _text(drawn: random.Random, size: int) -> str:
    words = drawn.choices(WORDS, k=size // 6)
    return "\n".join(" ".join(words[begin : begin + 10]) for begin in range(0, len(words), 10))


def _measured(*command: str) -> tuple[float, float, str]:
    """Run a command of Python; return its seconds, its largest memory in MB, and what it printed."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.perf_counter() - began, usage.ru_maxrss / 1000, printed


async def rows(quick: bool) -> Rows:
    """Seconds and memory to open a run, the first time and later."""
    count = 2_000 if quick else 20_000
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run, count // 4, 4)
        case = f"{count:,} rollouts, {(run / TRAJECTORIES).stat().st_size / MB:.0f} MB"
        for when in ("first", "again"):
            seconds, memory, _ = _measured("-m", "hermes_core", "show", str(run))
            yield Row("view", f"show, {when}: {case}", seconds, None, "s", Target(3.0))
            yield Row("view", f"show, {when}: memory", memory, None, "MB", Target(500.0))
        (run / f".{TRAJECTORIES}.index").unlink()
        for when in ("first", "again"):
            _, memory, printed = _measured("-c", LOG, str(run), str(Path(folder) / "log.eval"))
            first, last = map(float, printed.split())
            yield Row("view", f"log, {when}: the first rollouts can be read", first, None, "s", Target(3.0))
            yield Row("view", f"log, {when}: all can be read", last, None, "s")
            yield Row("view", f"log, {when}: memory", memory, None, "MB", Target(500.0))


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
