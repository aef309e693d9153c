"""What a slot in a container can do to its neighbours by way of the kernel they share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.isolation.kernel import KERNEL

ATTACKS = (
    KERNEL
    + """
with open("/etc/hostname") as file:
    done = {
        "lease": outcome(fcntl.fcntl, file, 1024, fcntl.F_RDLCK),
        "packet socket": outcome(socket.socket, 17, 3),
        "user namespace": outcome(lambda: check(libc.unshare(0x10000000))),
        "io_uring": outcome(lambda: check(libc.syscall(425, 1, 0))),
        "oom_score_adj": outcome(write, "/proc/self/oom_score_adj", "0"),
        "its parent's": outcome(write, "/proc/%d/oom_score_adj" % os.getppid(), "0"),
        "more files": outcome(resource.setrlimit, resource.RLIMIT_NOFILE, (4096, 4096)),
    }
with open("/proc/self/oom_score_adj") as file:
    print(json.dumps([done, int(file.read())]))
"""
)

OPEN_TO = """
import os, struct, sys
os.mkdir("/tmp/theirs", 0o700)
entries = ((1, 7, -1), (2, 7, int(sys.argv[1])), (4, 0, -1), (0x10, 7, -1), (0x20, 0, -1))
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
os.setxattr("/tmp/theirs", "system.posix_acl_access", acl)
"""


@pytest.fixture
async def slots(python_image: str) -> AsyncIterator[Any]:
    """The backend, and two slots of one container."""
    config = {"image": python_image, "slots_per_sandbox": 3, "max_sandboxes": 1}
    async with (
        Runtime(Settings(plugins=("docker",))) as runtime,
        runtime.tool_backend("docker", isolation="user", config=config) as backend,
    ):
        yield backend, await backend.acquire("a"), await backend.acquire("b")


async def test_what_only_harms_neighbours_is_refused(slots: Any) -> None:
    backend, a, _ = slots
    ran = await backend.commands(a).run(["python3", "-I", "-S", "-c", ATTACKS])
    done, score = json.loads(ran.text)
    assert {name for name, result in done.items() if result == "ok"} <= {"more files"}, done
    assert score == 1000


async def test_no_leftover_in_a_directory_that_an_access_list_opened(slots: Any) -> None:
    backend, a, b = slots
    uid = (await backend.commands(a).run("id -u")).text.strip()
    opened = await backend.commands(b).run(["python3", "-I", "-S", "-c", OPEN_TO, uid])
    if b"not supported" in opened.stderr:
        pytest.skip("no access lists on this file system")
    assert (await backend.commands(a).run("echo x >/tmp/theirs/f")).returncode == 0
    await backend.release(a, reset_workspace=True)
    assert (await backend.commands(b).run(f"find /tmp -user {uid}")).text == ""


MANY_SMALL = """
import os, time
for _ in range(300):
    if os.fork() == 0:
        try:
            open("/proc/self/oom_score_adj", "w").write("0")
        except OSError:
            pass
        try:
            held = bytearray(os.urandom(1)) * (3 << 20)
            time.sleep(20)
        finally:
            os._exit(0)
time.sleep(10)
"""


async def test_many_small_processes_do_not_end_the_guest(python_image: str) -> None:
    """They took the memory of the container with an `oom_score_adj` of 0, and the kernel took the larger guest."""
    config = {"image": python_image, "memory": 200, "slots_per_sandbox": 3, "max_sandboxes": 1, "reserve_slots": 0}
    async with (
        Runtime(Settings(plugins=("docker",))) as runtime,
        runtime.tool_backend("docker", isolation="user", config=config) as backend,
        backend.lease("hog") as hog,
        backend.lease("neighbour") as neighbour,
    ):
        done = await backend.commands(hog).run(["python3", "-c", MANY_SMALL], timeout_s=60)
        assert done.signal == 9, "the container's memory was not used up"
        assert (await backend.commands(neighbour).run("cat /proc/self/oom_score_adj")).text == "1000\n"
        assert backend.get_status()["pools"]["default"]["sandboxes"] == 1
