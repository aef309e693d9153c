"""Commands in a terminal of their own: size, keys, job control, end-of-file, and its end."""

from __future__ import annotations

import asyncio

import pytest

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import WindowSize

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = WindowSize(24, 80)


async def test_the_caller_s_TERM_is_kept(slot):
    assert (await slot.run("echo $TERM", pty=SIZE, env={"TERM": "linux"})).stdout == b"linux\r\n"


@pytest.mark.parametrize("text", [b"", b"line\n", b"half a line"])
async def test_input_ends_where_it_ends(slot, text):
    result = await slot.run("cat | wc -c | sed 's/^ */read /'", pty=SIZE, stdin=text, timeout_s=20)
    assert result.stdout.endswith(b"read %d\r\n" % len(text)) and not result.timed_out


async def test_output_above_what_an_answer_carries(slot):
    result = await slot.run("seq 1 600000", pty=SIZE, output_limit=8 << 20, timeout_s=60)
    assert result.stdout == b"".join(b"%d\r\n" % n for n in range(1, 600001))


async def test_a_program_may_close_its_terminal_and_open_it_again(slot):
    command = "exec >/dev/null 2>&1 </dev/null; sleep 0.5; echo late >/dev/tty; exit 5"
    process = await slot.start(command, pty=SIZE)
    chunk = await slot.log(process.process_id, wait_s=20)
    assert chunk.data == b"late\r\n"
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 5


async def test_what_it_left_behind_keeps_its_terminal(slot):
    result = await slot.run("trap '' HUP; (sleep 0.5; echo on >/dev/tty; echo on >f) & echo off", pty=SIZE)
    assert b"off" in result.stdout and result.exit_code == 0
    for _ in range(200):
        if (await slot.run("cat f 2>/dev/null")).text == "on\n":
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError("what it left was ended")


async def test_a_time_limit_ends_a_terminal_s_programs(slot):
    result = await slot.run(["bash", "--norc", "-i", "-c", "sleep 1000 & sleep 1000"], pty=SIZE, timeout_s=0.5)
    assert result.timed_out


async def test_a_long_script_in_a_terminal(slot):
    script = "# " + "x" * 200_000 + "\n[ -t 0 ] && echo yes"
    assert (await slot.run(script, pty=SIZE, timeout_s=20)).stdout == b"yes\r\n"


async def test_a_program_that_is_not_there(slot):
    with pytest.raises(CommandError) as caught:
        await slot.run(["no-such-program"], pty=SIZE)
    assert caught.value.code == "not_found"
    assert (await slot.run("echo fine", pty=SIZE)).stdout == b"fine\r\n"


async def test_no_descriptor_of_ours_comes_with_a_terminal(slot):
    result = await slot.run("ls -l /proc/self/fd", pty=SIZE)
    targets = [line.split(b" -> ")[1] for line in result.stdout.split(b"\r\n") if b" -> " in line]
    assert len({target for target in targets if target.startswith(b"/dev/pts/")}) == 1
    assert not any(target.startswith((b"socket:", b"pipe:", b"/dev/ptmx")) for target in targets)
