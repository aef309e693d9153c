"""Linux namespaces by raw system calls: joining them, a root made from an allow-list, and giving up every privilege.

Runs in the guest too, in a stranger's sandbox: Python >= 3.7, a few light modules of the standard library, no more.
Every failed call is an `OSError` that names it. Nothing here may be called in a process that has threads.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Sequence

_FLAGS = {  # in the order in which they can be joined: the user namespace gives the right to the others
    "user": 0x10000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_KEPT_OPTIONS = {  # what a remount from inside a user namespace has to repeat
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": 0x400,
    "nodiratime": 0x800,
    "relatime": 0x200000,
}
_MS_MOVE = 1 << 13
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # one number on every architecture of Linux >= 5.12
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 2, 24, 38, 47
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix")
"""What of the surrounding system is visible in a root made by `build_root`, where it exists."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
_NO_SYSV_IPC = {"kernel/shmmni": "0", "kernel/msgmni": "0", "kernel/sem": "0 0 0 0", "fs/mqueue/queues_max": "0"}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (call, os.strerror(number)))
    return result


def _prctl(option: int, argument: int, call: str, second: int = 0) -> int:
    words = [ctypes.c_ulong(value) for value in (argument, second, 0, 0)]
    return _check(_libc.prctl(option, *words), "prctl " + call)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    result = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(result, "mount %s on %s" % (source or kind or "(again)", target))


def make_private() -> None:
    """Let no mount of this namespace propagate out of it, nor one of outside into it."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def death_signal(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent dies; 0 for none."""
    _prctl(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")


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
    """Give this process new namespaces; a new pid namespace begins with its next child.

    With `user`, the ids `inside_uid` and `inside_gid` of the new namespace are the caller's own, the only ones there.
    """
    wanted = {"user": user, "mnt": mount, "pid": pid, "ipc": ipc, "net": net, "uts": uts}
    names = [name for name in _FLAGS if wanted[name]]
    uid, gid = os.geteuid(), os.getegid()
    flags = 0
    for name in names:
        flags |= _FLAGS[name]
    _check(_libc.unshare(flags), "unshare " + "+".join(names))
    if user:
        _write("/proc/self/setgroups", "deny")  # the kernel's condition for writing gid_map without privilege
        _write("/proc/self/uid_map", "%d %d 1" % (inside_uid, uid))
        _write("/proc/self/gid_map", "%d %d 1" % (inside_gid, gid))


def open_namespaces(pid: int, kinds: Iterable[str]) -> list[tuple[str, int]]:
    """Descriptors of a process's namespaces, in the order for `join`, without those that the caller is in already."""
    wanted = set(kinds)
    unknown = wanted.difference(_FLAGS)
    if unknown:
        raise ValueError("unknown namespace %s; known: %s" % (", ".join(sorted(unknown)), ", ".join(_FLAGS)))
    opened = []  # type: list[tuple[str, int]]
    try:
        for kind in _FLAGS:
            if kind not in wanted:
                continue
            descriptor = os.open("/proc/%d/ns/%s" % (pid, kind), os.O_RDONLY | os.O_CLOEXEC)
            opened.append((kind, descriptor))
        own = {kind: os.stat("/proc/self/ns/" + kind).st_ino for kind in wanted}
    except OSError:
        for _, descriptor in opened:
            os.close(descriptor)
        raise
    others = []
    for kind, descriptor in opened:
        if os.fstat(descriptor).st_ino == own[kind]:  # joining one's own user namespace is an error to the kernel
            os.close(descriptor)
        else:
            others.append((kind, descriptor))
    return others


def join(namespaces: Sequence[tuple[str, int]]) -> None:
    """Join what `open_namespaces` opened, and close it. A pid namespace is joined by the next child."""
    try:
        for kind, descriptor in namespaces:
            _check(_libc.setns(descriptor, _FLAGS[kind]), "setns " + kind)
    finally:
        for _, descriptor in namespaces:
            os.close(descriptor)


def setns(pid: int, kinds: Iterable[str]) -> None:
    """Join namespaces (`user`, `mnt`, `pid`, `ipc`, `net`, `uts`) of a process, in the order that works."""
    join(open_namespaces(pid, kinds))


# --- a root of one's own -------------------------------------------------------------------------------------------


def system_binds(
    extra: Iterable[str] = (), masks: Iterable[str] = ()
) -> tuple[list[tuple[str, str, bool]], list[tuple[str, str]]]:
    """The read-only binds and the top-level links of a root for ordinary programs: `(binds, symlinks)` of `build_root`.

    Args:
        extra: further files and directories to show, at their own paths (an interpreter's prefix, say). Their parents
            are made afresh, so a directory below a private home does not show that home. Missing ones are left out.
        masks: what will be masked; an `extra` below one of them is bound again, on top of the mask.
    """
    links = [path for path in SYSTEM_DIRECTORIES if os.path.islink(path) and os.path.isdir(path)]
    bound = [path for path in SYSTEM_DIRECTORIES if os.path.isdir(path) and path not in links]
    binds = [(path, path, False) for path in bound]
    symlinks = []
    for path in links:
        if is_below(os.path.realpath(path), bound):
            symlinks.append((os.readlink(path), path))
        else:  # a link to elsewhere on this system: what it points at takes its place
            binds.append((os.path.realpath(path), path, False))
    shown, hidden = bound + links, list(masks)
    wanted = [os.path.realpath("/etc/resolv.conf")]  # often a link into /run
    for path in extra:
        path = os.path.abspath(path)
        if path == "/":
            raise ValueError("/ can't be made visible as a whole")
        wanted += [path, os.path.realpath(path)]
    for path in sorted(set(wanted), key=_parts):  # parents first: what they show is not bound a second time
        if os.path.exists(path) and _innermost(path, shown) <= _innermost(path, hidden):
            binds.append((os.path.realpath(path), path, False))
            shown.append(path)
    return binds, symlinks


def build_root(
    new_root: str,
    *,
    binds: Iterable[tuple[str, str, bool]] = (),
    tmpfs: Iterable[tuple[str, int | None, int]] = (),
    masks: Iterable[str] = (),
    symlinks: Iterable[tuple[str, str]] = (),
    proc: bool = True,
    dev: bool = True,
    proc_options: str | None = None,
) -> None:
    """Make a root that holds what is named and nothing else, and move this process (and its children) into it.

    The caller is alone in a fresh mount namespace, with the right to mount there (root, or root of its user
    namespace) and, for `proc`, in the pid namespace that /proc is to show. Parents are mounted before children,
    whatever the order given. Nothing here is setuid, and nothing but /dev has devices. The root itself is read-only.

    Args:
        new_root: an existing directory to mount on, which none of the sources is below.
        binds: `(source, target, writable)`, files or directories, submounts included.
        tmpfs: `(target, bytes or None, mode)`: empty, writable.
        masks: directories of the binds to cover with emptiness; the binds below them stay.
        symlinks: `(text, path)`; an existing path is left alone.
        proc_options: of the fresh /proc, such as `hidepid=2`.
    """
    make_private()
    mount("tmpfs", new_root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    umask = os.umask(0o022)
    try:
        if dev:
            _make_devices(new_root)
        if proc:
            _mount_point(new_root, "/proc", True)
            mount("proc", new_root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, proc_options)
        _mount_all(new_root, list(binds), list(tmpfs), list(masks))
        for text, path in symlinks:
            if not os.path.lexists(new_root + path):
                os.symlink(text, new_root + path)
    finally:
        os.umask(umask)
    os.chdir(new_root)
    _leave_old_root(new_root)
    mount(None, "/", None, _MS_REMOUNT | _MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _leave_old_root(new_root: str) -> None:
    """Make the current directory, which is `new_root`, the root of this mount namespace."""
    if _libc.pivot_root(b".", b".") == 0:  # the old root now lies on top of the new one
        _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    elif ctypes.get_errno() == errno.EPERM:
        # Containers' filters of system calls know no capability that allows it. So the new root covers the old one,
        # for good: without privileges nobody uncovers it, nor in a user namespace, where what lies above is locked.
        mount(".", "/", None, _MS_MOVE)
        os.chroot(".")
    else:
        _check(-1, "pivot_root " + new_root)
    os.chdir("/")


def restrict(path: str, flags: int) -> None:
    """Add read-only, nosuid, nodev or noexec to the mount at `path` and to all mounts below it."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)  # struct mount_attr; its low flags equal those of mount(2)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    )
    if result < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):  # an old kernel, or an old seccomp profile
        restrict_by_remount(path, flags)
    else:
        _check(result, "mount_setattr " + path)


def restrict_by_remount(path: str, flags: int) -> None:
    """The same without mount_setattr(2): each mount again, with the flags that it has and those added."""
    path = os.path.realpath(path)
    found = {}  # type: dict[str, int]
    with open("/proc/self/mountinfo", "rb") as lines:
        for entry in map(bytes.split, lines):
            target = os.fsdecode(entry[4].decode("unicode_escape").encode("latin-1"))
            if is_below(target, [path]):  # of several at one place, the last lies on top
                found[target] = sum({_KEPT_OPTIONS.get(option, 0) for option in entry[5].decode("ascii").split(",")})
    if path not in found:
        raise OSError(errno.EINVAL, "not a mount", path)
    for target, kept in found.items():
        try:
            mount(None, target, None, _MS_REMOUNT | _MS_BIND | kept | flags)
        except OSError as error:
            if target == path or error.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES):
                raise  # those three: it lies under another mount, out of anyone's reach


def is_below(path: str, tops: Iterable[str]) -> bool:
    """Whether a normalised absolute path is one of `tops` or lies below one, by name."""
    return any(path == top or path.startswith(top.rstrip("/") + "/") for top in tops)


def _innermost(path: str, tops: Iterable[str]) -> int:
    """The length of the longest of `tops` that holds `path`, or -1."""
    return max([len(top) for top in tops if is_below(path, [top])], default=-1)


def _parts(path: str) -> list[str]:
    return path.split("/")


def _mount_all(
    root: str, binds: list[tuple[str, str, bool]], tmpfs: list[tuple[str, int | None, int]], masks: list[str]
) -> None:
    steps = []  # type: list[tuple[str, Callable[[str], None]]]
    steps += [(path, _mask) for path in masks]
    steps += [(target, _tmpfs(size, mode)) for target, size, mode in tmpfs]
    steps += [(target, _bind(source, writable)) for source, target, writable in binds]
    directories = {target: os.path.isdir(source) for source, target, _ in binds}
    clash = directories.keys() & set(masks)
    if clash:
        raise ValueError("both bound and masked: " + ", ".join(sorted(clash)))
    for target, step in sorted(steps, key=lambda pair: _parts(pair[0])):
        _mount_point(root, target, directories.get(target, True))
        step(root + target)
    for path in masks:  # only now: the mount points of binds on top of them had to be made
        mount(None, root + path, None, _MS_REMOUNT | _MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _mask(target: str) -> None:
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=1m")


def _tmpfs(size: int | None, mode: int) -> Callable[[str], None]:
    data = "mode=%o" % mode + ("" if size is None else ",size=%d" % size)
    return lambda target: mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, data)


def _bind(source: str, writable: bool) -> Callable[[str], None]:
    def step(target: str) -> None:
        mount(source, target, None, _MS_BIND | _MS_REC)
        restrict(target, MS_NOSUID | MS_NODEV | (0 if writable else MS_RDONLY))

    return step


def _mount_point(root: str, target: str, directory: bool) -> None:
    """Make a file or directory to mount on. No link is followed: what lies in a writable bind may be anyone's."""
    path, names = root, [name for name in target.split("/") if name]
    for number, name in enumerate(names, 1):
        path += "/" + name
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "a link is in the way of a mount point", target)
        if os.path.lexists(path):
            continue
        if directory or number < len(names):
            os.mkdir(path, 0o755)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _make_devices(root: str) -> None:
    for name in _DEVICES:
        device = "/dev/" + name
        if os.path.exists(device):
            _mount_point(root, device, False)
            mount(device, root + device, None, _MS_BIND)
            restrict(root + device, MS_NOSUID | MS_NOEXEC)
    _mount_point(root, "/dev/pts", True)
    mount("devpts", root + "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for name, text in _DEVICE_LINKS.items():
        os.symlink(text, root + "/dev/" + name)


# --- inside --------------------------------------------------------------------------------------------------------


def loopback_up() -> None:
    """Bring up `lo` of a fresh network namespace."""
    import socket  # only here, as it takes as long as everything else together

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe_socket:
        request = fcntl.ioctl(probe_socket, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        (flags,) = struct.unpack("16xH22x", request)
        fcntl.ioctl(probe_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def no_sysv_ipc() -> bool:
    """Allow no System V object and no message queue in this ipc namespace; whether that worked (it needs its root)."""
    worked = True
    for name, value in _NO_SYSV_IPC.items():
        try:
            _write("/proc/sys/" + name, value)
        except OSError:
            worked = False
    return worked


def become(uid: int, gid: int) -> None:
    """Be this user for good: no groups, no capability (not even as uid 0 of a user namespace), none to be gained.

    The parent-death signal, which the kernel drops on a change of user, is set again. In a user namespace of an
    ordinary user, supplementary groups can't be given up.
    """
    signal_number = ctypes.c_int(0)
    _check(_libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(signal_number)), "prctl PR_GET_PDEATHSIG")
    try:
        os.setgroups([])
    except PermissionError:
        if _read("/proc/self/setgroups").strip() != "deny":
            raise
    os.setresgid(gid, gid, gid)
    _drop_bounding_set()  # before the user changes: it needs a capability itself
    os.setresuid(uid, uid, uid)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    try:
        _prctl(_PR_CAP_AMBIENT, 4, "PR_CAP_AMBIENT_CLEAR_ALL")
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux < 4.3 has no ambient set
            raise
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    if signal_number.value:
        death_signal(signal_number.value)


def _drop_bounding_set() -> None:
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability, "PR_CAPBSET_DROP")
        except OSError as error:
            if error.errno == errno.EINVAL:  # past the last that this kernel knows
                return
            if error.errno == errno.EPERM and os.geteuid() != 0:  # an ordinary user has none to pass on
                return
            raise


def _read(path: str) -> str:
    with open(path, encoding="ascii") as stream:
        return stream.read()


def _write(path: str, text: str) -> None:
    """One write(2), as the files of /proc want it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, "write %r to %s: %s" % (text, path, error.strerror)) from None
    finally:
        os.close(descriptor)
