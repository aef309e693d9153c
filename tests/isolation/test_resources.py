"""What a slot may use up or ruin, and that neither its neighbour nor its own next command suffers from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

FORK = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
MAKE_DIRECTORIES = """if 1:
    import itertools, os
    try:
        for number in itertools.count():
            os.mkdir(str(number))
    except OSError as error:
        print(error.errno)
"""
NO_SPACE = 28


def processes_of(driver: Any) -> int:
    """The processes of this host that run in the driver's sandbox and fork."""
    marker = FORK.encode()
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += (
                marker in path.read_bytes() and driver.leases["a"]["sandbox"] in path.with_name("environ").read_text()
            )
        except OSError:
            continue
    return count


def test_a_fork_bomb_stays_within_its_slot(bounded: Any) -> None:
    bounded.call("start", slot="a", command=["python3", "-I", "-S", "-c", FORK])
    deadline = time.monotonic() + 10
    while processes_of(bounded) < 40:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert processes_of(bounded) <= 64
    assert bounded.run("b", "for i in 1 2 3 4 5 6 7 8; do (echo $i); done | tail -n 1").out == "8\n"
    bounded.call("write", slot="b", path="file", text="text")
    with pytest.raises(Exception, match="temporarily unavailable") as failed:
        bounded.run("a", "echo no room")
    assert failed.value.kind == "CommandError"  # the slot's own doing, never the infrastructure's
    bounded.call("kill", slot="a")
    assert processes_of(bounded) == 0
    assert bounded.run("a", "echo room").out == "room\n"


def test_a_process_gets_no_more_memory_than_it_may(drivers: Any) -> None:
    take = "python3 -I -S -c 'print(len(bytes({} << 20)) >> 20)'"
    with drivers.started("user", "a", process_memory=256) as driver:
        assert driver.run("a", take.format(128)).out == "128\n"
        refused = driver.run("a", take.format(512))
        assert "MemoryError" in refused.err
        assert "MemoryError" in driver.run("a", f"ulimit -d unlimited; {take.format(512)}").err


def test_a_full_disk_is_an_error_of_what_writes(bounded: Any) -> None:
    filled = bounded.run("a", "head -c 64M /dev/zero >big; head -c 1M /dev/zero >$HOME/b; head -c 1M /dev/zero >/tmp/b")
    assert filled.err.count("No space left") == 3
    assert bounded.run("b", "echo runs").out == "runs\n"
    assert bounded.run("b", "# " + 200_000 * "x" + "\necho a long one").out == "a long one\n"
    failed = bounded.run("b", "echo text >file")
    assert failed.status == 1 and "No space left" in failed.err
    with pytest.raises(Exception, match="No space left") as refused:
        bounded.call("write", slot="b", path="file", text="text")
    assert (refused.value.kind, refused.value.code) == ("CommandError", "no_space")
    bounded.call("kill", slot="b")
    bounded.reset("b")
    assert bounded.run("b", "echo runs").out == "runs\n"
    bounded.reset("a")
    bounded.until("b", "echo text >file")


def test_the_sandbox_outlives_a_full_disk(drivers: Any) -> None:
    with drivers.started("user", "a", "b", tmpfs_size=8, orphan_ttl_s=1.5) as driver:
        assert "No space left" in driver.run("a", "head -c 64M /dev/zero >big").err
        time.sleep(2)
        assert driver.run("b", "echo lives").out == "lives\n"


def test_too_many_files_are_an_error_of_what_writes(bounded: Any) -> None:
    assert bounded.python("a", MAKE_DIRECTORIES) == NO_SPACE
    assert bounded.run("b", "echo runs").out == "runs\n"
    bounded.call("kill", slot="b")
    bounded.reset("b")
    bounded.reset("a")
    bounded.until("b", "echo text >file")


def test_a_workspace_without_rights_can_be_killed_and_reset(bounded: Any) -> None:
    bounded.run("a", "chmod 000 . $HOME $TMPDIR")
    bounded.call("kill", slot="a")
    assert bounded.run("a", "pwd").out.strip() == bounded.workspace("a")


def test_a_tree_made_to_resist_is_removed(bounded: Any) -> None:
    program = """if 1:
        import json, os
        for number in range(1, 6):
            os.makedirs(".hermes-removing-%d/x" % number)
        os.makedirs(b"bytes \\xff and\\nlines/inner")
        os.symlink("/", "link")
        os.makedirs("closed/inner/innermost")
        os.chmod("closed/inner", 0)
        os.chmod("closed", 0)
        for _ in range(1500):
            os.mkdir("deep")
            os.chdir("deep")
        os.mkfifo("pipe")
        print(json.dumps("made"))
    """
    for _ in range(2):
        assert bounded.python("a", program) == "made"
        bounded.reset("a")
        assert bounded.run("a", "ls -A").out == ""
    deadline = time.monotonic() + 10
    while any(bounded.directory().glob("data/.slots/trash/*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", ["STOP", "KILL", "SEGV", "TERM"])
def test_a_signal_to_the_slots_parent_harms_nobody(bounded: Any, number: str) -> None:
    ran = bounded.run("a", f"kill -{number} $PPID; echo done", timeout_s=2)
    assert ran.status in (0, 137) or ran.timed_out
    assert bounded.run("a", "echo again", timeout_s=5).out == "again\n"
    assert bounded.run("b", "echo neighbour").out == "neighbour\n"


def test_killing_all_that_can_be_reached_reaches_the_slot_only(bounded: Any) -> None:
    bounded.call("start", slot="b", command="while :; do date +%N >beat; sleep 0.05; done")
    before = bounded.until("b", "cat beat")
    for _ in range(3):
        bounded.run("a", ["python3", "-I", "-S", "-c", "import os; os.kill(-1, 9)"])
        assert bounded.run("a", "echo again").out == "again\n"
    assert bounded.until("b", f"test $(cat beat) != {before} && echo beats") == "beats"


def test_others_files_in_a_directory_of_ones_own_do_not_prevent_a_reset(root: Any) -> None:
    with root.started("user", "a", "b") as driver:
        driver.run("a", "mkdir -m 777 /tmp/ours /tmp/ours/inner; touch /tmp/ours/mine")
        driver.run("b", "mkdir -p /tmp/ours/b/c /tmp/ours/inner/d; chmod 700 /tmp/ours/b; echo text >/tmp/ours/b/c/f")
        driver.reset("a")
        assert driver.call("healthy") == 1
        assert driver.run("b", "cat /tmp/ours/b/c/f").out == "text\n"
        uid = driver.run("a", "id -u").out.strip()
        assert driver.run("b", f"find /tmp -user {uid}").out == ""


def test_a_slot_has_limits_on_files_and_processes(pair: Any) -> None:
    program = """if 1:
        import json, resource
        names = ("RLIMIT_NPROC", "RLIMIT_CORE")
        print(json.dumps([resource.getrlimit(getattr(resource, name)) for name in names]))"""
    assert pair.python("a", program) == [[512, 512], [0, 0]]
    raised = "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (513, 513))"
    assert pair.run("a", ["python3", "-c", raised]).status == 1
    assert json.loads(pair.run("a", "cat /proc/self/oom_score_adj").out) == 1000
