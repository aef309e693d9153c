"""Removes directory trees that a hostile process may have made, and files that users left in shared directories."""

from __future__ import annotations

import collections
import errno
import os
import stat
import time

from . import mounts

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_MAX_DEPTH = 64
"""Maximum depth of other users' directories that a sweep enters."""
_COUNTING = ("ext2", "ext3", "ext4", "tmpfs", "xfs")
"""File systems on which a directory has two links, and one more for each directory in it."""
_ACLS = ("system.posix_acl_default", "system.posix_acl_access")


def remove_tree(path: str) -> None:
    """Remove a directory tree, also directories of mode 000. Follows no link. A missing tree is no error.

    Raises:
        OSError: something in the tree can't be removed, or was changed meanwhile.
    """
    try:
        top = _open_directory(path, None)
    except FileNotFoundError:
        return
    try:
        _clear(top, lambda _info: True)
    finally:
        os.close(top)
    os.rmdir(path)


def _clear(top: int, selects: Callable[[os.stat_result], bool]) -> None:
    """Remove the selected files and directories below a directory. Selected directories with other files become root's.

    Each directory is first moved up into `top`. So neither deep trees nor long paths of a hostile process matter, and
    two descriptors are enough.
    """
    number = 0
    pending = _clear_level(top, selects)
    while pending:
        name = pending.pop()
        inner = _open_directory(name, top)
        try:
            for child in _clear_level(inner, selects):
                # Moving a directory changes its "..", so the directory itself must be writable.
                os.close(_open_directory(child, inner))
                number, moved = _free_name(top, number)
                os.rename(child, moved, src_dir_fd=inner, dst_dir_fd=top)
                pending.append(moved)
            _drop_directory(name, top, inner)
        finally:
            os.close(inner)


def _clear_level(folder: int, selects: Callable[[os.stat_result], bool]) -> list[str]:
    """Remove the selected files in one directory. Return the selected directories in it."""
    directories = []
    for name in os.listdir(folder):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not selects(info):
            continue
        if stat.S_ISDIR(info.st_mode):
            directories.append(name)
        else:
            os.unlink(name, dir_fd=folder)
    return directories


def _free_name(folder: int, number: int) -> tuple[int, str]:
    while True:
        number += 1
        name = ".hermes-removing-%d" % number
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return number, name


def _drop_directory(name: str, folder: int, fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or os.geteuid() != 0:
            raise
        os.fchown(fd, 0, 0)
        for name in _ACLS:  # users named in an access list would keep access to files that others create here
            _drop_attribute(fd, name)
        os.fchmod(fd, 0o1777)


def _drop_attribute(fd: int, name: str) -> None:
    try:
        os.removexattr(fd, name)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise


def _open_directory(name: str, folder: int | None) -> int:
    """Open a directory, and give its owner the rights to list and change it."""
    try:
        fd = os.open(name, _OPEN, dir_fd=folder)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=folder)
        fd = os.open(name, _OPEN, dir_fd=folder)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


# --- files that users leave in world-writable directories -----------------------------------------------------------


def sweep(folders: Iterable[str], uids: Collection[int]) -> None:
    """Remove the files that these users own below world-writable directories. Call this as root. Meanwhile, other users
    may work there.

    A directory of these users that holds other users' files becomes root's, so that the users own nothing any more.
    Directories of other users are entered whatever their modes are now, because they may have been open before. Links
    are not followed. Entries that change meanwhile are skipped: these users have no processes, so others own them.
    """
    for folder in folders:
        try:
            fd = os.open(folder, _OPEN)
        except OSError:
            continue
        _sweep(fd, uids, 0)


def _sweep(fd: int, uids: Collection[int], depth: int) -> None:
    """Remove the users' files below one directory, and close its descriptor."""
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    _sweep_entry(entry, fd, uids, depth)
                except OSError:
                    continue
    except OSError:
        return
    finally:
        os.close(fd)


def _sweep_entry(entry: os.DirEntry[str], folder: int, uids: Collection[int], depth: int) -> None:
    info = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        if info.st_uid in uids:
            os.unlink(entry.name, dir_fd=folder)
        return
    theirs = info.st_uid in uids
    if not theirs and not (_may_hold_others_files(info) and depth < _MAX_DEPTH):
        return
    fd = os.open(entry.name, _OPEN, dir_fd=folder)
    try:
        if theirs and os.fstat(fd).st_uid in uids:
            _clear(fd, lambda info: info.st_uid in uids)
            _drop_directory(entry.name, folder, fd)
    except OSError:
        os.close(fd)
        raise
    _sweep(fd, uids, depth + 1)


def _may_hold_others_files(directory: os.stat_result) -> bool:
    """Return whether a directory may hold files of users other than root and its owner. An owner who is not root may
    have opened the directory for a time."""
    return directory.st_uid != 0 or _is_open(directory)


def _is_open(directory: os.stat_result) -> bool:
    """Return whether other users may write to a directory. The group's bits show rights given by an access list."""
    return bool(directory.st_mode & (stat.S_IWOTH | stat.S_IWGRP))


def find_open(folders: Iterable[str]) -> list[str]:
    """Return the directories that users other than their owner may write to. Missing ones are left out."""
    paths = []
    for folder in folders:
        try:
            if _is_open(os.lstat(folder)):
                paths.append(folder)
        except FileNotFoundError:
            continue
    return paths


def find_world_writable(skip: Collection[str], limit_s: float) -> list[str]:
    """Return the directories that any user can reach and write to, except below `skip` and on read-only file systems.

    The uppermost come first. The search stops after `limit_s` seconds, because a host may have very large disks.
    """
    paths = []
    table = {path: (mount.read_only, mount.kind in _COUNTING) for path, mount in mounts.read_mounts().items()}
    above_mounts = {parent for path in table for parent in _parents(path)}
    pending = collections.deque([("/", _of_root(table))])
    until = time.monotonic() + limit_s
    while pending and time.monotonic() < until:
        folder, (read_only, counting) = pending.popleft()
        if read_only and folder not in above_mounts:
            continue
        try:
            info = os.lstat(folder)
            if info.st_mode & stat.S_IWOTH and not read_only:
                paths.append(folder)
                continue
            if _is_closed(info) or (info.st_nlink == 2 and counting):
                continue
            with os.scandir(folder) as entries:
                below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        pending.extend((path, table.get(path, (read_only, counting))) for path in below if path not in skip)
    return paths


def _of_root(table: dict[str, tuple[bool, bool]]) -> tuple[bool, bool]:
    """Return the entry for /. In a chroot the root is no mount, so the table has none."""
    return table.get("/") or (bool(os.statvfs("/").f_flag & os.ST_RDONLY), False)


def _parents(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _is_closed(directory: os.stat_result) -> bool:
    """Return whether only the owner may enter a directory. The group's bits show rights given by an access list."""
    return not directory.st_mode & (stat.S_IXOTH | stat.S_IXGRP)
