"""Thirty more ways to use up or hold what the kernel shares out: what the neighbour, the guest and the reset notice.

Each attack is held while the neighbour does a day's work; then its slot is killed and reset, which has to work. What a
neighbour may notice all the same is in `NOTICED`, and in the threat model.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.stress

PRELUDE = """
import array, ctypes, errno, fcntl, json, mmap, os, resource, select, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
shared, neighbour = sys.argv[1:]
said, place = open("said.new", "w"), os.getcwd()  # later there may be no descriptor left
def as_many(call, limit=100000):
    kept = []
    try:
        while len(kept) < limit:
            kept.append(call())
    except OSError as error:
        return kept, errno.errorcode[error.errno]
    return kept, "ok"
def tried(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def everyone(call):
    found = range(1, 3000)
    for _ in range(2):  # what is gone in a moment was another command of this slot
        found = [pid for pid in found if pid not in (os.getpid(), os.getppid()) and tried(call, pid) == "ok"]
        time.sleep(1)
    return found
def in_children(count, body):
    for _ in range(count):
        if os.fork() == 0:
            try:
                body()
            finally:
                time.sleep(600)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
def say(*what):
    json.dump(what, said)
    said.close()
    os.rename(place + "/said.new", place + "/said")
"""

ATTACKS = {
    "pipes of full size": """
        def fill():
            kept, _ = as_many(os.pipe)
            for reader, writer in kept:
                os.set_blocking(writer, False)
                try:
                    os.write(writer, bytes(1 << 16))
                except BlockingIOError:
                    pass
        in_children(8, fill)
        time.sleep(2)""",
    "epoll watches": """
        def watch():
            polls, _ = as_many(select.epoll, 1900)
            event = os.pipe()[0]
            targets = [os.dup(event) for _ in range(1900)]
            for poll in polls:
                for target in targets:
                    poll.register(target, 0)
        in_children(3, watch)
        time.sleep(20)""",
    "open files": """
        in_children(60, lambda: as_many(lambda: os.open("/dev/null", os.O_RDONLY)))
        time.sleep(2)""",
    "sockets that listen": """
        def listen():
            server = socket.socket()
            server.bind(("127.0.0.1", 0))
            server.listen(4096)
            return server
        kept, why = as_many(listen)""",
    "full send buffers": """
        server = socket.create_server(("127.0.0.1", 0), backlog=2000)
        def connect():
            client = socket.create_connection(server.getsockname())
            client.setblocking(False)
            try:
                while True:
                    client.send(bytes(1 << 20))
            except BlockingIOError:
                return client, server.accept()
        kept, why = as_many(connect, 300)""",
    "files in memory": "kept, why = as_many(lambda: os.memfd_create('x'))",
    "signals that wait": """
        signal.pthread_sigmask(signal.SIG_BLOCK, {40})
        kept, why = as_many(lambda: check(libc.sigqueue(os.getpid(), 40, None)), 200000)""",
    "message queues": """
        names = iter(range(100000))
        kept, why = as_many(lambda: check(libc.mq_open(b"/%d" % next(names), 0o102, 0o600, None)), 5000)""",
    "System V objects": """
        kept, why = as_many(lambda: check(libc.shmget(0, 4096, 0o1600)), 10000)
        kept, why = as_many(lambda: check(libc.semget(0, 100, 0o1600)), 40000)""",
    "the room in /dev/shm": """
        with open("/dev/shm/big", "wb", 0) as file:
            kept, why = as_many(lambda: file.write(bytes(1 << 20)), 2000)""",
    "locks on prepared files": """
        file = open(shared + "/file")
        fcntl.flock(file, fcntl.LOCK_EX)
        tried(fcntl.fcntl, file, 37, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))""",
    "watches of prepared files": """
        fd = libc.inotify_init()
        for folder, _, names in os.walk("/usr/lib/python3"):
            libc.inotify_add_watch(fd, folder.encode(), 0xFFF)
        libc.inotify_add_watch(fd, shared.encode(), 0xFFF)""",
    "many inotify instances": "as_many(lambda: check(libc.inotify_init()), 2000)",
    "priorities of all": """
        tried(os.setpriority, os.PRIO_USER, 0, 19)
        tried(os.setpriority, os.PRIO_USER, os.getuid(), 19)
        libc.syscall(251, 3, os.getuid(), 3 << 13)
        assert everyone(lambda pid: os.sched_setaffinity(pid, {0})) == []
        assert tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)) == "EPERM"
        assert tried(os.nice, -1) in ("EPERM", "EACCES")""",
    "limits of all": "assert everyone(lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (9, 9))) == []",
    "the limits of its own parent": """
        for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_AS", "RLIMIT_CPU"):
            tried(resource.prlimit, os.getppid(), getattr(resource, name), (1, 1))""",
    "descriptors of all": """
        assert everyone(lambda pid: check(libc.syscall(438, check(libc.syscall(434, pid, 0)), 0, 0))) == []""",
    "memory of all": """
        vectors = struct.pack("PL", ctypes.addressof(ctypes.create_string_buffer(8)), 8)
        assert everyone(lambda pid: check(libc.process_vm_readv(pid, vectors, 1, vectors, 1, 0))) == []
        assert everyone(lambda pid: check(libc.syscall(312, os.getpid(), pid, 2, 0, 0))) == []""",
    "signals to all": "assert everyone(lambda pid: os.kill(pid, 0)) == []",
    "exotic protocols": """
        made = [(kind, number) for number in range(263) for kind in (1, 2, 3, 5, 6)
                if tried(socket.socket, socket.AF_INET, kind, number) == "ok"]
        assert {number for _, number in made} <= {0, 6, 17, 33, 132, 136, 262}, made""",
    "zombies": """
        for _ in range(300):
            if os.fork() == 0:
                os._exit(0)""",
    "children of vfork": """
        in_children(50, lambda: subprocess.Popen(["sleep", "600"]))
        if os.fork() == 0:
            libc.syscall(58) == 0 and libc.sleep(600)""",
    "tracees that stop at their exit": """
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            libc.ptrace(0x4206, pid, None, 0x40)""",
    "system calls that a filter holds": """
        libc.prctl(38, 1, 0, 0, 0)
        steps = struct.pack("HBBI", 0x20, 0, 0, 0) + struct.pack("HBBI", 0x15, 0, 1, 39)
        steps += struct.pack("HBBI", 6, 0, 0, 0x7FC00000) + struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
        code = ctypes.create_string_buffer(steps)
        if libc.syscall(317, 1, 8, struct.pack("HP", 4, ctypes.addressof(code))) >= 0:
            in_children(20, os.getpid)""",
    "sockets within sockets": """
        inner = socket.socketpair()
        for _ in range(2000):
            outer = socket.socketpair()
            outer[0].sendmsg([b"x"], [(1, 1, array.array("i", [each.fileno() for each in inner]))])
            inner = outer""",
    "a gigabyte": "memory = bytearray(1 << 30)",
    "mappings without end": """
        kept, why = as_many(lambda: mmap.mmap(-1, 4096, prot=len(os.listdir("/")) % 2 and 1 or 3), 60000)""",
    "directories within directories": """
        for _ in range(3000):
            os.mkdir("d")
            os.chdir("d")""",
    "threads": """
        import threading
        try:
            while True:
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        except RuntimeError:
            pass""",
    "locked memory": """
        libc.mlockall(3)
        kept, why = as_many(lambda: check(libc.mlock(ctypes.create_string_buffer(1 << 20), 1 << 20)), 100)""",
    "real-time timers of a microsecond": """
        def tick():
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0.00001, 0.00001)
        in_children(20, tick)""",
    "names that a neighbour could want": """
        for name in ("/dev/shm/sem.x", "/tmp/x", "/tmp/.X11-unix"):
            tried(os.symlink, "/etc/passwd", name)""",
}

PROBE = """
import asyncio, errno, json, multiprocessing, os, socket, subprocess, sys, tempfile
def works(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__ + ": " + str(error)[:80]
    return ""
def loop():
    async def run():
        process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
        assert (await process.communicate(b"text"))[0] == b"text"
    asyncio.run(run())
def send():
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [0])
def serve():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
def write():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 20))
done = {"asyncio": works(loop), "descriptors sent": works(send), "a server": works(serve), "a file": works(write),
        "a lock of multiprocessing": works(multiprocessing.Lock), "a terminal": works(os.openpty),
        "a program": works(lambda: subprocess.run(["true"], check=True)),
        "a prepared file": works(lambda: open(sys.argv[1]).close())}
print(json.dumps({name: said for name, said in done.items() if said}))
"""

NOTICED: dict[str, dict[str, set[str]]] = {
    "epoll watches": {"ordinary": {"asyncio"}},
    "the room in /dev/shm": {"user": {"a lock of multiprocessing"}},
}
"""By attack and by how slots are kept apart: what no longer works for the neighbour, as is documented."""


@pytest.fixture
def driver(shared: Callable[..., Any]) -> Iterator[Any]:
    driver = shared(orphan_ttl_s=60)
    yield driver
    for slot in ("a", "b"):
        driver.reset(slot)
    assert driver.call("healthy") == 1


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_neighbour_works_on_and_the_slot_can_be_reset(driver: Any, attack: str) -> None:
    prepared = driver.call("prepare", slot="a", key="siblings", command="echo text >file", private=False)
    driver.run("a", "rm -f said")
    arguments = [prepared, driver.workspace("b")]
    driver.call("start", slot="a", command=["python3", "-I", "-S", "-c", _program(attack), *arguments])
    driver.until("a", "cat said" if attack not in _MUTE else "true", limit_s=60)
    lost = driver.python("b", PROBE, f"{prepared}/file")
    kept_apart = driver.granted if driver.account.uid == 0 else "ordinary"
    began = time.monotonic()
    driver.call("kill", slot="a")
    print(f"{kept_apart}: {attack}: noticed {json.dumps(lost)}; killed in {time.monotonic() - began:.2f} s")
    assert set(lost) <= NOTICED.get(attack, {}).get(kept_apart, set())
    assert driver.run("a", "echo again").out == "again\n"


_MUTE = ("threads", "the limits of its own parent")
"""Attacks after which their slot runs no further command."""


@functools.cache
def _program(attack: str) -> str:
    body = ATTACKS[attack]
    lines = [line[8:] if line.startswith(" " * 8) else line for line in body.split("\n")]
    return PRELUDE + "\n".join(lines) + "\nsay(1)\ntime.sleep(600)\n"
