"""Commands in a terminal of their own: size, keys, job control, end-of-file, and its end."""

from __future__ import annotations

import asyncio
import time

import pytest

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import WindowSize

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = WindowSize(24, 80)


async def shown(slot, process, text, offset=0):
    """All output once `text` is in it, from `offset` on."""
    seen = b""
    deadline = time.monotonic() + 30
    while text not in seen:
        chunk = await slot.log(process.process_id, offset=offset + len(seen), wait_s=5)
        seen += chunk.data
        assert chunk.running or text in seen, seen
        assert time.monotonic() < deadline, seen
    return seen


async def test_a_command_has_a_terminal_of_the_size_asked_for(slot):
    command = "for fd in 0 1 2; do [ -t $fd ] && echo $fd; done; tty; stty size; echo $TERM; exit 7"
    result = await slot.run(command, pty=WindowSize(33, 101), timeout_s=20)
    lines = result.stdout.split(b"\r\n")
    assert lines[:3] == [b"0", b"1", b"2"] and lines[3].startswith(b"/dev/pts/")
    assert lines[4:] == [b"33 101", b"xterm-256color", b""]
    assert (result.exit_code, result.stderr) == (7, b"")


async def test_the_caller_s_TERM_is_kept(slot):
    assert (await slot.run("echo $TERM", pty=SIZE, env={"TERM": "linux"})).stdout == b"linux\r\n"


async def test_without_input_a_command_finds_the_end_of_it(slot):
    result = await slot.run("cat; echo end", pty=SIZE, timeout_s=20)
    assert (result.stdout, result.timed_out) == (b"end\r\n", False)


@pytest.mark.parametrize("text", [b"", b"line\n", b"half a line"])
async def test_input_ends_where_it_ends(slot, text):
    result = await slot.run("cat | wc -c | sed 's/^ */read /'", pty=SIZE, stdin=text, timeout_s=20)
    assert result.stdout.endswith(b"read %d\r\n" % len(text)) and not result.timed_out


async def test_it_is_the_controlling_terminal(slot):
    # Not by bash, which takes the terminal for its session itself where nobody has.
    result = await slot.run(["sh", "-c", "echo through >/dev/tty"], pty=SIZE)
    assert result.stdout == b"through\r\n"


async def test_a_resize_is_seen_and_told(slot):
    process = await slot.start("trap 'stty size' WINCH; echo go; while :; do sleep 0.1; done", pty=SIZE)
    assert process.pty == SIZE
    await shown(slot, process, b"go")
    assert (await slot.resize(process.process_id, WindowSize(50, 132))).pty == WindowSize(50, 132)
    await shown(slot, process, b"50 132")
    assert (await slot.poll(process.process_id)).pty == WindowSize(50, 132)
    await slot.kill(process.process_id, grace_s=0)


async def test_a_resize_needs_a_terminal_that_is_there(slot):
    without = await slot.start("sleep 60")
    ended = await slot.start("true", pty=SIZE)
    await slot.wait(ended.process_id)
    for process, code in ((without, "no_pty"), (ended, "ended")):
        with pytest.raises(CommandError) as caught:
            await slot.resize(process.process_id, SIZE)
        assert caught.value.code == code
    with pytest.raises(CommandError) as caught:
        await slot.start("true", pty=WindowSize(0, 80))
    assert caught.value.code == "invalid"
    await slot.kill(without.process_id)


async def test_ctrl_c_interrupts_and_ctrl_d_ends(slot):
    process = await slot.start("sleep 1000; cat; echo bye", pty=SIZE)
    await slot.write(process.process_id, b"\x03")
    ended = await slot.wait(process.process_id, timeout_s=20)
    assert ended.signal == 2
    process = await slot.start("cat; echo bye", pty=SIZE)
    await slot.write(process.process_id, b"typed\n\x04")
    ended = await slot.wait(process.process_id, timeout_s=20)
    assert ended.exit_code == 0
    assert (await slot.log(process.process_id)).data == b"typed\r\ntyped\r\nbye\r\n"


async def test_end_of_file_is_a_key_and_can_be_typed_twice(slot):
    process = await slot.start("stty -echo; echo go; cat; echo first; cat; echo second", pty=SIZE)
    await shown(slot, process, b"go")
    assert await slot.write(process.process_id, b"a", eof=True) == 1
    await shown(slot, process, b"first")
    await slot.write(process.process_id, b"b\n", eof=True)
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 0
    assert (await slot.log(process.process_id)).data.split() == [b"go", b"afirst", b"b", b"second"]


async def test_job_control(slot):
    process = await slot.start(["bash", "--norc", "-i"], pty=SIZE, env={"PS1": "> "})
    await shown(slot, process, b"> ")
    await slot.write(process.process_id, b"sleep 1000\n")
    await shown(slot, process, b"sleep 1000\r\n")
    await asyncio.sleep(0.3)
    await slot.write(process.process_id, b"\x1a")
    await shown(slot, process, b"Stopped")
    await slot.write(process.process_id, b"echo $((6 * 7))\n")
    await shown(slot, process, b"\r42\r\n")
    # Bash would not exit with a stopped job.
    await slot.write(process.process_id, b"disown %1; exit 5\n")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 5


async def test_all_of_its_last_words_are_there(slot):
    for _ in range(20):
        result = await slot.run("seq 1 2000", pty=SIZE)
        assert result.stdout == b"".join(b"%d\r\n" % n for n in range(1, 2001))


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


async def test_kill_ends_an_interactive_shell_that_ignores_term(slot):
    process = await slot.start(["bash", "--norc", "-i"], pty=SIZE, env={"PS1": "> "})
    await shown(slot, process, b"> ")
    await slot.write(process.process_id, b"sleep 1000 &\n")
    await shown(slot, process, b"[1]")
    killed = await slot.kill(process.process_id, grace_s=0.3)
    assert (killed.running, killed.signal) == (False, 9)


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


async def test_emptying_the_slot_ends_its_terminals(rig):
    index = await rig.index()
    slot = rig.client.commands(index)
    processes = [await slot.start("cat", pty=SIZE) for _ in range(3)]
    await rig.client.kill_slot(index)
    for process in processes:
        ended = await slot.poll(process.process_id)
        assert (ended.running, ended.signal) == (False, 9)
    assert (await slot.run("tty", pty=SIZE)).stdout.startswith(b"/dev/pts/")
