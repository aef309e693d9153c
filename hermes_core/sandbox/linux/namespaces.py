"""Linux namespaces by raw system calls: making and joining them, and giving up privileges inside.

The guest runs it too: Python >= 3.7, few and light imports of the standard library. Each failed call raises an OSError
that names the call. Never call these functions in a process that has threads.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

TYPE_CHECKING = False  # `collections` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_FLAGS = {  # in the order for joining: the user namespace comes first, as it gives the right to join the others
    "user": 0x10000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 2, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 38, 47
SYS_PTRACE = 19
"""The capability to inspect processes, also those that are not dumpable."""
ROOT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18)
"""The capabilities of a slot's root in its user namespace: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID,
SETPCAP, NET_BIND_SERVICE and SYS_CHROOT."""
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_NO_SYSV_IPC = {"kernel/shmmni": "0", "kernel/msgmni": "0", "kernel/sem": "0 0 0 0", "fs/mqueue/queues_max": "0"}

libc = ctypes.CDLL(None, use_errno=True)
"""The C library. `check` turns failures of its functions into OSError."""


def check(result: int, call: str) -> int:
    """Return the result of a function of the C library. Raises OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (call, os.strerror(number)))
    return result


def _prctl(option: int, argument: int, call: str, second: int = 0) -> int:
    words = [ctypes.c_ulong(value) for value in (argument, second, 0, 0)]
    return check(libc.prctl(option, *words), "prctl " + call)


def death_signal(number: int) -> None:
    """Make the kernel send this signal to the calling process when its parent dies. 0 is no signal."""
    _prctl(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")


def forbid_inspection() -> None:
    """Keep other processes without capabilities in our own user namespace from our memory, descriptors and program."""
    _prctl(_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")


# --- entering namespaces -------------------------------------------------------------------------------------------


def unshare(
    *,
    user: bool = False,
    mount: bool = False,
    pid: bool = False,
    ipc: bool = False,
    net: bool = False,
    uts: bool = False,
    inside_uid: int = 0,
    inside_gid: int = 0,
) -> None:
    """Move this process into new namespaces. A new pid namespace begins with its next child.

    With `user`, the new user namespace has one user and one group: `inside_uid` and `inside_gid`. Outside, these are
    the caller's user and group.
    """
    selected = {"user": user, "mnt": mount, "pid": pid, "ipc": ipc, "net": net, "uts": uts}
    names = [name for name in _FLAGS if selected[name]]
    uid, gid = os.geteuid(), os.getegid()
    flags = 0
    for name in names:
        flags |= _FLAGS[name]
    check(libc.unshare(flags), "unshare " + "+".join(names))
    if user:
        _write("/proc/self/setgroups", "deny")  # otherwise the kernel lets no unprivileged process write gid_map
        _write("/proc/self/uid_map", "%d %d 1" % (inside_uid, uid))
        _write("/proc/self/gid_map", "%d %d 1" % (inside_gid, gid))


def write_id_maps(pid: int, lines: str) -> None:
    """Write the id maps of a process's new user namespace, the same for users and groups.

    Args:
        lines: each holds the first id inside, the first id outside, and the number of ids.
    """
    for name in ("uid_map", "gid_map"):
        _write("/proc/%d/%s" % (pid, name), lines)


def user_namespace(lines: str) -> int:
    """Return a descriptor of a new user namespace with these ids and without processes."""
    ready, made = os.pipe2(os.O_CLOEXEC)
    leave, stay = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(stay)
            check(libc.unshare(_FLAGS["user"]), "unshare user")
            os.write(made, b"x")
            os.read(leave, 1)
        finally:
            os._exit(0)
    try:
        os.close(made)
        if not os.read(ready, 1):
            raise OSError(errno.EPERM, "unshare user: it is not permitted")
        write_id_maps(pid, lines)
        return os.open("/proc/%d/ns/user" % pid, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (ready, leave, stay):
            os.close(descriptor)
        os.waitpid(pid, 0)


def own_user_namespace(uid: int, between: Callable[[], object], *, net: bool) -> None:
    """Enter new user, ipc and uts namespaces that a user owns, and a new network namespace if `net`.

    The kernel counts the processes and other resources of these namespaces as this user's, against its limits.

    Args:
        between: called in the new user namespace before its ids are used. Meanwhile, another process can write the id
            maps from outside.
    """
    permitted = _capabilities("CapPrm")  # before the user changes, because another user may have no access to /proc
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    _set_capabilities(permitted)  # the change of user cleared the effective ones
    names = ("user", "ipc", "uts", *(("net",) if net else ()))
    check(libc.unshare(sum(_FLAGS[name] for name in names)), "unshare " + "+".join(names))
    between()
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def open_namespaces(pid: int, kinds: Iterable[str]) -> list[tuple[str, int]]:
    """Return descriptors of a process's namespaces in the order for `join`, without those the caller is already in."""
    names = set(kinds)
    unknown = names.difference(_FLAGS)
    if unknown:
        raise ValueError("unknown namespace %s; known: %s" % (", ".join(sorted(unknown)), ", ".join(_FLAGS)))
    opened = []  # type: list[tuple[str, int]]
    try:
        for kind in _FLAGS:
            if kind not in names:
                continue
            descriptor = os.open("/proc/%d/ns/%s" % (pid, kind), os.O_RDONLY | os.O_CLOEXEC)
            opened.append((kind, descriptor))
        current = {kind: os.stat("/proc/self/ns/" + kind).st_ino for kind in names}
    except OSError:
        for _, descriptor in opened:
            os.close(descriptor)
        raise
    others = []
    for kind, descriptor in opened:
        if os.fstat(descriptor).st_ino == current[kind]:  # to join one's current user namespace is an error
            os.close(descriptor)
        else:
            others.append((kind, descriptor))
    return others


def join(namespaces: Sequence[tuple[str, int]]) -> None:
    """Join the namespaces that `open_namespaces` opened, and close them. Only the next child joins a pid namespace."""
    try:
        for kind, descriptor in namespaces:
            check(libc.setns(descriptor, _FLAGS[kind]), "setns " + kind)
    finally:
        for _, descriptor in namespaces:
            os.close(descriptor)


def setns(pid: int, kinds: Iterable[str]) -> None:
    """Join namespaces (`user`, `mnt`, `pid`, `ipc`, `net`, `uts`) of a process, in the order that works."""
    join(open_namespaces(pid, kinds))


# --- inside --------------------------------------------------------------------------------------------------------


def loopback_up() -> None:
    """Enable `lo` of a fresh network namespace."""
    import socket  # only here, because it is slow to import

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe_socket:
        request = fcntl.ioctl(probe_socket, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        (flags,) = struct.unpack("16xH22x", request)
        fcntl.ioctl(probe_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def has_capability(number: int) -> bool:
    """Return whether this process has a capability in its user namespace."""
    return bool(_capabilities("CapEff") >> number & 1)


def _capabilities(name: str) -> int:
    for line in _read("/proc/self/status").split("\n"):
        if line.startswith(name + ":"):
            return int(line.split()[1], 16)
    return 0


def _set_capabilities(kept: int) -> None:
    """Set the permitted and effective capabilities to the bit mask `kept`, and the inheritable ones to none."""
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    check(libc.capset(header, struct.pack("6I", low, low, 0, high, high, 0)), "capset")


def no_sysv_ipc() -> bool:
    """Forbid System V objects and message queues in this ipc namespace. Return whether all settings were written."""
    worked = True
    for name, value in _NO_SYSV_IPC.items():
        try:
            _write("/proc/sys/" + name, value)
        except OSError:
            worked = False
    return worked


def become(uid: int, gid: int) -> None:
    """Become this user permanently: without groups and capabilities (even if it is root of a user namespace), and
    without a way to get any. In an ordinary user's user namespace, supplementary groups can't be given up.
    """
    signal_number = ctypes.c_int(0)
    check(libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(signal_number)), "prctl PR_GET_PDEATHSIG")
    try:
        os.setgroups([])
    except PermissionError:
        if _read("/proc/self/setgroups").strip() != "deny":
            raise
    os.setresgid(gid, gid, gid)
    _drop_bounding_set()  # before the user changes, because it needs a capability
    os.setresuid(uid, uid, uid)
    _set_capabilities(0)
    _clear_ambient_set()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    if signal_number.value:  # the change of user cleared the parent-death signal
        death_signal(signal_number.value)


def become_root() -> None:
    """Permanently become root of our user namespace, with `ROOT_CAPABILITIES`.

    This process, but no program that it starts, can also inspect the processes of all users of the namespace.
    """
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _drop_bounding_set(ROOT_CAPABILITIES)
    _set_capabilities(sum(1 << number for number in (*ROOT_CAPABILITIES, SYS_PTRACE)))
    _clear_ambient_set()


def _clear_ambient_set() -> None:
    try:
        _prctl(_PR_CAP_AMBIENT, 4, "PR_CAP_AMBIENT_CLEAR_ALL")
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux < 4.3 has no ambient set
            raise


def _drop_bounding_set(kept: Sequence[int] = ()) -> None:
    for capability in range(64):
        if capability in kept:
            continue
        try:
            _prctl(_PR_CAPBSET_DROP, capability, "PR_CAPBSET_DROP")
        except OSError as error:
            if error.errno == errno.EINVAL:  # this kernel has no capability with this number
                return
            if error.errno == errno.EPERM and os.geteuid() != 0:  # an ordinary user has no capabilities anyway
                return
            raise


def _read(path: str) -> str:
    with open(path, encoding="ascii") as stream:
        return stream.read()


def _write(path: str, text: str) -> None:
    """Write with a single write(2), as files in /proc require."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, "write %r to %s: %s" % (text, path, error.strerror)) from None
    finally:
        os.close(descriptor)
