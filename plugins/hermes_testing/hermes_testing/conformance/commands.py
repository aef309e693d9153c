"""Checks of commands in a slot: input, end, output. Core's own tests cover the details."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from hermes_core import Isolation
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.running import BOMB, PROOF, TICKER, check_stopped, wait_for_ticks
from hermes_testing.conformance.waiting import within

HARMLESS = {
    *("PATH", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ"),
    *("SHLVL", "PWD", "OLDPWD", "_", "USER", "LOGNAME", "HOME"),
}
"""Variables that may have the same value as on the driver by chance, or by the system's default."""


async def exit_status(kit: Kit) -> None:
    """Every exit status from 0 to 127 arrives, and 124 is not mistaken for a time-out."""
    slot = await kit.slot()
    for status in (0, 1, 2, 42, 100, 123, 124, 125, 126, 127):
        result = await slot.run(f"exit {status}", timeout_s=60)
        got = (result.exit_code, result.signal, result.timed_out, result.returncode)
        assert got == (status, None, False, status), f"`exit {status}`"


async def streams_are_apart(kit: Kit) -> None:
    """Standard output and standard error are kept separate, and their bytes are counted."""
    result = await (await kit.slot()).run("echo out; echo err >&2; exit 7")
    got = (result.stdout, result.stderr, result.stdout_bytes, result.stderr_bytes, result.truncated, result.exit_code)
    assert got == (b"out\n", b"err\n", 4, 4, False, 7), "the streams"


async def output_is_binary(kit: Kit) -> None:
    """Binary output arrives unchanged; in the text form, bytes that are not UTF-8 are replaced."""
    result = await (await kit.slot()).run(r"printf '\377\000\200abc\r\n'")
    assert (result.stdout, result.text) == (b"\xff\x00\x80abc\r\n", "\ufffd\x00\ufffdabc\r\n"), "binary output"


async def much_output_is_whole(kit: Kit) -> None:
    """10 MB of output within the limit arrive complete and in order."""
    result = await (await kit.slot()).run("seq 1 1400000", output_limit=16 << 20)
    wanted = "".join(f"{number}\n" for number in range(1, 1_400_001)).encode()
    assert not result.truncated, f"{len(wanted)} bytes are below the limit, and yet output was left out"
    if result.stdout != wanted:
        pytest.fail(f"{len(result.stdout)} of {len(wanted)} bytes arrived, or they are not those written")


async def input_arrives(kit: Kit) -> None:
    """Input of any size, also binary, arrives unchanged."""
    slot = await kit.slot()
    for size in (0, 1, 65_536, 65_537, 3_000_000):
        data = os.urandom(size)
        result = await slot.run("cat", stdin=data, output_limit=4 << 20)
        if result.stdout != data:
            pytest.fail(f"of {size} bytes of input, {len(result.stdout)} came back, or others")


async def variables(kit: Kit) -> None:
    """Variables arrive unchanged; HOME and TMPDIR are the slot's own and writable."""
    script = 'echo "$A|$B"; test -w "$HOME" && test -w "$TMPDIR" && echo writable; echo "$USER" >&2'
    result = await (await kit.slot()).run(script, env={"A": "a b $x", "B": "€ü"})
    assert result.text == "a b $x|€ü\nwritable\n", "the variables"
    assert result.error_text.strip(), "USER is not set"


async def nothing_of_the_drivers_environment(kit: Kit) -> None:
    """No variable of the driver's environment reaches a command."""
    slot = await kit.slot()
    inside = dict(pair.partition("=")[::2] for pair in (await slot.run("env")).text.splitlines())
    ours = {name: value for name, value in os.environ.items() if name not in HARMLESS and value}
    leaked = [name for name, value in ours.items() if inside.get(name) == value]
    assert leaked == [], "variables with the driver's value"


async def the_working_directory(kit: Kit) -> None:
    """Commands start in the workspace; `cwd` is relative to it and applies to one command only."""
    slot = await kit.slot()
    await slot.run("mkdir -p 'a b'; cd /")
    assert (await slot.run("pwd")).text.strip() == slot.workspace_dir, "where a command begins"
    assert (await slot.run("pwd", cwd="a b")).text.strip() == f"{slot.workspace_dir}/a b", "with `cwd`"


async def a_time_limit_ends_a_command(kit: Kit) -> None:
    """A command gets TERM at its time limit, is reported as timed out, and keeps its output so far."""
    slot = await kit.slot()
    began = time.monotonic()
    result = await slot.run("echo before; sleep 1000; echo after", timeout_s=0.5)
    assert time.monotonic() - began < 20, "it took more than 20 s to end at a limit of 0.5 s"
    assert (result.timed_out, result.returncode, result.stdout) == (True, 124, b"before\n"), "its result"


async def cancelling_ends_a_command(kit: Kit) -> None:
    """A command whose caller was cancelled is killed, with everything it started."""
    slot = await kit.slot()
    running = asyncio.ensure_future(slot.run(f"trap '' TERM; ({TICKER}) & wait"))
    await wait_for_ticks(slot)
    running.cancel()
    await asyncio.wait([running])
    await check_stopped(slot)


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(PROOF)
@pytest.mark.limit(120)
async def a_fork_bomb_is_bounded(kit: Kit) -> None:
    """A fork bomb stays within its slot's process limit: a neighbour can work, and a time limit ends it."""
    slot, other = await kit.neighbours()
    bomb = asyncio.ensure_future(slot.run(f"{BOMB}; sleep 1000", timeout_s=3.0))
    await asyncio.sleep(1.0)
    assert (await within(30, other.run("echo fine"), "a neighbour's command")).text == "fine\n", "a neighbour's output"
    assert (await within(60, bomb, "the bomb's end")).timed_out, "it did not time out"
    assert (await within(30, slot.run("echo fine"), "the slot's next command")).text == "fine\n", (
        "the slot's next command"
    )
