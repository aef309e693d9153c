"""What a slot's commands may ask of the kernel: no privilege, none to be gained, and no way around their namespaces."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.isolation.kernel import KERNEL

HELPERS = (
    KERNEL
    + """
def mount(source, target, kind, flags=0, data=None):
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))
def unshare(flags):
    check(libc.unshare(flags))
NEWNS, NEWCGROUP, NEWUSER, NEWPID, NEWNET = 0x20000, 0x2000000, 0x10000000, 0x20000000, 0x40000000
def become_root_of_a_user_namespace(flags):
    uid, gid = os.getuid(), os.getgid()
    unshare(NEWUSER | flags)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", "0 %d 1" % uid)
    write("/proc/self/gid_map", "0 %d 1" % gid)
"""
)
KEYS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}.get(os.uname().machine)


@pytest.mark.parametrize("slot", ["a", "preparation"])
def test_no_capability_and_none_to_be_gained(pair: Any, slot: str) -> None:
    status = dict(line.split(":\t") for line in pair.run(slot, "cat /proc/self/status").out.strip().split("\n"))
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    # An ordinary user can't leave groups: whoever logs in with its own as a further one keeps that.
    assert {*status["Groups"].split()} <= {status["Gid"].split()[0]}
    assert len(set(status["Uid"].split())) == 1 and status["Uid"].split()[0] != "0"


def test_every_user_is_another(pair: Any) -> None:
    users = [pair.run(slot, "id -u").out for slot in ("a", "b", "preparation")]
    assert len(set(users)) == (3 if pair.account.uid == 0 else 1)  # an ordinary user has no other


def test_no_mount_has_setuid_programs_or_devices(pair: Any) -> None:
    mounts = [line.split() for line in pair.run("a", "cat /proc/self/mountinfo").out.strip().split("\n")]
    assert len(mounts) > 8
    for fields in mounts:
        target, options = fields[4], set(fields[5].split(","))
        assert "nosuid" in options
        assert "nodev" in options or target.startswith("/dev/")
        writable = ("/data", "/tmp", "/var/tmp", "/dev", "/proc")
        assert "ro" in options or target.startswith(writable), target


def test_a_setuid_program_of_a_slot_is_inert(root: Any) -> None:
    driver = root.shared("user")
    driver.run("b", "cp $(command -v id) /tmp/setuid-id && chmod 6755 /tmp/setuid-id")
    assert driver.run("a", "/tmp/setuid-id -u").out == driver.run("a", "id -u").out
    driver.run("b", "rm /tmp/setuid-id")


def test_a_slot_can_not_mount_or_join_or_make_devices(pair: Any) -> None:
    program = (
        HELPERS
        + """
done = {
    "mount": outcome(mount, "tmpfs", "/tmp", "tmpfs"),
    "bind": outcome(mount, "/usr", "/tmp", None, 0x1000),
    "remount": outcome(mount, None, "/usr", None, 0x1020),
    "umount": outcome(lambda: check(libc.umount2(b"/usr", 2))),
    "unshare": outcome(unshare, NEWNS),
    "setns": outcome(lambda: check(libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0))),
    "chroot": outcome(os.chroot, "/usr"),
    "mknod": outcome(os.mknod, "device", 0o20666, os.makedev(1, 1)),
    "sethostname": outcome(socket.sethostname, "other"),
    "setuid": outcome(os.setuid, 0),
    "setgroups": outcome(os.setgroups, [0]),
    "reboot": outcome(lambda: check(libc.reboot(0))),
    "nice": outcome(os.setpriority, os.PRIO_PROCESS, 0, -5),
}
print(json.dumps({name: result for name, result in done.items() if result == "ok"}))
"""
    )
    assert pair.python("a", program) == {}


def test_a_user_namespace_of_its_own_gives_nothing_new(pair: Any) -> None:
    """Where the host lets ordinary users make one: in it, a slot has every capability, over nothing but itself."""
    program = (
        HELPERS
        + """
parent = os.getppid()
if outcome(become_root_of_a_user_namespace, NEWNS | NEWNET) != "ok":
    print("{}")
    sys.exit()
os.makedirs("place", exist_ok=True)
def chroot_and_climb():
    root = os.open("/", os.O_RDONLY)
    os.chroot("place")
    os.fchdir(root)
    for _ in range(50):
        os.chdir("..")
    os.chroot(".")
    if set(os.listdir("/")) != before:
        raise SystemExit("out")
    raise OSError(errno.EPERM, "no further than before")
before = set(os.listdir("/"))
done = {
    "remount": outcome(mount, None, "/usr", None, 0x1020),
    "remount of the file system": outcome(mount, None, "/usr", None, 0x20),
    "umount": outcome(lambda: check(libc.umount2(b"/usr", 2))),
    "write to /usr": outcome(write, "/usr/x", ""),
    "write to what is prepared": outcome(write, "/data/prepared/shared/x", ""),
    "proc": outcome(mount, "proc", "place", "proc"),
    "sysfs": outcome(mount, "sysfs", "place", "sysfs"),
    "cgroup": outcome(mount, "cgroup", "place", "cgroup2"),
    "debugfs": outcome(mount, "debugfs", "place", "debugfs"),
    "device": outcome(os.mknod, "device", 0o20666, os.makedev(1, 1)),
    "setns": outcome(lambda: check(libc.setns(os.open("/proc/%d/ns/mnt" % parent, os.O_RDONLY), 0))),
    "parent's root": outcome(os.listdir, "/proc/%d/root/" % parent),
    "parent's memory": outcome(lambda: open("/proc/%d/mem" % parent, "rb")),
    "ptrace": outcome(lambda: check(libc.ptrace(0x4206, parent, None, None))),
    "neighbour": outcome(os.listdir, sys.argv[1]),
    "guest": outcome(os.listdir, "/data/.hermes"),
    "core_pattern": outcome(write, "/proc/sys/kernel/core_pattern", "core"),
    "chroot": outcome(chroot_and_climb),
}
print(json.dumps({name: result for name, result in done.items() if result == "ok"}))
"""
    )
    assert pair.python("a", program, pair.workspace("b")) == {}


def test_an_ordinary_users_slot_can_not_get_at_the_cgroup(ordinary: Any) -> None:
    """In a desktop session the cgroup is the user's own: to kill it would be to kill the driver."""
    program = (
        HELPERS
        + """
print(json.dumps([outcome(become_root_of_a_user_namespace, NEWNS), outcome(unshare, NEWCGROUP),
    outcome(write, "/proc/sys/user/max_cgroup_namespaces", "9"), outcome(unshare, NEWUSER | NEWCGROUP),
    os.path.exists("/sys/fs/cgroup")]))
"""
    )
    made, *tried, shown = ordinary.shared("user").python("a", program)
    assert made in ("ok", "ENOSPC", "EPERM")
    assert not {"ok"} & {tried[0], tried[2]} and not shown


def test_kernel_settings_can_not_be_written(pair: Any) -> None:
    program = (
        HELPERS
        + """
names = ["core_pattern", "shmmni", "msgmni", "modprobe", "hostname", "sysrq", "randomize_va_space", "hotplug"]
paths = ["/proc/sys/kernel/" + name for name in names] + ["/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
    "/proc/sys/fs/protected_symlinks", "/proc/sys/user/max_user_namespaces", "/proc/sys/fs/mqueue/queues_max"]
print(json.dumps([path for path in paths if outcome(lambda: os.close(os.open(path, os.O_WRONLY))) == "ok"]))
"""
    )
    assert pair.python("a", program) == []
    assert pair.run("a", "ls -d /sys /run /boot /home /mnt /srv /var/run 2>/dev/null").out == ""
    names = set(pair.run("a", "ls /dev").out.split())
    nodes = {"null", "zero", "full", "random", "urandom", "tty"}
    assert names <= nodes | {"fd", "stdin", "stdout", "stderr", "ptmx", "pts", "shm"}


@pytest.mark.skipif(KEYS is None, reason="the numbers of these system calls are not known here")
def test_keyrings_are_out_of_reach(pair: Any) -> None:
    """They know no namespace: what the driver's login and user keep there could be taken."""
    keyrings = pair.facts["keys"]
    program = (
        HELPERS
        + """
add, request, control = json.loads(sys.argv[1])
done = [outcome(syscall, add, b"user", b"name", b"data", 4, keyring) for keyring in (-2, -3, -4, -5)]
done += [outcome(syscall, request, b"user", b"drivers-key", 0, -2)]
for keyring in json.loads(sys.argv[2]):
    done.append(outcome(syscall, control, 10, keyring, b"user", b"drivers-key", 0))
    done.append(outcome(syscall, control, 8, keyring, -2))
print(json.dumps(done))
"""
    )
    assert set(pair.python("a", program, json.dumps(KEYS), json.dumps([-3, -4, *keyrings]))) == {"ENOSYS"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have no such second door")
def test_keyrings_are_out_of_reach_of_32_bit_programs(pair: Any) -> None:
    program = (
        HELPERS
        + """
def call(number, first):
    words = struct.pack("<I", number), struct.pack("<i", first), struct.pack("<I", 1)
    code = b"\\x53\\xb8%b\\xbb%b\\xb9%b\\xcd\\x80\\x5b\\xc3" % words
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    result = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
    return errno.errorcode[-result] if result < 0 else "ok"
if os.fork() == 0:
    os._exit(0 if call(20, 0) == "ok" else 1)  # getpid; without support for them, SIGSEGV
if os.wait()[1] != 0:
    print("[]")
else:
    print(json.dumps([call(286, 0), call(288, 0), call(102, 1), call(359, 40)]))
"""
    )
    assert pair.python("a", program) in ([], ["ENOSYS", "ENOSYS", "ENOSYS", "EAFNOSUPPORT"])


def test_sockets_to_a_hypervisor_are_refused(pair: Any) -> None:
    program = HELPERS + "print(json.dumps([outcome(socket.socket, 40, kind) for kind in (1, 2)]))"
    assert pair.python("a", program) == ["EAFNOSUPPORT", "EAFNOSUPPORT"]
    assert pair.python("a", HELPERS + "print(json.dumps(outcome(socket.socket)))") == "ok"


def test_the_slots_parent_is_out_of_reach(pair: Any) -> None:
    """It is a copy of the guest, which has seen every slot's data; with its socket a slot could forge results."""
    program = (
        HELPERS
        + """
parent = os.getppid()
def read(name):
    return open("/proc/%d/%s" % (parent, name), "rb").read(1)
done = {name: outcome(read, name) for name in ("environ", "mem", "maps")}
done["ptrace"] = outcome(lambda: check(libc.ptrace(0x4206, parent, None, None)))
done["fds"] = sorted({outcome(os.readlink, "/proc/%d/fd/%d" % (parent, number)) for number in range(150)})
vectors = struct.pack("PLPL", 4096, 8, 4096, 8)
done["read"] = outcome(lambda: check(libc.process_vm_readv(parent, vectors, 1, vectors, 1, 0)))
try:
    handle = syscall(434, parent, 0)
    done["take"] = sorted({outcome(syscall, 438, handle, number, 0) for number in (0, 3, 9, *range(98, 105))})
except OSError:  # no pidfd_open
    pass
print(json.dumps(done))
"""
    )
    done = pair.python("a", program)
    refused = {"EPERM", "EACCES", "ENOENT", "ESRCH", "ENOSYS"}
    assert {each for value in done.values() for each in ([value] if isinstance(value, str) else value)} <= refused, done


def test_commands_inherit_no_descriptor(pair: Any) -> None:
    listing = "n=0; while [ $n -lt 255 ]; do [ -e /proc/$$/fd/$n ] && echo $n; n=$((n + 1)); done"
    for script in (listing, "# " + 200_000 * "x" + "\n" + listing):
        assert pair.run("a", script).out.split() == ["0", "1", "2"]
    program = "import json, os; print(json.dumps(sorted(os.listdir('/proc/self/fd'))))"
    assert pair.python("a", program) == ["0", "1", "2", "3"]  # the last is the listing's own


def test_no_signal_leaves_the_slot(pair: Any) -> None:
    program = (
        HELPERS
        + """
ours = {os.getpid(), os.getppid(), 0}
print(json.dumps([pid for pid in range(1, 400) if pid not in ours and outcome(os.kill, pid, 0) == "ok"]))
"""
    )
    assert pair.python("a", program) == []


def test_system_v_ipc_is_off_or_ones_own(pair: Any) -> None:
    program = """if 1:
        import ctypes, json, sys
        libc, key = ctypes.CDLL(None), int(sys.argv[1])
        print(json.dumps([call >= 0 for call in (
            libc.shmget(key, 4096, 0o1666), libc.msgget(key, 0o1666), libc.semget(key, 1, 0o1666))]))"""
    there = """if 1:
        import ctypes, json, sys
        libc, key = ctypes.CDLL(None), int(sys.argv[1])
        print(json.dumps([libc.shmget(key, 0, 0) >= 0, libc.msgget(key, 0) >= 0, libc.semget(key, 0, 0) >= 0]))"""
    made = pair.python("b", program, 4711)
    assert made == [False] * 3 if pair.granted == "user" else made == [True] * 3
    assert pair.python("a", there, 4711) == [False] * 3


def test_at_namespace_there_is_loopback_only(drivers: Any) -> None:
    program = "import json, socket; print(json.dumps([name for _, name in socket.if_nameindex()]))"
    driver = drivers.shared("namespace")
    assert driver.python("a", program) == ["lo"]
    assert driver.python("preparation", program) != ["lo"]  # an installer needs the sandbox's


def test_network_none_is_none_at_any_level(drivers: Any) -> None:
    program = "import json, socket; print(json.dumps([name for _, name in socket.if_nameindex()]))"
    with drivers.started("user", "a", network="none") as driver:
        for slot in ("a", "preparation"):
            assert driver.python(slot, program) == ["lo"]
