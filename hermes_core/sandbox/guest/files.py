"""File operations. Each runs in a child of the slot's parent, with the rights of the slot.

Data is read from standard input and written to standard output. The outcome is one JSON object on standard error:
`{"ok": true, ...}` or `{"code": ..., "message": ...}`.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat

from ..linux.removal import remove_tree, sweep
from . import archives
from .archives import BLOCK, ArchiveRefused, write_all

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    Outcome = dict[str, Any]

CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EEXIST: "exists",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.ENOTEMPTY: "exists",
    errno.ENAMETOOLONG: "invalid",
    errno.ELOOP: "invalid",
    errno.EINVAL: "invalid",
    errno.ENXIO: "not_a_file",
}
"""The stable code for each errno."""


def run(name: str, args: Mapping[str, Any]) -> int:
    """Run the operation `name`, and return the exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = dict(_OPERATIONS[name](**args), ok=True)
    except ArchiveRefused as error:
        result = {"code": error.code, "message": str(error)}
    except OSError as error:
        path = error.filename2 or error.filename or args.get("path", name)  # for a rename, the new name
        text = "%s: %s" % (error.strerror or error, path)
        result = {"code": CODES.get(error.errno or 0, "failed"), "message": text}
    except (ValueError, OverflowError, RecursionError) as error:
        result = {"code": "invalid", "message": str(error)}
    if result.get("ok"):
        _undo_steps.clear()
    else:
        _undo()
    write_all(2, json.dumps(result).encode("ascii"))
    return 0 if result.get("ok") else 1


_undo_steps: list[Callable[[], object]] = []
"""Functions that undo what the operation has done so far. Each may be called twice, or without anything to undo."""


def _undo() -> None:
    for step in _undo_steps:
        try:
            step()
        except OSError:  # there is nothing to undo
            pass


def _interrupt(_number: int, _frame: object) -> NoReturn:
    """End a cancelled operation. As a signal handler, it may also interrupt `_undo`."""
    _undo()
    os._exit(128 + signal.SIGTERM)


def _read(path: str, offset: int, limit: int) -> Outcome:
    # Non-blocking, because the path may be a named pipe, and opening that would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise ArchiveRefused("is_a_directory", "is a directory: %s" % path)
    if not stat.S_ISREG(info.st_mode):
        raise ArchiveRefused("not_a_file", "not a regular file: %s" % path)
    os.lseek(fd, offset, os.SEEK_SET)
    while limit > 0:
        data = os.read(fd, min(BLOCK, limit))
        if not data:
            break
        write_all(1, data)
        limit -= len(data)
    return {"size": info.st_size}


def _write(path: str, size: int, mode: int | None, append: bool) -> Outcome:
    target = os.path.realpath(path)
    try:
        old: os.stat_result | None = os.stat(target)
    except FileNotFoundError:
        old = None
    if old is not None and stat.S_ISDIR(old.st_mode):
        raise ArchiveRefused("is_a_directory", "is a directory: %s" % path)
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise ArchiveRefused("not_a_file", "not a regular file: %s" % path)
    if path.endswith("/"):
        raise ArchiveRefused("invalid", "the name of a directory: %s" % path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if append:
        _append(target, size, mode)
    else:
        if old is not None and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        if old is not None and (old.st_nlink > 1 or not os.access(os.path.dirname(target), os.W_OK | os.X_OK)):
            _overwrite(target, size, mode)
        else:
            _replace(target, size, mode if old is None or mode is not None else stat.S_IMODE(old.st_mode), path)
    return {}


def _append(target: str, size: int, mode: int | None) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    before = os.fstat(fd).st_size
    _undo_steps.append(lambda: os.ftruncate(fd, before))
    _copy_in(fd, size)
    if mode is not None:
        os.fchmod(fd, mode)


def _overwrite(target: str, size: int, mode: int | None) -> None:
    """Change a file in place, because it has other names, or its directory is not writable.

    We first receive all data, then reserve room for it. So a full disk or a cut stream leaves the old file unchanged.
    """
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, min(BLOCK, size - len(data)))
        if not piece:
            raise ArchiveRefused("failed", "the data ended %d bytes early" % (size - len(data)))
        data += piece
    fd = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    before = os.fstat(fd).st_size
    _undo_steps.append(lambda: os.ftruncate(fd, before))
    if size:
        os.posix_fallocate(fd, 0, size)
    _undo_steps.clear()  # from here on, the old content is overwritten
    write_all(fd, bytes(data))
    os.ftruncate(fd, size)
    if mode is not None:
        os.fchmod(fd, mode)


def _replace(target: str, size: int, mode: int | None, path: str) -> None:
    """Replace a file atomically. A full disk or a cut stream leaves the old file unchanged."""
    temporary = os.path.join(os.path.dirname(target), ".hermes-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    _undo_steps.append(lambda: os.unlink(temporary))
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    _copy_in(fd, size)
    if mode is not None:
        os.fchmod(fd, mode)
    os.rename(temporary, target)


def _copy_in(fd: int, size: int) -> None:
    while size:
        data = os.read(0, min(BLOCK, size))
        if not data:
            raise ArchiveRefused("failed", "the data ended %d bytes early" % size)
        write_all(fd, data)
        size -= len(data)


def _describe(path: str, name: str) -> dict[str, Any]:
    info = os.lstat(path)
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link"))
    kind = next((word for test, word in kinds if test(info.st_mode)), "other")
    mode = stat.S_IMODE(info.st_mode)
    return {"path": name, "kind": kind, "size": info.st_size, "mode": mode, "mtime": info.st_mtime}


def _stat(path: str) -> Outcome:
    return {"stat": _describe(path, path)}


def _list(path: str, recursive: bool, max_entries: int) -> Outcome:
    entries: list[dict[str, Any]] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            names = os.listdir(os.path.join(path, prefix) if prefix else path)
        except OSError:
            if not prefix:
                raise
            continue
        if len(entries) + len(names) > max_entries:
            raise ArchiveRefused("too_large", "more than %d entries: %s" % (max_entries, path))
        for name in names:
            relative = os.path.join(prefix, name)
            try:
                entry = _describe(os.path.join(path, relative), relative)
            except OSError:  # it was removed meanwhile, or its directory may be listed but not searched
                continue
            entries.append(entry)
            if recursive and entry["kind"] == "dir":
                pending.append(relative)
    entries.sort(key=lambda entry: entry["path"])
    # Not in the outcome, whose size is limited.
    write_all(1, json.dumps(entries).encode("ascii"))
    return {}


def _remove(path: str, recursive: bool) -> Outcome:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif recursive:
        remove_tree(path)
    else:
        os.rmdir(path)
    return {}


def _clear(path: str, keep: list[str], others: list[str], swept: list[str], uid: int | None) -> Outcome:
    """Empty a slot's directories, except `keep` in the first. With `uid`, also remove that user's files in `swept`."""
    for folder in [path] + others:
        for name in os.listdir(folder):
            if folder != path or name not in keep:
                _remove(os.path.join(folder, name), True)
    if uid is not None:
        for folder in swept:
            _remove_own(folder, uid)
        sweep(swept, (uid,))
    return {}


def _remove_own(folder: str, uid: int) -> None:
    """Remove the user's entries in a shared directory. We are their owner, so their modes can't stop us."""
    for name in os.listdir(folder):
        entry = os.path.join(folder, name)
        try:
            if os.lstat(entry).st_uid == uid:
                _remove(entry, True)
        except OSError:  # it holds files of another user, or that user changes it at this moment
            continue


_OPERATIONS: dict[str, Callable[..., Outcome]] = {
    "read": _read,
    "write": _write,
    "stat": _stat,
    "list": _list,
    "remove": _remove,
    "clear": _clear,
    "tar_in": archives.unpack,
    "tar_out": archives.pack,
}
