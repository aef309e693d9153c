"""Commands in a slot: how they end, what they print, what they are given, what they leave behind."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from hermes_core.errors import CommandError
from hermes_core.sandbox.linux import processes
from tests.sandbox.conftest import SYSTEM_PYTHON

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEAVE_ESCAPEE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if len(sys.argv) > 1:
            os.environ.clear()
            os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
        os.execv("/bin/sleep", ["sleep", "1000.5"])
    os._exit(0)
time.sleep(1000)
"""


CHAIN = """
import os, signal, sys, time
log = os.open("lives", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
if sys.argv[1] == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    time.sleep(1000)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    os.write(log, b".")
    if os.fork():
        os._exit(0)
    os.setsid()
"""


async def alive(slot, pattern):
    """Whether a process with this command line runs, as the slot sees it."""
    found = await slot.run(
        ["sh", "-c", f"for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done | grep -c '^{pattern}'"]
    )
    return int(found.text) > 0


# --- how they end ---------------------------------------------------------------------------------------------------


async def test_no_signal_is_blocked_or_ignored(slot):
    result = await slot.run("grep -E 'Sig(Blk|Ign)' /proc/self/status")
    blocked, ignored = (int(line.split()[1], 16) for line in result.text.splitlines())
    of_the_c_library = 1 << 31 | 1 << 32  # 32 and 33, which glibc's posix_spawn leaves ignored
    assert (blocked, ignored & ~of_the_c_library) == (0, 0)


@pytest.mark.parametrize("neighbour", [False, True])
async def test_escapees_are_ended_at_a_time_limit(slot, neighbour):
    """Forked twice, in a session of its own: the mark in its environment gives it away."""
    await slot.write_file("escape.py", LEAVE_ESCAPEE.encode())
    other = asyncio.ensure_future(slot.run("sleep 1.5; echo still here")) if neighbour else None
    assert (await slot.run(["python3", "escape.py"], timeout_s=0.7)).timed_out
    assert not await alive(slot, "sleep 1000.5")
    if other is not None:
        assert (await other).text == "still here\n"


@pytest.mark.parametrize("leader", ["stays", "goes"])
async def test_a_chain_of_short_lives_is_ended_at_a_time_limit(slot, level, leader):
    """Each process forks the next one and ends: a look at /proc may find the old one gone and not yet the new one."""
    if level == "shared":
        pytest.skip("only the processes of a slot with a user of its own can be stopped all at once")
    await slot.write_file("chain.py", CHAIN.encode())
    assert (await slot.run(["python3", "chain.py", leader], timeout_s=1.5)).timed_out
    before = (await slot.run("cat lives")).text
    await asyncio.sleep(0.2)
    assert before and (await slot.run("cat lives")).text == before


async def test_an_escapee_without_a_mark_is_ended_if_nothing_else_runs(slot):
    await slot.write_file("escape.py", LEAVE_ESCAPEE.encode())
    assert (await slot.run(["python3", "escape.py", "1000.6"], timeout_s=0.7)).timed_out
    assert not await alive(slot, "sleep 1000.6")


async def test_a_command_of_a_time_long_past_is_no_burden(slot):
    for limit in (float("inf"), 1e9, 1e300):
        assert (await slot.run("true", timeout_s=limit)).ok


# --- what is left behind --------------------------------------------------------------------------------------------


async def test_what_is_left_behind_and_never_stops_writing_costs_the_others_little(slot):
    for _ in range(4):
        await slot.run("yes & echo $! >>pids")
    began = time.monotonic()
    for _ in range(20):
        assert (await slot.run("true")).ok
    assert time.monotonic() - began < 30
    assert (await slot.run("kill $(cat pids)")).ok


async def test_a_writer_left_behind_by_a_streamed_command_is_not_waited_for(slot):
    result = await asyncio.wait_for(slot.run("yes & echo $! >pids; exit 3", output_limit=8 << 20), 20)
    assert result.exit_code == 3
    assert (await slot.run("kill $(cat pids)")).ok


# --- what they print ------------------------------------------------------------------------------------------------


async def test_lines_that_follow_each_other_come_together(slot):
    """Whoever writes line by line does not wake us for each. What comes after a while comes at once."""
    pieces = []

    async def sink(piece):
        pieces.append(piece)

    writer = "import time\nfor i in range(500): print(i, flush=True), time.sleep(0.0002)"
    result = await slot.run([SYSTEM_PYTHON, "-c", writer], stdout=sink)
    assert b"".join(pieces).split() == [b"%d" % number for number in range(500)] and result.exit_code == 0
    assert len(pieces) < 200, "each line woke the driver, or nearly each"
    pieces.clear()
    await slot.run("for i in 1 2 3 4; do echo $i; sleep 0.2; done", stdout=sink)
    assert pieces == [b"1\n", b"2\n", b"3\n", b"4\n"]


@pytest.mark.parametrize("limit", [1000, 4 << 20])
async def test_what_was_left_out_is_told_of_each_stream(slot, limit):
    flood = "head -c 3000000 /dev/zero >&2"
    result = await slot.run(f"echo out; {flood}", output_limit=limit)
    assert (result.stdout, result.stdout_truncated, result.stderr_truncated) == (b"out\n", False, True)
    assert result.truncated and result.stderr_bytes == 3_000_000


async def test_a_hundred_megabytes_leave_the_guest_small(rig):
    slot = await rig.slot()
    await slot.run("head -c 1000000 /dev/zero")
    before = memory_of(rig.guest_pid)
    result = await slot.run("head -c 100000000 /dev/zero")
    assert result.stdout_bytes == 100_000_000 and result.truncated
    assert memory_of(rig.guest_pid) - before < 40 << 20


async def test_tiny_writes_leave_the_guest_small(rig):
    slot = await rig.slot()
    before = memory_of(rig.guest_pid)
    script = "import os\nfor i in range(200000): os.write(1, b'x')"
    result = await slot.run(["python3", "-c", script], output_limit=2 << 20)
    assert result.stdout == b"x" * 200_000
    assert memory_of(rig.guest_pid) - before < 20 << 20


def memory_of(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) << 10


# --- what they are given --------------------------------------------------------------------------------------------


async def test_a_script_that_is_too_long_is_refused(slot):
    with pytest.raises(CommandError) as caught:
        await slot.run("#" * (9 << 20))
    assert caught.value.code == "too_large"


async def test_two_megabytes_of_arguments_are_refused(slot):
    with pytest.raises(CommandError) as caught:
        await slot.run(["true", *["x" * 99_999] * 20])
    assert caught.value.code == "too_large"


async def test_text_is_utf_8_unless_a_command_is_given_another_language(slot):
    said = "python3 -c 'import locale; print(locale.getpreferredencoding(False))'"
    names = 'echo "${LANG-none} ${LC_CTYPE-none}"'
    assert (await slot.run(f"{said}; {names}")).text == "UTF-8\nnone C.UTF-8\n"
    assert (await slot.run(names, env={"LANG": "C"})).text == "C none\n"
    assert (await slot.run(names, env={"LC_CTYPE": "C"})).text == "none C\n"


async def test_names_of_any_length_cost_the_slot_nothing(slot):
    """What was said of such a name did not go through the parent's socket, and the parent ended the slot."""
    other = await slot.start("sleep 1000")
    for how in ({"command": "true", "cwd": "d" * 300_000}, {"command": ["p" * 100_000]}, {"command": ["p/" * 60_000]}):
        with pytest.raises(CommandError, match=r"long|not found") as caught:
            await slot.run(**how)
        assert len(str(caught.value)) < 2000
    assert (await slot.run("echo ok")).text == "ok\n"
    assert (await slot.poll(other.process_id)).running


async def test_a_file_that_is_no_program_is_refused(slot):
    await slot.write_file("data", b"\x7fELF nonsense", mode=0o755)
    with pytest.raises(CommandError, match=r"[Ee]xec format"):
        await slot.run(["./data"])


async def test_a_directory_that_may_not_be_entered(own_rig):
    slot = await own_rig.slot()
    if (await slot.run("mkdir -m 0 closed; id -u")).text.strip() == "0":
        pytest.skip("root enters everywhere")
    with pytest.raises(CommandError) as caught:
        await slot.run("true", cwd="closed")
    assert caught.value.code == "cwd_permission"


async def test_a_workspace_that_is_gone_or_locked(slot):
    """To a command it is its directory that can't be used; to a file operation, the path."""
    gone = await slot.run('if rmdir "$PWD" 2>&-; then echo yes; else chmod 0 "$PWD"; fi')
    code = "not_found" if gone.text else "permission"
    for attempt, wanted in ((slot.run("true"), f"cwd_{code}"), (slot.tar_out(), code)):
        with pytest.raises(CommandError) as caught:
            await attempt
        assert caught.value.code == wanted


async def test_session_and_limits(rig):
    slot = await rig.slot()
    result = await slot.run(
        "echo $$ $(cut -d' ' -f6 /proc/$$/stat); cat /proc/self/oom_score_adj; umask;"
        " grep NoNewPrivs /proc/self/status; ulimit -c; ulimit -Su"
    )
    (pid, sid), adj, umask, (_, no_new), core, processes = (line.split() for line in result.text.splitlines())
    assert pid == sid and adj == ["1000"] and core == ["0"]
    assert umask == ["0022"]
    if rig.level != "shared":
        assert no_new == "1" and processes == ["256"]


async def test_slots_parents_are_scheduled_with_the_guest(rig):
    """By session: one of their own would make them wait for a processor at each turn, where the machine is busy."""
    await rig.slot()
    guest = rig.guest_pid
    parents = [pid for pid, process in processes.list_processes().items() if process.parent == guest]
    assert parents and {os.getsid(pid) for pid in parents} == {os.getsid(guest)}


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("-inf")])
async def test_a_time_limit_that_is_no_positive_number_is_refused(slot, limit):
    with pytest.raises(CommandError) as caught:
        await slot.run("true", timeout_s=limit)
    assert caught.value.code == "invalid"


@pytest.mark.parametrize("limit", [0, -1])
async def test_an_output_limit_below_one_is_refused(slot, limit):
    with pytest.raises(CommandError) as caught:
        await slot.run("true", output_limit=limit)
    assert caught.value.code == "invalid"
