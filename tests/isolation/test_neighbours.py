"""What a slot can do to its neighbours, to the guest and to its own end by way of the kernel: issue 12's attacks."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.isolation.kernel import KERNEL

HELPERS = (
    KERNEL
    + """
def say(*what):
    with open("said.new", "w") as file:
        json.dump(what, file)
    os.rename("said.new", "said")
"""
)


def hold(driver: Any, slot: str, program: str, *arguments: object, limit_s: float = 60.0) -> Any:
    """Run an attack in the background until it has `say`d something; what it said."""
    driver.run(slot, "rm -f said")
    driver.call("start", slot=slot, command=["python3", "-I", "-S", "-c", HELPERS + program, *map(str, arguments)])
    return json.loads(driver.until(slot, "cat said", limit_s=limit_s))


@pytest.fixture
def attacked(shared: Any) -> Any:
    """Slots `a`, which attacks, and `b`, which shall not notice; both are reset afterwards, and that has to work."""
    driver = shared(orphan_ttl_s=60)
    yield driver
    for slot in ("a", "b"):
        driver.reset(slot)
    assert driver.call("healthy") == 1


FLOODS = pytest.mark.root
"""Takes all descriptors that an account may have on their way. Without root that is the account of all other tests."""

IN_FLIGHT = """
fds = array.array("i", [0] * 253)
count, pairs, error = 0, [], ""
try:
    while count < 30000:
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        try:
            while count < 30000:
                pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                count += len(fds)
        except BlockingIOError:
            pass
except OSError as caught:
    error = errno.errorcode[caught.errno]
say(count, error)
time.sleep(600)
"""


@FLOODS
def test_descriptors_in_flight_do_not_stop_the_neighbour(attacked: Any) -> None:
    count, error = hold(attacked, "a", IN_FLIGHT)
    assert error == "ETOOMANYREFS" and count < 5_000
    for slot in ("a", "b"):
        assert attacked.run(slot, "cat", stdin="works").out == "works"
        assert attacked.run(slot, "# " + 200_000 * "x" + "\necho works").out == "works\n"


AT_ONCE = """
fds = array.array("i", [0] * 253)
readers, senders = [], []
for number in range(350):
    sender, reader = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    reader.bind(str(number))
    sender.connect(str(number))
    sender.setblocking(False)
    try:
        while True:
            sender.send(b"x")
    except BlockingIOError:
        sender.setblocking(True)
    if os.fork() == 0:
        try:
            sender.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            open("sent%d" % number, "x").close()
        finally:
            time.sleep(600)
    readers.append(reader)
time.sleep(1)
for reader in readers:
    reader.recv(1)
time.sleep(1)
say(sum(name.startswith("sent") for name in os.listdir(".")))
time.sleep(600)
"""


@pytest.mark.full
@FLOODS
def test_descriptors_that_were_let_through_at_once_do_not_stop_the_neighbour(attacked: Any) -> None:
    """The limit is looked at before a sender waits for room: so many more than it allows can be on their way."""
    [senders] = hold(attacked, "a", AT_ONCE)
    assert senders > 100
    assert attacked.run("b", "cat", stdin="works").out == "works"
    assert attacked.run("b", "# " + 200_000 * "x" + "\necho works").out == "works\n"
    attacked.call("write", slot="b", path="file", text="text")
    assert attacked.call("read", slot="b", path="file") == "text"


LEASES = """
done = {}
for path in sys.argv[1:]:
    with open(path) as file:
        done[path] = [outcome(fcntl.fcntl, file, 1024, kind) for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK)]
print(json.dumps([done, fcntl.fcntl(0, fcntl.F_GETFD)]))
"""


def test_no_lease_can_be_had_on_a_file(attacked: Any) -> None:
    shared = attacked.call("prepare", slot="a", key="leased", command="echo text >file", private=False)
    attacked.run("a", "echo own >own")
    leases, flags = attacked.python("a", HELPERS + LEASES, f"{shared}/file", "own", "/bin/sh")
    assert {result for each in leases.values() for result in each} == {"EINVAL"} and flags == 0
    assert attacked.run("b", f"cat {shared}/file", timeout_s=5).out == "text\n"


REFUSED = """
user, net = 0x10000000, 0x40000000
numbers = {"x86_64": {"bpf": 321, "fanotify_init": 300, "io_setup": 206, "perf_event_open": 298, "userfaultfd": 323,
    "clone": 56, "syslog": 103}, "aarch64": {"bpf": 280, "fanotify_init": 262, "io_setup": 0, "perf_event_open": 241,
    "userfaultfd": 282, "clone": 220, "syslog": 116}}[os.uname().machine]
numbers.update(io_uring_setup=425, io_uring_enter=426, io_uring_register=427, clone3=435)
done = {name: outcome(syscall, number, 1, 0, 0, 0, 0) for name, number in numbers.items() if name != "clone"}
for flags in (user, user | net, net, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x80):
    done["unshare %x" % flags] = outcome(lambda: check(libc.unshare(flags)))
    if flags != 0x80:
        done["clone %x" % flags] = outcome(syscall, numbers["clone"], flags | 17, 0, 0, 0, 0)
done["setns"] = outcome(lambda: check(libc.setns(os.open("/proc/self/ns/user", os.O_RDONLY), 0)))
families = [number for number in range(1, 46) if outcome(socket.socket, number, 2) != "EAFNOSUPPORT"]
netlink = [number for number in range(23) if outcome(socket.socket, 16, 3, number) == "ok"]
pairs = [number for number in range(1, 46) if outcome(socket.socketpair, number, 1) == "ok"]
print(json.dumps([done, families, netlink, pairs]))
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="other numbers")
def test_what_slots_have_no_need_of_is_refused(pair: Any) -> None:
    done, families, netlink, pairs = pair.python("a", HELPERS + REFUSED)
    assert {name for name, result in done.items() if result not in ("EPERM", "ENOSYS")} == set()
    assert (families, netlink, pairs) == ([1, 2, 10, 16], [0], [1])


SLOW_TO_DIE = """
uid, gid = os.getuid(), os.getgid()
sockets = []
try:
    check(libc.unshare(0x50000000))
    for path, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % uid), ("gid_map", "0 %d 1" % gid)):
        with open("/proc/self/" + path, "w") as file:
            file.write(text)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for _ in range(4000):
        sockets.append(socket.socket(17, 3, 0x0300))
except OSError:
    pass
say(len(sockets))
time.sleep(600)
"""


def test_packet_sockets_can_not_make_a_slot_die_slowly(attacked: Any) -> None:
    assert hold(attacked, "a", SLOW_TO_DIE) == [0]
    attacked.call("kill", slot="a")
    assert attacked.run("a", "echo again").out == "again\n"


INOTIFY = """
import ctypes.util
made = []
while len(made) < 2000:
    fd = libc.inotify_init()
    if fd < 0:
        break
    made.append(fd)
say(len(made))
time.sleep(600)
"""


def test_inotify_instances_are_shared_out(attacked: Any) -> None:
    [count] = hold(attacked, "a", INOTIFY)
    assert 0 < count < 1000
    assert attacked.python("b", HELPERS + "print(json.dumps(libc.inotify_init() >= 0))")


TERMINALS = """
made = []
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
try:
    while len(made) < 4000:
        made.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    pass
say(len(made))
time.sleep(600)
"""


def test_a_slot_can_not_have_all_of_the_hosts_terminals(attacked: Any) -> None:
    [count] = hold(attacked, "a", TERMINALS)
    assert count <= (1024 if attacked.granted == "user" else 64)
    if attacked.granted == "namespace":
        assert attacked.python("b", HELPERS + "print(json.dumps(outcome(os.openpty)))") == "ok"
    os.close(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))


FILES_IN_MEMORY = """
count = 0
try:
    while count < 1000000:
        open("/dev/shm/%d" % count, "w").close()
        count += 1
except OSError:
    pass
print(count)
"""


@pytest.mark.full  # makes 600,000 files
def test_empty_files_in_memory_are_bounded_too(attacked: Any) -> None:
    count = int(attacked.run("a", ["python3", "-I", "-S", "-c", FILES_IN_MEMORY], timeout_s=60).out)
    assert count <= (600_000 if attacked.granted == "user" else 40_000)


OOM = """
done = {}
for value in ("-1000", "0", "999"):
    done[value] = outcome(lambda: open("/proc/self/oom_score_adj", "w").write(value) and None)
with open("/proc/self/oom_score_adj") as file:
    print(json.dumps([done, int(file.read())]))
"""


def test_a_slot_can_not_make_itself_the_last_to_be_killed(pair: Any) -> None:
    """Also without CAP_SYS_RESOURCE, with which the kernel itself would see to it."""
    done, score = pair.python("a", HELPERS + OOM)
    assert "ok" not in done.values() and score == 1000


LIMITS = """
names = ("NOFILE", "SIGPENDING", "MSGQUEUE")
print(json.dumps({name: resource.getrlimit(getattr(resource, "RLIMIT_" + name, 12))[1] for name in names}))
"""


def test_a_slots_part_of_what_is_counted_by_user(pair: Any) -> None:
    limits = pair.python("a", HELPERS + LIMITS)
    assert limits["NOFILE"] <= 4096 and limits["SIGPENDING"] <= 4096
    if pair.account.uid != 0:
        assert limits["MSGQUEUE"] <= 819_200 // 8


ALARMS = """
made, timer = 0, ctypes.c_void_p()
while made < 200000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    made += 1
say(made)
time.sleep(600)
"""


def test_waiting_signals_and_timers_are_shared_out(attacked: Any) -> None:
    [count] = hold(attacked, "a", ALARMS)
    assert count <= 4096
    program = "timer = ctypes.c_void_p(); print(json.dumps(libc.timer_create(1, None, ctypes.byref(timer))))"
    assert attacked.python("b", HELPERS + program) == 0


# --- leftovers ------------------------------------------------------------------------------------------------------

OPENED = {
    "by an access list": "mkdir -m 700 {0} && setfacl -m u:{1}:rwx {0}",
    "by a default access list": "mkdir -m 700 {0} {0}/in && setfacl -R -m u:{1}:rwx -d -m u:{1}:rwx {0}",
    "and closed again": "mkdir -m 777 {0}",
    "deep below a closed one": "mkdir -m 711 {0} && mkdir -m 777 {0}/deep",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("how", OPENED)
def test_no_leftover_in_a_neighbours_directory(root: Any, how: str) -> None:
    with root.started("user", "a", "b") as driver:
        uid = driver.run("a", "id -u").out.strip()
        made = driver.run("b", OPENED[how].format("/tmp/theirs", uid))
        if "setfacl" in made.err:
            pytest.skip("no setfacl here")
        place = "/tmp/theirs/deep" if "deep" in how else "/tmp/theirs"
        assert driver.run("a", f"mkdir {place}/d && echo x >{place}/d/f && echo x >{place}/f").status == 0
        driver.run("b", "echo mine >/tmp/theirs/mine; chmod 700 /tmp/theirs")
        driver.reset("a")
        found = driver.run("b", f"find /tmp -user {uid}; cat /tmp/theirs/mine").out
        assert found == "mine\n"


def test_no_leftover_in_a_workspace_that_its_slot_has_opened(root: Any) -> None:
    with root.started("user", "a", "b") as driver:
        uid = driver.run("a", "id -u").out.strip()
        place = driver.workspace("b")
        driver.run("b", "chmod 777 . && echo mine >mine")
        assert driver.run("a", f"echo x >{place}/f").status == 0
        driver.reset("a")
        assert driver.run("b", f"find . -user {uid}; cat mine").out == "mine\n"


@pytest.mark.full
def test_no_leftover_where_the_group_may_write(root: Any) -> None:
    with root.started("user", "a", "b") as driver:
        uid = driver.run("a", "id -u").out.strip()
        driver.run("a", "mkdir -m 2777 /tmp/ours")
        driver.run("b", "umask 002; mkdir /tmp/ours/theirs; echo mine >/tmp/ours/theirs/mine")
        assert driver.run("a", "echo x >/tmp/ours/theirs/f").status == 0
        driver.reset("a")
        assert driver.run("b", f"find /tmp -user {uid}; cat /tmp/ours/theirs/mine").out == "mine\n"


@pytest.mark.full
def test_a_directory_that_becomes_roots_keeps_no_access_list(root: Any) -> None:
    with root.started("user", "a", "b") as driver:
        made = driver.run("a", "mkdir -m 777 /tmp/ours && setfacl -m u:$(id -u):rwx -d -m u:$(id -u):rwx /tmp/ours")
        if "setfacl" in made.err:
            pytest.skip("no setfacl here")
        driver.run("b", "echo mine >/tmp/ours/mine")
        driver.reset("a")
        driver.run("b", "umask 077; echo secret >/tmp/ours/secret")
        assert driver.run("a", "cat /tmp/ours/secret").out == ""


# --- what has to go on working --------------------------------------------------------------------------------------

WORK = {
    "git": "git init -q && echo x >f && git add f && git commit -qm x && git gc -q && git log --oneline | wc -l",
    "a pool of processes": "python3 -c 'import multiprocessing as m; print(sum(m.Pool(2).map(abs, [1, -2])))'",
    "asyncio": "python3 -c 'import asyncio; asyncio.run(asyncio.create_subprocess_exec(\"true\"))' && echo 3",
    "sqlite": 'python3 -c \'import sqlite3; print(sqlite3.connect("d").execute("select 3").fetchone()[0])\'',
    "a terminal": 'python3 -c \'import pty, os; pty.spawn(["echo", "3"])\'',
    "a server": "python3 -m http.server -b 127.0.0.1 8765 >/dev/null 2>&1 & for i in $(seq 100); do "
    "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8765\")' 2>/dev/null && break; done; echo 3",
    "names": "python3 -c 'import socket; print(1 + 2 * bool(socket.getaddrinfo(\"localhost\", 80)))'",
    "threads": "python3 -c 'import threading as t; w = t.Thread(target=print, args=[3]); w.start(); w.join()'",
}


@pytest.mark.parametrize("what", WORK)
def test_ordinary_work_goes_on(pair: Any, what: str) -> None:
    ran = pair.run("a", f"mkdir work && (cd work && {WORK[what]}); rm -rf work", timeout_s=60)
    assert ran.out.strip().split("\n")[-1] in ("1", "3"), ran
    pair.call("kill", slot="a")
