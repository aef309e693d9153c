"""File operations, each run in a forked child of the slot's parent with the slot's rights: data on 0 and 1.

The outcome is one JSON object on standard error: `{"ok": true, ...}` or `{"code": ..., "message": ...}`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile

_BLOCK = 256 << 10
_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EEXIST: "exists",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.ENOTEMPTY: "not_empty",
    errno.ENAMETOOLONG: "invalid",
    errno.ELOOP: "invalid",
}


class Refused(Exception):
    """The operation can't be done; `code` is a stable word for why."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def run(name, args):
    """Run the operation `name`; the exit status."""
    try:
        result = dict(_OPERATIONS[name](**args) or {}, ok=True)
    except Refused as error:
        result = {"code": error.code, "message": str(error)}
    except OSError as error:
        result = {"code": _CODES.get(error.errno, "failed"), "message": "%s: %s" % (error.strerror, error.filename or name)}
    except ValueError as error:
        result = {"code": "invalid", "message": str(error)}
    except tarfile.TarError as error:
        result = {"code": "invalid", "message": "not a tar archive: %s" % error}
    _write_all(2, json.dumps(result).encode("ascii"))
    return 0 if result.get("ok") else 1


def _write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(path, offset, limit):
    # Non-blocking: a named pipe in the place of a file must not hold us.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise Refused("is_a_directory", "is a directory: %s" % path)
    if not stat.S_ISREG(info.st_mode):
        raise Refused("not_a_file", "not a regular file: %s" % path)
    os.lseek(fd, offset, os.SEEK_SET)
    while limit > 0:
        data = os.read(fd, min(_BLOCK, limit))
        if not data:
            break
        _write_all(1, data)
        limit -= len(data)
    return {"size": info.st_size}


def _write(path, size, mode, append):
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise Refused("is_a_directory", "is a directory: %s" % path)
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    if append:
        fd = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        before = os.fstat(fd).st_size
        try:
            _copy_in(fd, size)
        except BaseException:
            os.ftruncate(fd, before)
            raise
        return {}
    try:
        old = os.stat(target)
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise Refused("not_a_file", "not a regular file: %s" % path)
    if old is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    # All of it or nothing: a full disk or a cut stream leaves the old file as it was.
    temporary = os.path.join(folder, ".hermes-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _copy_in(fd, size)
        if mode is not None or old is not None:
            os.fchmod(fd, mode if mode is not None else stat.S_IMODE(old.st_mode))
        os.rename(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return {"created": old is None}


def _copy_in(fd, size):
    left = size
    while left:
        data = os.read(0, min(_BLOCK, left))
        if not data:
            raise Refused("failed", "the data ended %d bytes early" % left)
        _write_all(fd, data)
        left -= len(data)


def _describe(path, name):
    info = os.lstat(path)
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link"))
    kind = next((word for test, word in kinds if test(info.st_mode)), "other")
    return {"path": name, "kind": kind, "size": info.st_size, "mode": stat.S_IMODE(info.st_mode), "mtime": info.st_mtime}


def _stat(path):
    return {"stat": _describe(path, path)}


def _list(path, recursive, max_entries):
    entries = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            names = os.listdir(os.path.join(path, prefix) if prefix else path)
        except OSError:
            if not prefix:
                raise
            continue
        for name in names:
            relative = os.path.join(prefix, name)
            try:
                entry = _describe(os.path.join(path, relative), relative)
            except FileNotFoundError:
                continue
            entries.append(entry)
            if len(entries) > max_entries:
                raise Refused("too_large", "more than %d entries: %s" % (max_entries, path))
            if recursive and entry["kind"] == "dir":
                pending.append(relative)
    entries.sort(key=lambda entry: entry["path"])
    # Through standard output: a long listing does not fit the outcome's bound.
    _write_all(1, json.dumps(entries).encode("ascii"))
    return {}


def remove_tree(path):
    """Remove a directory tree, directories of mode 000 included; never follows a link.

    Directories found inside are moved up to the top one first, so that neither the depth that a hostile process made
    nor the length of its paths matters, and two descriptors are enough.
    """
    try:
        top = _open_dir(path, None)
    except FileNotFoundError:
        return
    try:
        moved = 0
        pending = os.listdir(top)
        while pending:
            name = pending.pop()
            if not _is_dir(name, top):
                os.unlink(name, dir_fd=top)
                continue
            inner = _open_dir(name, top)
            try:
                for child in os.listdir(inner):
                    if not _is_dir(child, inner):
                        os.unlink(child, dir_fd=inner)
                        continue
                    os.close(_open_dir(child, inner))
                    moved += 1
                    hoisted = ".hermes-removing-%d" % moved
                    os.rename(child, hoisted, src_dir_fd=inner, dst_dir_fd=top)
                    pending.append(hoisted)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _is_dir(name, dir_fd):
    return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)


def _open_dir(path, dir_fd):
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, dir_fd=dir_fd)
    except PermissionError:
        os.chmod(path, 0o700, dir_fd=dir_fd)
        fd = os.open(path, flags, dir_fd=dir_fd)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


def _remove(path, recursive):
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif recursive:
        remove_tree(path)
    else:
        os.rmdir(path)
    return {}


def _tar_in(path):
    os.makedirs(path, exist_ok=True)
    root = os.path.realpath(path)
    with os.fdopen(os.dup(0), "rb") as source, tarfile.open(fileobj=source, mode="r|*") as archive:
        for member in archive:
            _extract(archive, member, root)
        # The writer must not get a broken pipe for the padding behind the last member.
        while source.read(_BLOCK):
            pass
    return {}


def _extract(archive, member, root):
    name = os.path.normpath(member.name)
    if name.startswith("/") or name == ".." or name.startswith("../"):
        raise Refused("invalid", "a member of the archive leaves the directory: %r" % member.name)
    target = os.path.join(root, name)
    folder = os.path.realpath(os.path.dirname(target)) if name != "." else root
    if folder != root and not folder.startswith(root + os.sep):
        raise Refused("invalid", "a member of the archive leaves the directory by a link: %r" % member.name)
    if member.isdir():
        if os.path.islink(target):
            raise Refused("invalid", "a directory of the archive is a link here: %r" % member.name)
        os.makedirs(target, exist_ok=True)
        os.chmod(target, (member.mode & 0o777) | 0o700)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        os.unlink(target)
    if member.issym():
        os.symlink(member.linkname, target)
    elif member.islnk():
        origin = os.path.realpath(os.path.join(root, member.linkname))
        if not origin.startswith(root + os.sep):
            raise Refused("invalid", "a hard link of the archive leaves the directory: %r" % member.name)
        os.link(origin, target)
    elif member.isreg():
        _extract_file(archive, member, target)
    else:
        raise Refused("invalid", "a device or pipe in the archive: %r" % member.name)


def _extract_file(archive, member, target):
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, (member.mode & 0o777) | 0o600)
    try:
        source = archive.extractfile(member)
        left = member.size
        while left:
            data = source.read(min(_BLOCK, left))
            if not data:
                raise Refused("invalid", "the archive is cut off in %r" % member.name)
            _write_all(fd, data)
            left -= len(data)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)


def _tar_out(path, max_bytes):
    if not os.path.isdir(path):
        os.listdir(path)
    total = 0
    with os.fdopen(os.dup(1), "wb") as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for relative in _walk(path):
            full = os.path.join(path, relative)
            try:
                member = archive.gettarinfo(full, arcname=relative)
            except OSError:
                continue
            if member is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            total += 512 + member.size
            if total > max_bytes:
                raise Refused("too_large", "more than %d bytes: %s" % (max_bytes, path))
            if member.isreg():
                with open(full, "rb") as source:
                    archive.addfile(member, source)
            else:
                archive.addfile(member)
    return {}


def _walk(path):
    """Relative paths below `path`, directories before what is in them, in a stable order; links are not followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        if prefix:
            yield prefix
        full = os.path.join(path, prefix) if prefix else path
        if os.path.islink(full) and prefix:
            continue
        if not os.path.isdir(full):
            continue
        try:
            names = os.listdir(full)
        except OSError:
            if not prefix:
                raise
            continue
        pending.extend(os.path.join(prefix, name) for name in sorted(names, reverse=True))


_OPERATIONS = {
    "read": _read,
    "write": _write,
    "stat": _stat,
    "list": _list,
    "remove": _remove,
    "tar_in": _tar_in,
    "tar_out": _tar_out,
}
