"""What the benchmarks beside other systems share: a party runs commands its own way, and the rows that come of it.

Only the standard library is used here: SWE-ReX is measured by this code too, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measure import MB, Row, Rows, Target, p50, percentile, take_turns

CONCURRENCIES = (1, 8, 32)
WORKERS = max(CONCURRENCIES)
OUTPUT_BYTES = 10 * MB
PRINT = f"head -c {OUTPUT_BYTES} /dev/zero | tr '\\0' x"
LIMIT_S = 1.0
SETTLE_S = 0.5

Run = Callable[[str], Awaitable[int]]
"""Runs a shell command and gives the bytes of its standard output; raises when it fails."""

TimeOut = Callable[[str, float], Awaitable[None]]
"""Runs a command under a time limit in seconds, which passes, and returns as soon as the caller would go on."""

Processes = Callable[[], Awaitable[Mapping[int, str]]]
"""The command lines of what runs where the commands do, by a process id that can be killed there."""


@dataclass(frozen=True)
class Sample:
    """What one turn gave."""

    seconds: Sequence[float]
    """How long each command took."""
    rate: float
    """Commands a second."""


class Party(ABC):
    """One way to run commands in a sandbox."""

    @abstractmethod
    async def sample(self, at_a_time: int, span_s: float) -> Sample:
        """`true` over and over, so many at a time, for about so many seconds."""

    @abstractmethod
    async def output(self, limit_s: float) -> float:
        """Seconds for a command that prints `OUTPUT_BYTES`.

        Raises:
            TimeoutError: it takes longer than the limit.
        """

    @abstractmethod
    async def time_out(self, command: str, limit_s: float) -> float:
        """Seconds until a command that goes on for longer than its limit was given up."""


class Workers(Party):
    """A party whose commands are run by coroutines: one of them for each command at a time."""

    def __init__(self, runs: Sequence[Run], time_out: TimeOut) -> None:
        self._runs = runs
        self._time_out = time_out

    async def sample(self, at_a_time: int, span_s: float) -> Sample:
        """Each worker goes on until the time is over, and ends the command that it is at."""
        seconds: list[float] = []
        began = time.perf_counter()

        async def work(run: Run) -> None:
            while True:
                start = time.perf_counter()
                await run("true")
                now = time.perf_counter()
                seconds.append(now - start)
                if now - began >= span_s:
                    return

        async with asyncio.TaskGroup() as group:
            for run in self._runs[:at_a_time]:
                group.create_task(work(run))
        return Sample(seconds, len(seconds) / (time.perf_counter() - began))

    async def output(self, limit_s: float) -> float:
        """By the first worker."""
        began = time.perf_counter()
        async with asyncio.timeout(limit_s):
            size = await self._runs[0](PRINT)
        assert size == OUTPUT_BYTES, f"{size} bytes of output instead of {OUTPUT_BYTES}"
        return time.perf_counter() - began

    async def time_out(self, command: str, limit_s: float) -> float:
        """As the party's own time limit does it."""
        began = time.perf_counter()
        await self._time_out(command, limit_s)
        return time.perf_counter() - began


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A line of the table that is there whether or not the host can do it."""

    benchmark: str
    text: str
    unit: str
    target: Target | None = None

    def row(self, ours: float | None, reference: float | None, *notes: str) -> Row:
        """The line with its figures."""
        return Row(self.benchmark, self.text, ours, reference, self.unit, self.target, tuple(filter(None, notes)))

    def left_out(self, reason: str) -> Row:
        """The line without figures."""
        return Row(self.benchmark, self.text, None, None, self.unit, self.target, (reason,))


@dataclass(frozen=True)
class Wanted:
    """How many times as fast as a peer we are to be; None where nothing was asked for."""

    latency: float | None = None
    """At p50, one at a time."""
    rate: float | None = None
    """In commands a second, at the highest concurrency."""


def times_faster(times: float | None) -> Target | None:
    """The target for a figure that is a time."""
    return None if times is None else Target(1 / times, of_reference=True)


class Table:
    """The rows of a benchmark: ours, the peers that are there, and why the others are not.

    Args:
        peers: the names, and what was asked for. The order is that of the turns.
    """

    def __init__(self, benchmark: str, peers: Mapping[str, Wanted], suffix: str = "") -> None:
        self._benchmark, self._peers, self._suffix = benchmark, peers, suffix

    def _case(self, text: str, unit: str, target: Target | None = None) -> Case:
        return Case(self._benchmark, text + self._suffix, unit, target)

    def _latency(self, at_a_time: int, peer: str) -> Case:
        wanted = times_faster(self._peers[peer].latency) if at_a_time == 1 else None
        return self._case(f"`true` p50, {at_a_time} at a time: {peer}", "ms", wanted)

    def _rate(self, at_a_time: int, peer: str) -> Case:
        times = self._peers[peer].rate if at_a_time == WORKERS else None
        wanted = None if times is None else Target(times, of_reference=True, at_least=True)
        return self._case(f"commands a second, {at_a_time} at a time: {peer}", "/s", wanted)

    def _output(self, peer: str) -> Case:
        return self._case(f"{OUTPUT_BYTES // MB} MB of output: {peer}", "ms")

    def _left(self, peer: str) -> Case:
        return self._case(f"left by a timed-out command: {peer}", "alive", Target(0.0))

    def left_out(self, reason: str) -> Sequence[Row]:
        """Every line, without figures."""
        speed = (self._latency, self._rate)
        cases = [make(number, peer) for number in CONCURRENCIES for peer in self._peers for make in speed]
        cases += [make(peer) for make in (self._output, self._left) for peer in self._peers]
        return [case.left_out(reason) for case in cases]

    async def speed(
        self, ours: Party, peers: Mapping[str, Party | str], rounds: int, span_s: float, about: str = ""
    ) -> Rows:
        """p50 and p95 of `true`, and commands a second.

        Args:
            peers: one that is a text is left out, with this reason.
            about: a note on every latency.
        """
        there = {name: peer for name, peer in peers.items() if not isinstance(peer, str)}
        for party in (ours, *there.values()):
            await party.sample(1, 0.0)  # what is made at the first command is there
        for at_a_time in CONCURRENCIES:
            turns = [partial(party.sample, at_a_time, span_s) for party in (ours, *there.values())]
            mine, *others = await take_turns(turns, rounds, warm_up=0)
            theirs = dict(zip(there, others, strict=True))
            for name, peer in peers.items():
                latency, rate = self._latency(at_a_time, name), self._rate(at_a_time, name)
                if isinstance(peer, str):
                    yield latency.left_out(peer)
                    yield rate.left_out(peer)
                else:
                    yield _latency(latency, mine, theirs[name], about)
                    yield _rate(rate, mine, theirs[name])

    async def output(self, ours: Party, peers: Mapping[str, Party | str], rounds: int, limit_s: float) -> Rows:
        """How long 10 MB take. A peer that needs more than the limit is given up."""
        for name, peer in peers.items():
            case = self._output(name)
            if isinstance(peer, str):
                yield case.left_out(peer)
                continue
            try:
                await peer.output(limit_s)
            except TimeoutError:
                mine = p50([await ours.output(limit_s) for _ in range(rounds)])
                yield case.row(mine * 1e3, None, f"the peer had not done it after {limit_s:g} s")
                continue
            turns = [partial(party.output, limit_s) for party in (ours, peer)]
            taken = await take_turns(turns, rounds, warm_up=0)
            yield case.row(p50(taken[0]) * 1e3, p50(taken[1]) * 1e3)

    async def left(self, ours: Party, peers: Mapping[str, Party | str], where: Mapping[str, Place]) -> Rows:
        """What lives on half a second after a command of two processes, one in a session of its own, was timed out.

        Args:
            where: what runs there, by party: `ours`, and the peers' names.
        """
        mine, mine_s = await _left(ours, where["ours"])
        for name, peer in peers.items():
            case = self._left(name)
            if isinstance(peer, str):
                yield case.left_out(peer)
                continue
            theirs, their_s = await _left(peer, where[name])
            yield case.row(
                mine,
                theirs,
                f"of 2 processes; the caller had its answer after {mine_s:.2f} s, the peer's after {their_s:.2f} s, "
                f"at a limit of {LIMIT_S:g} s",
            )


@dataclass(frozen=True)
class Place:
    """Where a party's commands run, seen from outside of it."""

    processes: Processes
    kill: Callable[[Sequence[int]], Awaitable[None]]


async def _left(party: Party, place: Place) -> tuple[int, float]:
    """How many processes a timed-out command leaves (they are ended then), and after how long it was given up."""
    line = f"sleep {random.randrange(80_000, 90_000)}.{random.randrange(10**9):09d}"
    taken_s = await party.time_out(f"setsid {line} & {line}", LIMIT_S)
    await asyncio.sleep(SETTLE_S)
    left = [pid for pid, command in (await place.processes()).items() if command == line]
    if left:
        await place.kill(left)
    return len(left), taken_s


def _latency(case: Case, ours: Sequence[Sample], theirs: Sequence[Sample], about: str) -> Row:
    mine, others = ([second for sample in side for second in sample.seconds] for side in (ours, theirs))
    return case.row(
        p50(mine) * 1e3,
        p50(others) * 1e3,
        f"{p50(others) / p50(mine):.1f} times as fast" + _wanted(case),
        f"p95: ours {percentile(mine, 0.95) * 1e3:.2f}, the peer's {percentile(others, 0.95) * 1e3:.2f} ms",
        about,
    )


def _rate(case: Case, ours: Sequence[Sample], theirs: Sequence[Sample]) -> Row:
    mine, others = ([sample.rate for sample in side] for side in (ours, theirs))
    note = f"ours {min(mine):.0f} to {max(mine):.0f}, the peer's {min(others):.3g} to {max(others):.3g} /s"
    return case.row(p50(mine), p50(others), note)


def _wanted(case: Case) -> str:
    return f", asked for: {1 / case.target.limit:.0f}" if case.target else ""


# --- command-line clients ---------------------------------------------------------------------------------------------


def cli_party(prefixes: Sequence[Sequence[str]]) -> Party:
    """A command-line client: a new process for each command, killed at the time limit."""

    async def run(prefix: Sequence[str], command: str) -> int:
        status, output = await captured(*prefix, command)
        assert status == 0, f"{command!r} ended with status {status}"
        return len(output)

    async def time_out(command: str, limit_s: float) -> None:
        null = asyncio.subprocess.DEVNULL  # not a pipe, which others may hold open when the client is dead
        process = await asyncio.create_subprocess_exec(*prefixes[0], command, stdin=null, stdout=null, stderr=null)
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    return Workers([partial(run, prefix) for prefix in prefixes], time_out)


def listing(listed: bytes) -> Mapping[int, str]:
    """What `ps -eo pid=,args=` says."""
    lines = (line.strip().partition(" ") for line in listed.decode(errors="replace").splitlines())
    return {int(pid): command.strip() for pid, _, command in lines if pid}


async def captured(*command: str, stdin: bytes = b"") -> tuple[int, bytes]:
    """A command's status, and what it printed; killed if this is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate(stdin or None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output
