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


@pytest.mark.parametrize("status", [0, 1, 42, 124, 137, 255])
async def test_exit_status(slot, status):
    result = await slot.run(f"exit {status}")
    assert (result.exit_code, result.signal, result.timed_out) == (status, None, False)
    assert result.returncode == status


@pytest.mark.parametrize("number", [1, 2, 9, 11, 13, 15])
async def test_signal(slot, number):
    result = await slot.run(f"kill -{number} $$; sleep 1")
    assert (result.exit_code, result.signal, result.timed_out) == (None, number, False)
    assert result.returncode == 128 + number


async def test_sigpipe_is_deadly(slot):
    result = await slot.run("yes | head -1; echo ${PIPESTATUS[0]}")
    assert result.text == "y\n141\n"


async def test_no_signal_is_blocked_or_ignored(slot):
    result = await slot.run("grep -E 'Sig(Blk|Ign)' /proc/self/status")
    blocked, ignored = (int(line.split()[1], 16) for line in result.text.splitlines())
    of_the_c_library = 1 << 31 | 1 << 32  # 32 and 33, which glibc's posix_spawn leaves ignored
    assert (blocked, ignored & ~of_the_c_library) == (0, 0)


async def test_time_limit_ends_what_was_started(slot):
    began = time.monotonic()
    result = await slot.run("sleep 1000.1 & sleep 1000.1", timeout_s=0.3)
    assert time.monotonic() - began < 15
    assert result.timed_out and result.exit_code is None and result.signal == 15 and result.returncode == 124
    assert not await alive(slot, "sleep 1000.1")


async def test_time_limit_is_told_apart_from_exit_124(slot):
    assert not (await slot.run("exit 124", timeout_s=30)).timed_out
    late = await slot.run("trap 'exit 124' TERM; sleep 1000 & wait", timeout_s=0.2)
    assert late.timed_out and late.exit_code == 124


async def test_what_ignores_term_is_killed(slot):
    began = time.monotonic()
    result = await slot.run("trap '' TERM; sleep 1000.2 & sleep 1000.2", timeout_s=0.3)
    assert 2 < time.monotonic() - began < 20
    assert (result.timed_out, result.signal) == (True, 9), result
    assert not await alive(slot, "sleep 1000.2")


async def test_children_that_outlive_their_leader_at_a_time_limit_are_killed(slot):
    """The leader dies of TERM; its child, which ignores it, is given the grace period and no more."""
    result = await slot.run("(trap '' TERM; exec sleep 1000.3) & sleep 1000", timeout_s=0.3)
    assert result.timed_out and result.signal == 15
    assert not await alive(slot, "sleep 1000.3")


async def test_children_may_clean_up_within_the_grace_period(slot):
    command = "sh -c 'trap \"sleep 0.5; echo done >cleaned; exit\" TERM; sleep 1000 & wait' & sleep 1000"
    assert (await slot.run(command, timeout_s=0.3)).timed_out
    assert (await slot.run("cat cleaned")).text == "done\n"


async def test_stopped_processes_are_ended(slot):
    result = await slot.run("kill -STOP $$", timeout_s=0.3)
    assert result.timed_out and result.signal == 15


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
async def test_a_chain_of_short_lives_is_ended_at_a_time_limit(slot, leader):
    """Each process forks the next one and ends: a look at /proc may find the old one gone and not yet the new one."""
    await slot.write_file("chain.py", CHAIN.encode())
    assert (await slot.run(["python3", "chain.py", leader], timeout_s=0.7)).timed_out
    before = (await slot.run("cat lives")).text
    await asyncio.sleep(0.2)
    assert before and (await slot.run("cat lives")).text == before


async def test_an_escapee_without_a_mark_is_ended_if_nothing_else_runs(slot):
    await slot.write_file("escape.py", LEAVE_ESCAPEE.encode())
    assert (await slot.run(["python3", "escape.py", "1000.6"], timeout_s=0.7)).timed_out
    assert not await alive(slot, "sleep 1000.6")


async def test_a_time_limit_spares_what_earlier_commands_left(slot):
    await slot.run("sleep 1000.7 >/dev/null 2>&1 &")
    await asyncio.sleep(0.05)
    assert (await slot.run("sleep 1000.8", timeout_s=0.2)).timed_out
    assert await alive(slot, "sleep 1000.7")


async def test_cancelling_kills(slot):
    running = asyncio.ensure_future(slot.run("trap '' TERM; sleep 1000.9 & sleep 1000.9"))
    await asyncio.sleep(0.3)
    assert await alive(slot, "sleep 1000.9")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for _ in range(50):
        if not await alive(slot, "sleep 1000.9"):
            return
        await asyncio.sleep(0.05)
    pytest.fail("it still runs")


async def test_a_command_of_a_time_long_past_is_no_burden(slot):
    for limit in (float("inf"), 1e9, 1e300):
        assert (await slot.run("true", timeout_s=limit)).ok


# --- what is left behind --------------------------------------------------------------------------------------------


async def test_a_child_that_holds_the_pipe_is_not_waited_for(slot):
    began = time.monotonic()
    result = await slot.run("sleep 1000 & echo started")
    assert time.monotonic() - began < 15
    assert result.ok and result.text == "started\n"


async def test_a_child_left_behind_gets_no_sigpipe_and_never_blocks(slot):
    writer = (
        "i=0; while [ $i -lt 3000 ]; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; i=$((i+1)); done"
    )
    await slot.run(f"(sleep 0.2; {writer}; {writer}; echo alive >proof) & true")
    for _ in range(100):
        if (await slot.run("cat proof")).text == "alive\n":
            return
        await asyncio.sleep(0.05)
    pytest.fail("it was killed, or it waits for a reader")


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


async def test_output_streams_are_apart(slot):
    result = await slot.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.stdout_bytes, result.stderr_bytes) == (b"out\n", b"err\n", 4, 4)


async def test_merged_output_keeps_its_order(slot):
    result = await slot.run("for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_stderr=True)
    assert result.text.split() == ["o1", "e1", "o2", "e2", "o3", "e3"]
    assert (result.stderr, result.stderr_bytes) == (b"", 0)


async def test_bytes_that_are_no_text_arrive_as_they_are(slot):
    result = await slot.run(r"printf '\377\000\200abc'")
    assert result.stdout == b"\xff\x00\x80abc"
    assert result.text == "\ufffd\x00\ufffdabc"


async def test_head_and_tail_are_kept_and_all_is_counted(slot):
    result = await slot.run("seq 1 200000", output_limit=1000)
    everything = b"".join(b"%d\n" % n for n in range(1, 200001))
    assert result.truncated and result.stdout_bytes == len(everything)
    head, _, rest = result.stdout.partition(b"\n... [")
    notice, _, tail = rest.partition(b"] ...\n")
    assert everything.startswith(head) and everything.endswith(tail)
    assert (len(head), len(tail)) == (500, 500) and notice == b"%d bytes omitted" % (len(everything) - 1000)


@pytest.mark.parametrize("limit", [1000, 4 << 20])
async def test_what_was_left_out_is_told_of_each_stream(slot, limit):
    flood = "head -c 3000000 /dev/zero >&2"
    result = await slot.run(f"echo out; {flood}", output_limit=limit)
    assert (result.stdout, result.stdout_truncated, result.stderr_truncated) == (b"out\n", False, True)
    assert result.truncated and result.stderr_bytes == 3_000_000


async def test_characters_are_not_cut_in_two(slot):
    result = await slot.run("for i in $(seq 5000); do printf '€'; done", output_limit=1001)
    assert "\ufffd" not in result.text and result.truncated and result.stdout_bytes == 15000


async def test_no_limit_is_reached_when_the_output_fits(slot):
    result = await slot.run("head -c 4096 /dev/zero", output_limit=4096)
    assert not result.truncated and result.stdout == bytes(4096)


async def test_many_megabytes_are_kept_when_asked_for(slot):
    result = await slot.run("head -c 9000000 /dev/zero; echo; echo err >&2", output_limit=16 << 20)
    assert result.stdout == bytes(9_000_000) + b"\n" and result.stderr == b"err\n" and not result.truncated
    cut = await slot.run("head -c 9000000 /dev/zero", output_limit=4 << 20)
    assert cut.truncated and cut.stdout_bytes == 9_000_000


async def test_spooled_output_is_all_there_and_cannot_be_changed(rig):
    slot = await rig.slot()
    result = await slot.run("seq 1 100000; echo err >&2", output_limit=100, spool=True)
    assert result.spool_path is not None and result.truncated
    lines = (await slot.run(f"sort -u {result.spool_path} | wc -l")).text
    assert lines.strip() == "100001"
    if rig.level != "shared":
        assert not (await slot.run(f"echo x >>{result.spool_path}")).ok
        other = await rig.slot()
        assert not (await other.run(["cat", result.spool_path])).ok


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


async def test_no_input_is_an_empty_one(slot):
    assert (await slot.run("wc -c")).text.strip() == "0"


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 5_000_000])
async def test_input(slot, size):
    data = os.urandom(size)
    result = await slot.run("cat", stdin=data, output_limit=8 << 20)
    assert result.stdout == data


@pytest.mark.parametrize("size", [10, 20_000_000])
async def test_input_that_is_not_read_holds_nobody_up(slot, size):
    result = await asyncio.wait_for(slot.run("head -c 1; exit 5", stdin=b"x" * size), 20)
    assert (result.exit_code, result.stdout) == (5, b"x")
    result = await asyncio.wait_for(slot.run("exec 0<&-; sleep 0.3; exit 6", stdin=b"x" * size), 20)
    assert result.exit_code == 6


async def test_a_script_longer_than_an_argument_can_be(slot):
    filler = "# " + "x" * 1000 + "\n"
    script = f'echo first $0\n{filler * 1000}read line; echo "$line"; ls /proc/self/fd; exit 7'
    assert len(script) > 1_000_000
    result = await slot.run(script, stdin=b"from input\n")
    assert result.exit_code == 7
    assert result.text.splitlines()[1:] == ["from input", "0", "1", "2", "3"]


async def test_a_script_that_is_too_long_is_refused(slot):
    with pytest.raises(CommandError) as caught:
        await slot.run("#" * (9 << 20))
    assert caught.value.code == "too_large"


async def test_arguments_travel_as_they_are(slot):
    words = ["", " ", "a b", "$HOME", "`id`", "'", '"', "\\", "\n", "*", "-n", "€", "\udcff", "ü" * 100]
    result = await slot.run(["printf", "%s\\0", *words])
    assert result.stdout == b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)


async def test_thousands_of_arguments(slot):
    words = [str(number) for number in range(20_000)]
    result = await slot.run(["printf", "%s\\n", *words])
    assert result.text.split() == words


async def test_a_megabyte_of_arguments(slot):
    words = ["x" * 99_999] * 10
    assert (await slot.run(["printf", "%s", *words], output_limit=2 << 20)).text == "".join(words)
    with pytest.raises(CommandError) as caught:
        await slot.run(["true", *words * 2])
    assert caught.value.code == "too_large"


async def test_an_argument_list_that_the_kernel_refuses(slot):
    with pytest.raises(CommandError, match="too long"):
        await slot.run(["true", "x" * 200_000])
    assert (await slot.run("echo fine")).text == "fine\n"


async def test_environment(slot):
    result = await slot.run(
        'echo "$HOME|$TMPDIR|$USER|$A|$B"; test -w "$HOME" && test -w "$TMPDIR"', env={"A": "a b", "B": "€\n"}
    )
    home, tmp, user, a, b = result.text.rstrip("\n").split("|") if "\n|" not in result.text else result.text.split("|")
    assert result.ok and home.endswith("/home") and tmp and user == "agent" and (a, b.strip()) == ("a b", "€")


async def test_text_is_utf_8_unless_a_command_is_given_another_language(slot):
    said = "python3 -c 'import locale; print(locale.getpreferredencoding(False))'"
    names = 'echo "${LANG-none} ${LC_CTYPE-none}"'
    assert (await slot.run(f"{said}; {names}")).text == "UTF-8\nnone C.UTF-8\n"
    assert (await slot.run(names, env={"LANG": "C"})).text == "C none\n"
    assert (await slot.run(names, env={"LC_CTYPE": "C"})).text == "none C\n"


async def test_nothing_of_the_drivers_environment(slot):
    os.environ["HERMES_SECRET_OF_THE_DRIVER"] = "secret"
    try:
        assert (
            "secret"
            not in (
                await slot.run("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a HERMES_SECRET_OF")
            ).text
        )
    finally:
        del os.environ["HERMES_SECRET_OF_THE_DRIVER"]


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A": "\ud800"}, {"A": "x\0y"}])
async def test_variables_that_cannot_be_leave_the_slot_whole(slot, env):
    with pytest.raises(CommandError) as caught:
        await slot.run("true", env=env)
    assert caught.value.code == "invalid"
    assert (await slot.run("echo fine")).text == "fine\n"


@pytest.mark.parametrize("command", ["a\0b", ["a\0b"], [], "\ud800", ["\ud800"]])
async def test_commands_that_cannot_be(slot, command):
    with pytest.raises(CommandError) as caught:
        await slot.run(command)
    assert caught.value.code == "invalid"


async def test_commands_that_are_not_there(slot):
    for command, code in (
        (["no-such-program"], "not_found"),
        (["./nothing"], "not_found"),
        (["/etc"], "permission"),
        ([""], "not_found"),
    ):
        for attempt in (slot.run(command), slot.start(command)):
            with pytest.raises(CommandError) as caught:
                await attempt
            assert caught.value.code == code
    assert (await slot.run("no-such-program")).exit_code == 127


async def test_names_of_any_length_cost_the_slot_nothing(slot):
    """What was said of such a name did not go through the parent's socket, and the parent ended the slot."""
    other = await slot.start("sleep 1000")
    for how in ({"command": "true", "cwd": "d" * 300_000}, {"command": ["p" * 100_000]}, {"command": ["p/" * 60_000]}):
        with pytest.raises(CommandError, match=r"long|not found") as caught:
            await slot.run(**how)
        assert len(str(caught.value)) < 2000
    assert (await slot.run("echo ok")).text == "ok\n"
    assert (await slot.poll(other.process_id)).running


async def test_a_program_that_is_none(slot):
    await slot.write_file("data", b"\x7fELF nonsense", mode=0o755)
    with pytest.raises(CommandError, match=r"[Ee]xec format"):
        await slot.run(["./data"])


async def test_working_directory(slot):
    await slot.write_file("dir/sub/file", b"")
    assert (await slot.run("pwd")).text.strip() == slot.workspace_dir
    assert (await slot.run("pwd", cwd="dir/sub")).text.strip() == slot.workspace_dir + "/dir/sub"
    assert (await slot.run("pwd", cwd="/")).text == "/\n"
    for cwd, code in (("missing", "cwd_not_found"), ("dir/sub/file", "cwd_not_a_directory")):
        for attempt in (slot.run("true", cwd=cwd), slot.start(["no-such-program"], cwd=cwd)):
            with pytest.raises(CommandError) as caught:
                await attempt
            assert caught.value.code == code and cwd in str(caught.value)


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


async def test_descriptors(slot):
    result = await slot.run(["ls", "/proc/self/fd"])
    assert result.text.split() == ["0", "1", "2", "3"], "3 is the listing's own"
    assert (await slot.run("ls /proc/$$/fd; true")).text.split() == ["0", "1", "2"]


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


async def test_many_at_once(slot):
    results = await asyncio.gather(*(slot.run(f"echo {n}; exit {n}") for n in range(60)))
    assert [(result.text, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(60)]


async def test_the_slots_parent_tells_nothing_of_itself(own_rig):
    """Its memory and descriptors hold the way to the guest: not even the slot's own user gets at them."""
    slot = await own_rig.slot()
    result = await slot.run("ls /proc/$PPID/fd; cat /proc/$PPID/environ; readlink -v /proc/$PPID/exe")
    assert result.stdout == b"" and result.error_text.count("denied") == 3, result


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("-inf")])
async def test_time_limits_that_are_none(slot, limit):
    with pytest.raises(CommandError) as caught:
        await slot.run("true", timeout_s=limit)
    assert caught.value.code == "invalid"


@pytest.mark.parametrize("limit", [0, -1])
async def test_output_limits_that_are_none(slot, limit):
    with pytest.raises(CommandError) as caught:
        await slot.run("true", output_limit=limit)
    assert caught.value.code == "invalid"
