"""Removes directory trees of any depth, with few descriptors, and without following links. Light imports only."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False  # `collections` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> bool:
    """Remove a directory tree, whatever the modes in it. Return whether nothing is left.

    Each directory is moved up to the top before it is emptied. So neither the maximum length of a path nor Python's
    recursion limit matters. Mounts in the tree stay, and so does everything that we may not remove.
    """
    try:
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        _empty(top)
    finally:
        os.close(top)
    return _works(os.rmdir, path)


def _empty(top: int) -> None:
    device = os.fstat(top).st_dev
    prefix = ".removed-" + os.urandom(8).hex()
    moved = 0
    waiting = _unlink_files(top)
    while waiting:
        name = waiting.pop()
        directory = _open(name, top)
        if directory < 0:
            continue
        try:
            if os.fstat(directory).st_dev != device:
                continue
            for inner in _unlink_files(directory):
                moved += 1
                if _move(inner, directory, f"{prefix}-{moved}", top):
                    waiting.append(f"{prefix}-{moved}")
        finally:
            os.close(directory)
        _works(os.rmdir, name, dir_fd=top)


def _unlink_files(directory: int) -> list[str]:
    """Remove all files of a directory, and return the names of its directories."""
    directories = []
    try:
        with os.scandir(directory) as entries:
            listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError:
        return []
    for name, is_directory in listed:
        if is_directory:
            directories.append(name)
        else:
            _works(os.unlink, name, dir_fd=directory)
    return directories


def _open(name: str, parent: int) -> int:
    """Open a directory, and give its owner the right to empty it. Return -1 if that is impossible."""
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        if os.fstat(descriptor).st_mode & 0o700 != 0o700:
            _works(os.fchmod, descriptor, 0o700)
        return descriptor
    except PermissionError:
        if not _open_up(name, parent):
            return -1
    except OSError:
        return -1
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError:
        return -1


def _move(name: str, source: int, new: str, target: int) -> bool:
    try:
        os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)
    except OSError as error:
        # Moving a directory changes its "..", so the directory itself must be writable.
        if error.errno not in (errno.EACCES, errno.EPERM) or not _open_up(name, source):
            return False
        return _works(os.rename, name, new, src_dir_fd=source, dst_dir_fd=target)
    return True


def _open_up(name: str, parent: int) -> bool:
    """Set mode 0700 on a directory that can't be opened. No link is followed, because this uses a descriptor."""
    try:
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return False
    try:
        return _works(os.chmod, f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)


def _works(call: Callable[..., object], *arguments: object, **options: object) -> bool:
    """Call a function. Return whether it raised no OSError."""
    try:
        call(*arguments, **options)
    except OSError:
        return False
    return True
