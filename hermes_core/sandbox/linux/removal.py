"""Removing directory trees that a hostile process may have made, and finding what a user left outside its own."""

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


_DEEPEST = 64
"""Levels of other users' directories that a sweep looks into."""
_COUNTING = ("ext2", "ext3", "ext4", "tmpfs", "xfs")
"""File systems on which a directory's links are counted: two, and one for each directory in it."""
_ACLS = ("system.posix_acl_default", "system.posix_acl_access")


def remove_tree(path: str) -> None:
    """Remove a directory tree, directories of mode 000 included; never follows a link. A missing one is no error.

    Raises:
        OSError: something in it can't be removed, or was being changed at the same time.
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


def _clear(top: int, ours: Callable[[os.stat_result], bool]) -> None:
    """Remove from a directory what is ours, however deep; a directory of ours that holds more becomes root's.

    Directories found inside are moved up to the top one first, so that neither the depth that a hostile process made
    nor the length of its paths matters, and two descriptors are enough.
    """
    number = 0
    pending = _clear_level(top, ours)
    while pending:
        name = pending.pop()
        inner = _open_directory(name, top)
        try:
            for child in _clear_level(inner, ours):
                # Moving a directory changes its "..", for which it must be writable itself.
                os.close(_open_directory(child, inner))
                number, moved = _unused_name(top, number)
                os.rename(child, moved, src_dir_fd=inner, dst_dir_fd=top)
                pending.append(moved)
            _drop_directory(name, top, inner)
        finally:
            os.close(inner)


def _clear_level(folder: int, ours: Callable[[os.stat_result], bool]) -> list[str]:
    """Remove the files of ours in one directory; the directories of ours in it."""
    directories = []
    for name in os.listdir(folder):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not ours(info):
            continue
        if stat.S_ISDIR(info.st_mode):
            directories.append(name)
        else:
            os.unlink(name, dir_fd=folder)
    return directories


def _unused_name(folder: int, number: int) -> tuple[int, str]:
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
        for name in _ACLS:  # what others make in it would be shared with whom these name
            _drop_attribute(fd, name)
        os.fchmod(fd, 0o1777)


def _drop_attribute(fd: int, name: str) -> None:
    try:
        os.removexattr(fd, name)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise


def _open_directory(name: str, folder: int | None) -> int:
    """Open a directory and make sure that its owner can list and change it."""
    try:
        fd = os.open(name, _OPEN, dir_fd=folder)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=folder)
        fd = os.open(name, _OPEN, dir_fd=folder)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


# --- what users leave in directories of everybody's -----------------------------------------------------------------


def sweep(folders: Iterable[str], uids: Collection[int]) -> None:
    """Remove what these users own below world-writable directories; for root, while other users are at work there.

    Directories of other users are looked into whatever their modes are now: they may have been open before.

    A directory of theirs that holds other users' files becomes root's, so that nothing of theirs stays. Links are not
    followed. What changes under our hands is left as it is: the users themselves are dead, so it is not theirs.
    """
    for folder in folders:
        try:
            fd = os.open(folder, _OPEN)
        except OSError:
            continue
        _sweep(fd, uids, 0)


def _sweep(fd: int, uids: Collection[int], depth: int) -> None:
    """Remove the users' files below one directory, and close it."""
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
    if not theirs and not (_may_hold_others_files(info) and depth < _DEEPEST):
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
    """Return whether others than root and its owner may have written there: any owner but root may have let them."""
    return directory.st_uid != 0 or _is_open(directory)


def _is_open(directory: os.stat_result) -> bool:
    """Return whether others may write to a directory. If an access list lets them, the group's bits show it."""
    return bool(directory.st_mode & (stat.S_IWOTH | stat.S_IWGRP))


def are_open(folders: Iterable[str]) -> list[str]:
    """Return those of the directories that others than their owner may write to."""
    found = []
    for folder in folders:
        try:
            if _is_open(os.lstat(folder)):
                found.append(folder)
        except FileNotFoundError:
            continue
    return found


def world_writable(skip: Collection[str], limit_s: float) -> list[str]:
    """Return the directories below / that any user can reach and write to, except on read-only file systems and below
    `skip`.

    The uppermost come first. The search has a time limit in seconds, because a host may have very large disks.
    """
    found = []
    table = {path: (mount.read_only, mount.kind in _COUNTING) for path, mount in mounts.mounted().items()}
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
                found.append(folder)
                continue
            if _is_closed(info) or (info.st_nlink == 2 and counting):
                continue
            with os.scandir(folder) as entries:
                below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        pending.extend((path, table.get(path, (read_only, counting))) for path in below if path not in skip)
    return found


def _of_root(table: dict[str, tuple[bool, bool]]) -> tuple[bool, bool]:
    """Return what is known of the mount of /, which the table has not where the root is no mount (chroot)."""
    return table.get("/") or (bool(os.statvfs("/").f_flag & os.ST_RDONLY), False)


def _parents(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _is_closed(directory: os.stat_result) -> bool:
    """Return whether only its owner may enter a directory. If an access list lets others, the group's bits show it."""
    return not directory.st_mode & (stat.S_IXOTH | stat.S_IXGRP)
