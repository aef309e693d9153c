"""Programs in terminals: size, keys, job control, and the screens that a person would see."""

from __future__ import annotations

import asyncio
import time

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.running import TICKER, check_stopped, wait_for_ticks
from hermes_testing.conformance.waiting import expect_refusal, until, within

from hermes_core.sandbox.commands import ProcessStatus, SlotCommands, WindowSize
from hermes_core.tools.screen import Screen, render

pytestmark = pytest.mark.asyncio(loop_scope="module")

TERMINALS = "terminals (pty)"
SIZE = WindowSize(24, 80)
SHOWN_S = 30.0
"""How long a program may take to show something, in seconds."""


async def _seen(slot: SlotCommands, process: ProcessStatus, words: bytes) -> bytes:
    """All output, once these words are in it."""
    seen = b""
    while words not in seen:
        chunk = await within(SHOWN_S, slot.log(process.process_id, offset=len(seen), wait_s=SHOWN_S), "its output")
        assert chunk.data, f"{words!r} was not written, but {seen!r}"
        seen += chunk.data
    return seen


async def _screen(slot: SlotCommands, process: ProcessStatus, words: str) -> Screen:
    """The screen, once these words are on it."""
    deadline = time.monotonic() + SHOWN_S
    while True:
        data = (await slot.log(process.process_id)).data
        screen = render(data, SIZE)
        if words in screen.text:
            return screen
        if time.monotonic() > deadline:
            pytest.fail(f"{words!r} is not on the screen, but:\n{screen.text}")
        await asyncio.sleep(0.1)


async def _type(slot: SlotCommands, process: ProcessStatus, keys: str) -> None:
    data = keys.encode()
    assert await slot.write(process.process_id, data) == len(data), f"bytes taken of {keys!r}"


async def _program(slot: SlotCommands, name: str) -> None:
    if not (await slot.run(f"command -v {name}")).ok:
        pytest.skip(f"the sandbox has no `{name}`")


@pytest.mark.needs(TERMINALS)
async def test_it_is_the_session_s_own_terminal(kit: Kit) -> None:
    """It is the controlling terminal: /dev/tty leads to it, and `tty` names it."""
    # By `sh`, as bash takes the terminal for its session itself where nobody has.
    argv = ["sh", "-c", "echo by name >/dev/tty; tty"]
    result = await (await kit.slot()).run(argv, pty=SIZE, timeout_s=30)
    lines = result.stdout.decode().split("\r\n")
    assert (lines[0], lines[1].startswith("/dev/")) == ("by name", True), "what was written to /dev/tty, and its name"


@pytest.mark.needs(TERMINALS)
async def test_a_terminal_without_input(kit: Kit) -> None:
    """A foreground command in a terminal that nobody types into finds the end of its input."""
    result = await (await kit.slot()).run("cat; echo end", pty=SIZE, timeout_s=30)
    assert (result.stdout, result.timed_out) == (b"end\r\n", False), "the command"


@pytest.mark.needs(TERMINALS)
async def test_a_terminal_is_resized(kit: Kit) -> None:
    """A new size reaches the program, with SIGWINCH, and the status tells it."""
    slot = await kit.slot()
    process = await slot.start("trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done", pty=SIZE)
    assert process.pty == SIZE, "the size that it starts with"
    await _seen(slot, process, b"ready")
    resized = await slot.resize(process.process_id, WindowSize(50, 132))
    assert resized.pty == WindowSize(50, 132), "the size that is told"
    await _seen(slot, process, b"50 132")


@pytest.mark.needs(TERMINALS)
async def test_resizing_what_has_no_terminal(kit: Kit) -> None:
    """A size is refused for a process without a terminal, for one that has ended, and when it is none."""
    slot = await kit.slot()
    plain, ended = await slot.start("sleep 1000"), await slot.start("true", pty=SIZE)
    await slot.wait(ended.process_id, timeout_s=20)
    await expect_refusal(slot.resize(plain.process_id, SIZE), "no_pty")
    await expect_refusal(slot.resize(ended.process_id, SIZE), "ended")
    await expect_refusal(slot.start("true", pty=WindowSize(0, 80)), "invalid")


@pytest.mark.needs(TERMINALS)
async def test_programs_see_colours(kit: Kit) -> None:
    """TERM names a terminal with colours: programs use them in a terminal, and not in a pipe."""
    slot = await kit.slot()
    await slot.run("mkdir folder")
    if b"\x1b[" not in (await slot.run("TERM=xterm-256color ls --color=always")).stdout:
        pytest.skip("the sandbox's `ls` knows no colours")
    result = await slot.run("ls --color=auto; echo $TERM", pty=SIZE)
    assert b"\x1b[" in result.stdout and b"color" in result.stdout, f"no colours: {result.stdout!r}"
    assert b"\x1b[" not in (await slot.run("ls --color=auto")).stdout, "colours in a pipe"


@pytest.mark.needs(TERMINALS)
async def test_ctrl_c(kit: Kit) -> None:
    """Ctrl-C interrupts the program in the foreground."""
    slot = await kit.slot()
    process = await slot.start("echo ready; sleep 1000", pty=SIZE)
    await _seen(slot, process, b"ready")
    await _type(slot, process, "\x03")
    assert (await slot.wait(process.process_id, timeout_s=20)).signal == 2, "the signal that ended it"


@pytest.mark.needs(TERMINALS)
async def test_ctrl_d(kit: Kit) -> None:
    """Ctrl-D ends the input, as the end of input does; the terminal can be typed into again."""
    slot = await kit.slot()
    process = await slot.start("cat >one; echo first; cat >two", pty=SIZE)
    await _type(slot, process, "typed\n\x04")
    await _seen(slot, process, b"first")
    await slot.write(process.process_id, b"half a line", eof=True)
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 0, "its exit code"
    assert (await slot.run("cat one two")).text == "typed\nhalf a line", "what was read"


@pytest.mark.needs(TERMINALS)
async def test_job_control(kit: Kit) -> None:
    """An interactive shell stops, lists, resumes and interrupts its jobs."""
    slot = await kit.slot()
    await _program(slot, "bash")
    process = await slot.start(["bash", "--norc", "-i"], pty=SIZE, env={"PS1": "ready> "})
    await _screen(slot, process, "ready>")
    await _type(slot, process, "sleep 1000; echo status $?\r")
    await _screen(slot, process, "ready> sleep 1000")
    await asyncio.sleep(0.5)
    await _type(slot, process, "\x1a")
    await _screen(slot, process, "Stopped")
    await _type(slot, process, "fg\r")
    await _screen(slot, process, "ready> fg")
    await asyncio.sleep(0.5)
    await _type(slot, process, "\x03")
    await _type(slot, process, "echo interrupted: $?\r")
    await _screen(slot, process, "interrupted: 130")
    await _type(slot, process, "exit 5\r")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 5, "the shell's exit code"


@pytest.mark.needs(TERMINALS)
async def test_last_words_in_a_terminal(kit: Kit) -> None:
    """All that a program wrote before its end is there."""
    slot = await kit.slot()
    wanted = b"".join(b"%d\r\n" % number for number in range(1, 2001))
    for _ in range(10):
        assert (await slot.run("seq 1 2000", pty=SIZE)).stdout == wanted, "its output"


@pytest.mark.needs(TERMINALS)
async def test_characters_in_a_terminal(kit: Kit) -> None:
    """Characters that are typed and shown survive, however the bytes of one are cut."""
    slot = await kit.slot()
    process = await slot.start('stty -echo; echo ready; read -r x; echo "<$x>"', pty=SIZE)
    await _seen(slot, process, b"ready")
    for byte in "aä€𝄞\n".encode():
        await slot.write(process.process_id, bytes([byte]))
    seen = await _seen(slot, process, b">")
    assert "<aä€𝄞>".encode() in seen, f"got {seen!r}"


@pytest.mark.needs(TERMINALS)
async def test_a_progress_bar_as_a_screen(kit: Kit) -> None:
    """A line that is written over and over is one line on the screen."""
    slot = await kit.slot()
    bar = "i=0; while [ $i -lt 100 ]; do i=$((i + 1)); printf '\\rprogress %3d%%' $i; done; echo; echo done"
    process = await slot.start(bar, pty=SIZE)
    screen = await _screen(slot, process, "done")
    assert screen.lines == ("progress 100%", "done"), "the screen"


@pytest.mark.needs(TERMINALS)
async def test_a_python_prompt(kit: Kit) -> None:
    """`python3 -i` is driven by what is typed, and read as a screen."""
    slot = await kit.slot()
    await _program(slot, "python3")
    process = await slot.start("PYTHON_COLORS=0 python3 -qi", pty=SIZE)
    await _screen(slot, process, ">>>")
    await _type(slot, process, "6 * 7\r")
    await _screen(slot, process, "42\n>>>")
    await _type(slot, process, "import time; time.sleep(1000)\r")
    await asyncio.sleep(0.5)
    await _type(slot, process, "\x03")
    await _screen(slot, process, "KeyboardInterrupt\n>>>")
    # After an interrupt some versions end by SIGINT, whatever they are told to exit with.
    await _type(slot, process, "import os; os._exit(7)\r")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 7, "its exit code"


@pytest.mark.needs(TERMINALS)
async def test_an_editor(kit: Kit) -> None:
    """`vi` is driven by its keys: it shows a file, changes it, and saves it."""
    slot = await kit.slot()
    await _program(slot, "vi")
    await slot.write_file("text", b"first line\nsecond line\n")
    process = await slot.start("vi text", pty=SIZE)
    screen = await _screen(slot, process, "second line\n~")
    assert screen.lines[:2] == ("first line", "second line"), "the lines of the file on the screen"
    await _type(slot, process, "ggcwchanged")
    await _screen(slot, process, "changed line")
    await _type(slot, process, "\x1b")
    await asyncio.sleep(1.2)  # an editor waits whether the escape key is the beginning of another one
    await _type(slot, process, ":wq\r")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 0, "its exit code"
    assert (await slot.read_file("text")).data == b"changed line\nsecond line\n", "the file"


@pytest.mark.needs(TERMINALS)
async def test_a_pager(kit: Kit) -> None:
    """`less` shows a file page by page, and finds in it."""
    slot = await kit.slot()
    await _program(slot, "less")
    process = await slot.start("seq 1001 1500 >numbers; less numbers", pty=SIZE)
    screen = await _screen(slot, process, "1023")
    assert (screen.lines[0], "1024" in screen.text) == ("1001", False), "its first page"
    await _type(slot, process, " ")
    screen = await _screen(slot, process, "1046")
    assert screen.lines[0] == "1024", "its second page"
    await _type(slot, process, "/1400\r")
    await _screen(slot, process, "1400")
    await _type(slot, process, "q")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 0, "its exit code"


@pytest.mark.needs(TERMINALS)
async def test_a_program_that_redraws(kit: Kit) -> None:
    """`top` is read as a screen, again and again, until a key ends it."""
    slot = await kit.slot()
    await _program(slot, "top")
    process = await slot.start("top -d 0.3", pty=SIZE)
    await _screen(slot, process, "PID")
    size = (await slot.poll(process.process_id)).output_bytes
    await _seen(slot, process, b"top")
    await slot.log(process.process_id, offset=size, wait_s=SHOWN_S)
    screen = await _screen(slot, process, "PID")
    assert screen.text.count("PID") == 1, "headings on the screen"
    await _type(slot, process, "q")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 0, "its exit code"


@pytest.mark.needs(TERMINALS)
async def test_a_terminal_s_shell_is_killed(kit: Kit) -> None:
    """`kill` ends an interactive shell, which ignores TERM, with its jobs, and reports it as KILLed."""
    slot = await kit.slot()
    process = await slot.start(["sh", "-i"], pty=SIZE, env={"PS1": "ready> "})
    await _seen(slot, process, b"ready>")
    await _type(slot, process, f"trap '' HUP TERM; ({TICKER}) &\n")
    await wait_for_ticks(slot)
    killed = await within(20, slot.kill(process.process_id, grace_s=0.5), "its end")
    assert (killed.running, killed.signal) == (False, 9), "its end"
    await check_stopped(slot)


@pytest.mark.needs(TERMINALS)
async def test_terminals_end_with_their_slot(kit: Kit) -> None:
    """What ends a rollout ends its terminals, and what they ran, whatever that ignores."""
    tools, slot = await kit.common_tools(), await kit.lease()
    commands = tools.commands(slot)
    process = await commands.start(f"trap '' HUP TERM INT; {TICKER}", pty=SIZE)
    await tools.kill_everything(slot)
    assert not (await commands.poll(process.process_id)).running, "that it runs"
    await check_stopped(commands)
    assert (await commands.run("echo on", pty=SIZE)).stdout == b"on\r\n", "the next command in a terminal"


@pytest.mark.needs(TERMINALS)
async def test_the_tools_drive_a_terminal(kit: Kit) -> None:
    """`terminal(background, pty)` and `process` do all of this for a model, and say what is wrong."""
    tools, slot = await kit.common_tools(), await kit.lease()

    async def call(name: str, **args: object) -> dict[str, object]:
        tool = kit.rig.runtime.tools.get(name)
        return (await tools.execute(slot, tool, args, timeout_s=30)).to_tool_result()

    command = 'stty -echo; echo ready; while read -r x; do echo "<$x>"; done; exit 7'
    session = (await call("terminal", command=command, background=True, pty=True))["session_id"]

    async def shows(words: str) -> bool:
        return words in str((await call("process", action="log", session_id=session))["screen"])

    await until(lambda: shows("ready"), SHOWN_S, "it is not ready")
    await call("process", action="submit", session_id=session, data="one")
    await until(lambda: shows("<one>"), SHOWN_S, "it did not read a line")
    await call("process", action="write", session_id=session, data="\x04")
    ended = await call("process", action="wait", session_id=session, timeout=20)
    assert (ended["status"], ended["exit_code"]) == ("exited", 7), "its end"
    late = await call("process", action="submit", session_id=session, data="late")
    assert late["status"] == "already_exited", "writing to it then"
    unknown = await call("process", action="poll", session_id="proc_0123456789ab")
    assert unknown["status"] == "not_found", "an unknown session"
