"""Mounts by raw system calls, and root directories that are made from an allow-list, in a mount namespace.

The guest runs it too: Python >= 3.7, few and light imports of the standard library. Each failed call raises an OSError
that names the call. Never call these functions in a process that has threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import time

from .namespaces import check, libc

TYPE_CHECKING = False  # `collections` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_KEPT_OPTIONS = {  # a remount from inside a user namespace must repeat these, or the kernel refuses it
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": 0x400,
    "nodiratime": 0x800,
    "relatime": 0x200000,
}
BYTES_PER_FILE = 2048
"""A file system in memory may hold one file for each 2048 bytes of its size."""
_MS_MOVE = 1 << 13
_REPLACED_S = 0.5
"""For how long a bind is tried again if its source or its mount point is being replaced."""
_MNT_DETACH = 2
# One number each on every architecture; the last is of Linux >= 5.12.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _MOVE_FROM_DESCRIPTOR = 1, 0x80000, 4
_WITH_IDS = 0x100000

SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix")
"""The directories of the surrounding system that `system_binds` shows, if they exist."""

PACKAGE_DIRECTORIES = ("/var/lib/dpkg", "/var/lib/apt")
"""The databases of package managers."""

OVERLAY_OPTIONS = "redirect_dir=on,metacopy=off,volatile"
"""For overlays that are thrown away: directories of the lower layer can be renamed, and nothing waits for the disk."""

_MASKED_IN_PROC = (
    "acpi",
    "asound",
    "bus",
    "fs",
    "irq",
    "kcore",
    "keys",
    "kmsg",
    "latency_stats",
    "sched_debug",
    "scsi",
    "slabinfo",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
    "tty/driver",
    "vmallocinfo",
)
"""The files and directories in /proc that root of a slot doesn't need. Containers hide them too."""
_DEV_BYTES = 1 << 20

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    result = libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    check(result, "mount %s on %s" % (source or kind or "(again)", target))


def make_private() -> None:
    """Stop the propagation of mounts, in both directions, between this mount namespace and others."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def system_binds(
    extra: Iterable[str] = (), masks: Iterable[str] = ()
) -> tuple[list[tuple[str, str, bool]], list[tuple[str, str]]]:
    """Return `(binds, symlinks)` for `build_root`: the read-only binds and top-level links that ordinary programs need.

    Args:
        extra: more files and directories to show, at their own paths (such as an interpreter's prefix). Their parents
            are created empty, so a directory below a private home does not show that home. Missing ones are left out.
        masks: directories that will be masked. An `extra` below a mask is bound again, on top of the mask.
    """
    links = [path for path in SYSTEM_DIRECTORIES if os.path.islink(path) and os.path.isdir(path)]
    bound = [path for path in SYSTEM_DIRECTORIES if os.path.isdir(path) and path not in links]
    binds = [(path, path, False) for path in bound]
    symlinks = []
    for path in links:
        if is_below(os.path.realpath(path), bound):
            symlinks.append((os.readlink(path), path))
        else:  # a link to a directory that the new root does not show: bind its target in the place of the link
            binds.append((os.path.realpath(path), path, False))
    shown, hidden = bound + links, list(masks)
    paths = [os.path.realpath("/etc/resolv.conf")]  # often a link into /run
    for path in extra:
        path = os.path.abspath(path)
        if path == "/":
            raise ValueError("/ can't be made visible as a whole")
        paths += [path, os.path.realpath(path)]
    for path in sorted(set(paths), key=_parts):  # parents first, so that nothing below them is bound a second time
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
    proc_options: str | None = None,
    terminals: int = 1024,
    base: Callable[[str], bool] | None = None,
) -> None:
    """Make a root directory that holds only what the arguments name, and move this process into it.

    The caller is the only process in a new mount namespace, may mount there (as root, or as root of its user
    namespace), and is in the pid namespace that /proc shall show. The order of the arguments does not matter: parents
    are mounted before children. setuid bits have no effect in the new root, devices work only in /dev, and the root
    directory itself is read-only. With a `base`, none of these three restrictions holds.

    Args:
        new_root: an existing directory to mount on. No source may be below it.
        binds: `(source, target, writable)`, files or directories, with all mounts below them.
        tmpfs: `(target, bytes or None, mode)`: empty, writable.
        masks: directories of the binds to cover with an empty directory. Binds below them stay visible.
        symlinks: `(text, path)`. An existing path stays unchanged.
        proc_options: mount options of the new /proc, such as `hidepid=2`.
        terminals: maximum number of pseudo-terminals. All namespaces except the host's share about 3,000.
        base: mounts the lowest layer at the path in its argument, and returns whether a slot has used that layer
            before. If so, anything that the slot has put in the place of a mount point is moved aside. None is an empty
            root in memory.
    """
    make_private()
    lived_in = False
    if base is None:
        mount("tmpfs", new_root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    else:
        lived_in = base(new_root)
    umask = os.umask(0o022)
    try:
        if base is not None:
            mount_point(new_root, "/dev", True, lived_in)
            mount("tmpfs", new_root + "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=%d" % _DEV_BYTES)
        _make_devices(new_root, terminals)
        mount_point(new_root, "/proc", True, lived_in)
        mount("proc", new_root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, proc_options)
        _mount_all(new_root, list(binds), list(tmpfs), list(masks), lived_in)
        for text, path in symlinks:
            if not os.path.lexists(new_root + path):
                os.symlink(text, new_root + path)
    finally:
        os.umask(umask)
    os.chdir(new_root)
    _leave_old_root(new_root)
    if base is None:
        mount(None, "/", None, _MS_REMOUNT | _MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _leave_old_root(new_root: str) -> None:
    """Make the current directory, which is `new_root`, the root of this mount namespace."""
    if libc.pivot_root(b".", b".") == 0:  # the old root is now mounted on top of the new one
        check(libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    elif ctypes.get_errno() == errno.EPERM:
        # Seccomp filters of containers forbid pivot_root even to root. So we cover the old root with the new one.
        # Nobody can uncover it without privileges, and in a user namespace mounts of its creator are locked.
        mount(".", "/", None, _MS_MOVE)
        os.chroot(".")
    else:
        check(-1, "pivot_root " + new_root)
    os.chdir("/")


def close_proc() -> None:
    """Make /proc of this mount namespace read-only: settings there affect more than the process that writes them."""
    mount(None, "/proc", None, _MS_REMOUNT | _MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def mask_proc() -> None:
    """Hide files in /proc of this mount namespace that describe the whole machine, or that not all users may read."""
    with os.scandir("/proc") as entries:
        own = [each for each in entries if not each.name.isdigit()]
        closed = [each.name for each in own if not each.stat(follow_symlinks=False).st_mode & stat.S_IROTH]
    for name in {*_MASKED_IN_PROC, *closed}:
        path = "/proc/" + name
        if os.path.isdir(path):
            _mask(path)
            mount(None, path, None, _MS_REMOUNT | _MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        elif os.path.lexists(path):
            mount("/dev/null", path, None, _MS_BIND)


def mount_with_ids(source: str, target: str, user_namespace: int) -> None:
    """Mount the directory `source` also at `target`, with the ids of a user namespace, but without mounts below it."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    tree = _call(_SYS_OPEN_TREE, "open_tree " + source, _AT_FDCWD, os.fsencode(source), flags)
    try:
        attributes = struct.pack("QQQQ", _WITH_IDS, 0, 0, user_namespace)
        size = len(attributes)
        _call(_SYS_MOUNT_SETATTR, "mount_setattr (ids) " + source, tree, b"", _AT_EMPTY_PATH, attributes, size)
        destination = (_AT_FDCWD, os.fsencode(target), _MOVE_FROM_DESCRIPTOR)
        _call(_SYS_MOVE_MOUNT, "move_mount " + target, tree, b"", *destination)
    finally:
        os.close(tree)


def _call(number: int, name: str, *arguments: int | bytes) -> int:
    words = [ctypes.c_long(each) if isinstance(each, int) else ctypes.c_char_p(each) for each in arguments]
    return check(int(libc.syscall(ctypes.c_long(number), *words)), name)


class Mount:
    """A line of mountinfo, see proc_pid_mountinfo(5).

    Attributes:
        kind: the type of the file system.
        options: the options of the mount, without those of the file system.
        read_only: whether the mount or the file system is read-only.
    """

    def __init__(self, entry: list[bytes]) -> None:
        kind, *_source, system_options = entry[entry.index(b"-", 6) + 1 :]  # a source may be empty
        self.kind = kind.decode("ascii", "replace")
        self.options = entry[5].decode("ascii").split(",")
        self.read_only = "ro" in self.options or b"ro" in system_options.split(b",")


def read_mounts() -> dict[str, Mount]:
    """Return the mounts that this process sees, by directory. Of several mounts on one directory, the topmost."""
    with open("/proc/self/mountinfo", "rb") as lines:
        return {_unescape(entry[4]): Mount(entry) for entry in map(bytes.split, lines)}


def mounts_below(top: str) -> list[tuple[str, str]]:
    """Return (directory, type of file system) of the mounts strictly below a directory, parents first."""
    below = [(target, each.kind) for target, each in read_mounts().items() if target != top and is_below(target, [top])]
    return sorted(below, key=lambda pair: _parts(pair[0]))


def _unescape(word: bytes) -> str:
    return os.fsdecode(word.decode("unicode_escape").encode("latin-1"))


def restrict(path: str, flags: int) -> None:
    """Add read-only, nosuid, nodev or noexec to the mount at `path` and to all mounts below it."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)  # struct mount_attr; its low flags equal those of mount(2)
    result = libc.syscall(
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
        check(result, "mount_setattr " + path)


def restrict_by_remount(path: str, flags: int) -> None:
    """Do the same as `restrict` without mount_setattr(2): remount each mount with the flags added."""
    path = os.path.realpath(path)
    entries = {target: entry for target, entry in read_mounts().items() if is_below(target, [path])}
    if path not in entries:
        raise OSError(errno.EINVAL, "not a mount", path)
    for target, entry in entries.items():
        kept = sum({_KEPT_OPTIONS.get(option, 0) for option in entry.options})
        try:
            mount(None, target, None, _MS_REMOUNT | _MS_BIND | kept | flags)
        except OSError as error:
            if target == path or error.errno not in (errno.EINVAL, errno.ENOENT, errno.EACCES):
                raise  # these three errors mean that another mount covers it, so nobody can reach it


def is_below(path: str, tops: Iterable[str]) -> bool:
    """Return whether a normalised absolute path is one of `tops` or below one. Links are not resolved."""
    return any(path == top or path.startswith(top.rstrip("/") + "/") for top in tops)


def _innermost(path: str, tops: Iterable[str]) -> int:
    """Return the length of the longest of `tops` that is `path` or lies above `path`; -1 if none does."""
    return max([len(top) for top in tops if is_below(path, [top])], default=-1)


def _parts(path: str) -> list[str]:
    return path.split("/")


def _mount_all(
    root: str,
    binds: list[tuple[str, str, bool]],
    tmpfs: list[tuple[str, int | None, int]],
    masks: list[str],
    lived_in: bool = False,
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
        mount_point(root, target, directories.get(target, True), lived_in)
        step(root + target)
    for path in masks:  # only now read-only, because mount points for binds had to be made in them
        mount(None, root + path, None, _MS_REMOUNT | _MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _mask(target: str) -> None:
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=1m")


def _tmpfs(size: int | None, mode: int) -> Callable[[str], None]:
    # Empty files take memory too, which `size` does not count. So their number is limited.
    data = "mode=%o" % mode + ("" if size is None else ",size=%d,nr_inodes=%d" % (size, size // BYTES_PER_FILE))
    return lambda target: mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, data)


def _bind(source: str, writable: bool) -> Callable[[str], None]:
    flags = MS_NOSUID | MS_NODEV | (0 if writable else MS_RDONLY)

    def step(target: str) -> None:
        end = time.monotonic() + _REPLACED_S
        while True:
            try:
                mount(source, target, None, _MS_BIND | _MS_REC)
                return restrict(target, flags)
            except OSError as error:
                # The file may be replaced at this moment, as `useradd` replaces /etc/passwd. Then the mount fails, or
                # it is gone before it can be restricted.
                transient = error.errno in (errno.ENOENT, errno.EINVAL) and os.path.exists(source)
                if not transient or time.monotonic() > end:
                    raise

    return step


def mount_point(root: str, target: str, directory: bool, lived_in: bool = False) -> None:
    """Make a file or directory to mount on. Links are not followed, because a slot may have put them there.

    Args:
        lived_in: whether a slot has used this root before. Then, whatever is in the way is moved aside.
    """
    path, names = root, [name for name in target.split("/") if name]
    for number, name in enumerate(names, 1):
        path += "/" + name
        is_directory = directory or number < len(names)
        if lived_in and os.path.lexists(path) and (os.path.islink(path) or os.path.isdir(path) != is_directory):
            os.rename(path, "%s.%s" % (path, os.urandom(6).hex()))
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "a link is in the way of a mount point", target)
        if os.path.lexists(path):
            continue
        if is_directory:
            os.mkdir(path, 0o755)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _make_devices(root: str, terminals: int) -> None:
    for name in _DEVICES:
        device = "/dev/" + name
        if os.path.exists(device):
            mount_point(root, device, False)
            mount(device, root + device, None, _MS_BIND)
            # A read-only device can still be written to. But a slot whose root owns the device can't change its mode.
            restrict(root + device, MS_NOSUID | MS_NOEXEC | MS_RDONLY)
    mount_point(root, "/dev/pts", True)
    options = "newinstance,ptmxmode=0666,mode=620,max=%d" % terminals
    mount("devpts", root + "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    for name, text in _DEVICE_LINKS.items():
        os.symlink(text, root + "/dev/" + name)
