"""What root of a slot tries, to get further than its own root: programs that print as JSON what has worked."""

from __future__ import annotations

from tests.isolation.kernel import KERNEL

_HELPERS = (
    KERNEL
    + """
def mount(source, target, kind, flags=0, data=None):
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))
def got(attempts):
    done = {name: outcome(*attempt) for name, attempt in attempts.items()}
    print(json.dumps({name: result for name, result in done.items() if result == "ok"}))
"""
)

LOW_PORT = _HELPERS + "got({'80': (lambda: socket.create_server(('127.0.0.1', 80)),)})"

ATTACKS = {
    "mounts": _HELPERS
    + """
def climb():
    os.makedirs("/tmp/place", exist_ok=True)
    top = os.open("/", os.O_RDONLY)
    os.chroot("/tmp/place")
    os.fchdir(top)
    for _ in range(60):
        os.chdir("..")
    os.chroot(".")
    if os.path.exists("/data/.hermes") or set(os.listdir("/")) != before:
        raise SystemExit("out")
    raise OSError(errno.EPERM, "no further than before")
before = set(os.listdir("/"))
umount = lambda path: check(libc.umount2(path, 2))
pivot = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
got({
    "tmpfs": (mount, "tmpfs", "/mnt", "tmpfs"),
    "bind": (mount, "/usr", "/mnt", None, 0x1000),
    "remount": (mount, None, "/", None, 0x1020),
    "writable proc": (mount, None, "/proc", None, 0x1020),
    "proc": (mount, "proc", "/mnt", "proc"),
    "sysfs": (mount, "sysfs", "/mnt", "sysfs"),
    "cgroup": (mount, "cgroup", "/mnt", "cgroup", 0, "pids"),
    "cgroup2": (mount, "cgroup", "/mnt", "cgroup2"),
    "debugfs": (mount, "debugfs", "/mnt", "debugfs"),
    "disk": (mount, "/dev/vda", "/mnt", "ext4"),
    "overlay": (mount, "overlay", "/mnt", "overlay", 0, "lowerdir=/usr:/etc"),
    "move": (mount, "/proc", "/mnt", None, 8192),
    "private": (mount, None, "/", None, 0x44000),
    "umount /": (umount, b"/"),
    "umount proc": (umount, b"/proc"),
    "umount null": (umount, b"/proc/keys"),
    "umount workspace": (umount, os.getcwd().encode()),
    "pivot_root": (syscall, pivot, b"/", b"/tmp"),
    "fsopen": (syscall, 430, b"tmpfs", 0),
    "open_tree": (syscall, 428, -100, b"/", 1),
    "mount_setattr": (syscall, 442, -100, b"/", 0, struct.pack("QQQQ", 0, 1, 0, 0), 32),
    "chroot": (climb,),
})
""",
    "namespaces": _HELPERS
    + """
def namespaces_of(pid, name):
    descriptor = os.open("/proc/%d/ns/%s" % (pid, name), os.O_RDONLY)
    check(libc.setns(descriptor, 0))
attempts = {}
for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"):
    for pid in (1, os.getpid()):
        attempts["setns %s of %d" % (name, pid)] = (namespaces_of, pid, name)
for name, flag in (("user", 0x10000000), ("mnt", 0x20000), ("pid", 0x20000000), ("net", 0x40000000),
                   ("cgroup", 0x2000000), ("ipc", 0x8000000), ("uts", 0x4000000), ("time", 0x80)):
    attempts["unshare " + name] = (lambda flag: check(libc.unshare(flag)), flag)
attempts["clone3"] = (syscall, 435, struct.pack("Q10Q", 0x10000000, *10 * [0]), 88)
attempts["hostname"] = (socket.sethostname, "other")
attempts["ids"] = (write, "/proc/self/uid_map", "0 0 1")
got(attempts)
""",
    "kernel": _HELPERS
    + """
numbers = {"x86_64": dict(init_module=175, finit=313, delete=176, kexec=246, iopl=172, ioperm=173, swapon=167,
    reboot=169, settime=164, acct=163, quotactl=179, syslog=103,
    add_key=248, request_key=249, keyctl=250, bpf=321, perf=298,
    userfault=323, fanotify=300, by_handle=304, io_uring=425, settimeofday=164, lookup_dcookie=212)}
numbers = numbers.get(os.uname().machine, {})
attempts = {name: (syscall, number, 0, 0, 0, 0) for name, number in numbers.items() if name != "keyctl"}
handle = struct.pack("Ii", 8, 1) + struct.pack("II", 2, 0)  # of the inode of an ext4's root
attempts["by_handle"] = (syscall, numbers.get("by_handle", -1), os.open("/", os.O_RDONLY), handle, 0)
attempts["raised limit"] = (lambda: check(libc.prlimit(0, 7, struct.pack("QQ", 1 << 20, 1 << 20), None)),)
attempts["nice"] = (os.setpriority, os.PRIO_PROCESS, 0, -10)
attempts["realtime"] = (os.sched_setscheduler, 0, 1, os.sched_param(1))
attempts["immutable"] = (lambda: fcntl.ioctl(os.open("f", os.O_RDWR | os.O_CREAT), 0x40086602, struct.pack("l", 0x10)),)
attempts["trusted"] = (os.setxattr, "/tmp", "trusted.overlay.opaque", b"y")
attempts["capability"] = (os.setxattr, "f", "security.capability", struct.pack("<IIIII", 0x2000001, 1 << 21, 0, 0, 0))
for kind, number in (("character", 0o20666), ("block", 0o60666)):
    for major, minor in ((1, 1), (254, 0), (10, 229), (5, 1)):
        attempts["%s device %d:%d" % (kind, major, minor)] = (
            os.mknod, "/tmp/%s-%d-%d" % (kind, major, minor), number, os.makedev(major, minor))
for family in (17, 40, 38, 15, 44):
    for kind in (1, 2, 3):
        attempts["socket %d %d" % (family, kind)] = (socket.socket, family, kind)
attempts["raw"] = (socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
attempts["netlink"] = (socket.socket, 16, 3, 9)
got(attempts)
""",
    "parent": _HELPERS
    + """
vectors = struct.pack("PLPL", 4096, 8, 4096, 8)
def read(name):
    return open("/proc/1/" + name, "rb").read(1)
attempts = {name: (read, name) for name in ("environ", "mem", "maps", "auxv", "stack", "syscall", "io")}
attempts["ptrace"] = (lambda: check(libc.ptrace(0x4206, 1, None, None)),)
attempts["root"] = (os.listdir, "/proc/1/root/")
attempts["cwd"] = (os.listdir, "/proc/1/cwd/")
attempts["memory"] = (lambda: check(libc.process_vm_readv(1, vectors, 1, vectors, 1, 0)),)
attempts["kcmp"] = (syscall, 312, 1, os.getpid(), 0, 0, 0)
for number in range(150):
    attempts["fd %d" % number] = (os.readlink, "/proc/1/fd/%d" % number)
try:
    handle = syscall(434, 1, 0)
    for number in (0, 3, 9, *range(98, 110)):
        attempts["take %d" % number] = (syscall, 438, handle, number, 0)
except OSError:
    pass
got(attempts)
""",
}
"""By what they try to reach. None of them works."""

SETTINGS = (
    _HELPERS
    + """
found = []
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
            found.append(os.path.join(folder, name))
        except OSError:
            pass
for path in ("/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/proc/1/oom_score_adj", "/proc/self/uid_map",
             "/proc/self/setgroups", "/proc/irq/default_smp_affinity", "/proc/self/attr/current", "/proc/1/clear_refs"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        found.append(path)
    except OSError:
        pass
shown = [path for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg", "/proc/vmallocinfo")
         if os.path.exists(path) and outcome(lambda: open(path, "rb").read(1)) == "ok" and open(path, "rb").read(1)]
print(json.dumps([[path for path in found if not path.startswith("/proc/sysrq") or os.stat(path).st_rdev == 0], shown,
                  os.path.exists("/sys/fs/cgroup") or os.path.exists("/sys/kernel")]))
"""
)
"""Prints the settings of the kernel that can be written, what it tells of the machine, and whether /sys is there."""
