"""Thousands of rollouts in one run of `hermes-rl rollout`: the driver's memory and processor time, and deaths of it.

`python -m benchmarks.datagen [--rollouts N] [--only CASE] [--kills K] [--profile FILE]` does one of it, with 20,000.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_testing.scripted_server import Reply, ScriptedServer, ToolScript, call

from benchmarks.measure import MB, Row, Rows, Target, rss

ROLLOUTS = 20_000
MARKS = (0.1, 0.5, 1.0)
"""The shares of the rollouts at which the memory is looked at."""
GROWTH, CPU = Target(20, False), Target(25)
"""MB between the first mark and the last; milliseconds of the driver for a rollout."""
CONCURRENCY = 32
KILLS = 10
ANSWER = Reply("An answer of some length. " * 40, usage=(500, 250))


def solver(prompt: str) -> Any:
    """The model of the cases with tools: one command, then an answer."""
    yield call("terminal", command="echo done > out.txt")
    return ANSWER


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    environment: str
    row: Callable[[int], Mapping[str, Any]]
    script: Any
    arguments: Sequence[str] = ()
    rollouts: int = 2_000
    """How many in `make bench`."""


def _prompt(number: int) -> dict[str, Any]:
    """A quarter of the lines are copies of others."""
    return {"prompt": f"Question {number * 3 // 4}: " + "please explain it in some detail. " * 20}


CASES = (
    Case("`prompts` without tools", "prompts", _prompt, [ANSWER], ("--env.enabled_toolsets=",), ROLLOUTS),
    Case("`prompts` with tools, local sandboxes", "prompts", _prompt, ToolScript(solver)),
    Case(
        "`tasks`, local sandboxes",
        "tasks",
        lambda number: {"id": f"task-{number}", **_prompt(number), "check": "grep -qx done out.txt"},
        ToolScript(solver),
    ),
)


async def rows(quick: bool) -> Rows:
    """Memory, processor time and what is left after ten deaths, for each case."""
    for case in CASES:
        rollouts = case.rollouts // 10 if quick else case.rollouts
        found = await measured(case, rollouts)
        memory = ", ".join(f"{bytes_ / MB:.0f} MB after {count}" for count, bytes_ in found.memory.items())
        name = f"{rollouts} rollouts, {case.name}"
        growth = (found.memory[max(found.memory)] - found.memory[min(found.memory)]) / MB
        yield Row("datagen", f"{name}: growth", growth, None, "MB", GROWTH, (memory,))
        rate = f"{rollouts / found.seconds:.0f} rollouts a second"
        yield Row("datagen", f"{name}: processor time", found.cpu_s / rollouts * 1e3, None, "ms", CPU, (rate,))
        wrong, notes = await killed(case, rollouts // 10, KILLS)
        yield Row(
            "datagen", f"{rollouts // 10} rollouts, {case.name}, killed: wrong", wrong, None, "", Target(0), notes
        )


@dataclass
class Found:
    """What a run took."""

    memory: dict[int, int] = field(default_factory=dict)
    """The driver's resident memory, by the number of rollouts that had ended."""
    cpu_s: float = 0.0
    """The driver's own processor time, without its children."""
    seconds: float = 0.0


async def measured(case: Case, rollouts: int, wrapper: Sequence[str] = ()) -> Found:
    """Do a whole run."""
    found, marks = Found(), [max(1, int(rollouts * mark)) for mark in MARKS]
    began = time.monotonic()
    async with _workplace(case, rollouts) as place, _driver(place, wrapper) as driver:
        async for state in _states(driver):
            while marks and state["finished"] >= marks[0]:
                found.memory[marks.pop(0)] = rss(driver.pid)
            found.cpu_s = _cpu_s(driver.pid)
        assert state["finished"] == rollouts, state
        assert await driver.wait() == 0
    found.seconds = time.monotonic() - began
    return found


async def killed(case: Case, rollouts: int, kills: int, seed: int = 1) -> tuple[int, tuple[str, ...]]:
    """Kill the driver so many times at random moments, resume it each time, and return how many rollouts are missing
    or there twice."""
    chance, at = random.Random(seed), []
    async with _workplace(case, rollouts) as place:
        for number in range(kills):
            async with _driver(place, ("--resume",)) as driver:
                due = None
                async for state in _states(driver):
                    if due is None:  # somewhere in the next share of the run, at whatever moment that is
                        due = state["finished"] + chance.random() * (rollouts - state["finished"]) / (kills - number)
                    if state["finished"] >= due:
                        await asyncio.sleep(chance.uniform(0, 0.2))
                        break
                at.append(state["finished"])
                driver.kill()
                await driver.wait()
        async with _driver(place, ("--resume",)) as driver:
            states = [state async for state in _states(driver)]
            assert await driver.wait() == 0, states[-1]
        with (place.folder / "out" / "trajectories.jsonl").open() as lines:
            records = [(record["item_id"], record["rollout_index"]) for record in map(json.loads, lines)]
    twice = sum(count - 1 for count in Counter(records).values())
    missing = rollouts - len(set(records))
    return missing + twice, (f"killed after {', '.join(map(str, at))}", f"{missing} missing, {twice} twice")


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    folder: Path
    command: Sequence[str]


@asynccontextmanager
async def _workplace(case: Case, rollouts: int) -> AsyncIterator[_Place]:
    """A folder with the dataset, and the server that answers."""
    folder = Path(tempfile.mkdtemp(prefix="hermes-datagen-"))
    try:
        with (folder / "rows.jsonl").open("w") as lines:
            lines.writelines(json.dumps(case.row(number)) + "\n" for number in range(rollouts))
        async with ScriptedServer(case.script, keep_requests=1) as server:
            command = [
                *("rollout", case.environment, f"--env.dataset_name={folder / 'rows.jsonl'}", *case.arguments),
                *("--model", "scripted", "--base-url", server.base_url, "--concurrency", str(CONCURRENCY)),
                *("--out", str(folder / "out"), "--progress", "json", "--backend.orphan_ttl_s=5"),
            ]
            yield _Place(folder, command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _driver(place: _Place, more: Sequence[str] = ()) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program, whose progress is on its standard error."""
    environ = {**os.environ, "HERMES_PLUGINS": "", "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "hermes_core", *place.command]
    if more and more[0] == "--profile":
        command[1:1], more = ["-m", "cProfile", "-o", more[1]], ()
    driver = await asyncio.create_subprocess_exec(
        *command, *more, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=environ
    )
    try:
        yield driver
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()


async def _states(driver: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """The lines of its progress, until its last."""
    assert driver.stderr is not None
    async for line in driver.stderr:
        if not line.startswith(b"{"):
            sys.stderr.write(line.decode("utf-8", "replace"))
            continue
        state = json.loads(line)
        yield state
        if state["event"] == "end":
            return


def _cpu_s(pid: int) -> float:
    """The processor time of a process so far, without that of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="one case, by its number")
    parser.add_argument("--kills", type=int, help="only kill it so many times")
    parser.add_argument("--profile", help="write cProfile's figures to this file")
    given = parser.parse_args()
    for case in CASES if given.only is None else [CASES[given.only]]:
        print(f"{given.rollouts} rollouts, {case.name}")
        if given.kills is not None:
            wrong, notes = await killed(case, given.rollouts, given.kills)
            print(f"  {wrong} wrong: {'; '.join(notes)}")
            continue
        found = await measured(case, given.rollouts, ("--profile", given.profile) if given.profile else ())
        for count, memory in found.memory.items():
            print(f"  {memory / MB:.1f} MB after {count}")
        print(f"  {found.cpu_s / given.rollouts * 1e3:.2f} ms of processor time for each")
        print(f"  {given.rollouts / found.seconds:.0f} rollouts a second, {found.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
