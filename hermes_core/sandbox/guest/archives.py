"""Tar streams in and out of a directory: nothing leaves it, whatever running processes change meanwhile."""

from __future__ import annotations

import os
import stat
import tarfile

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

BLOCK = 256 << 10


class Refused(Exception):
    """The operation can't be done; `code` is a stable word for why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# --- in -------------------------------------------------------------------------------------------------------------


def unpack(path: str) -> dict[str, Any]:
    """Unpack a tar stream from standard input, plain or compressed, below `path`."""
    os.makedirs(path, exist_ok=True)
    root = os.path.realpath(path)
    with os.fdopen(os.dup(0), "rb") as source:
        try:
            with tarfile.open(fileobj=source, mode="r|*") as archive:
                for member in archive:
                    _extract(archive, member, root)
        except (tarfile.TarError, EOFError) as error:
            raise Refused("invalid", "not a tar archive, or cut off: %s" % error) from error
        except OSError:
            raise
        except Exception as error:  # the decompressors have errors of their own, in modules that may not be there
            raise (error if isinstance(error, Refused) else Refused("invalid", "not readable: %s" % error)) from error
        # The writer must not get a broken pipe for the padding behind the last member.
        while source.read(BLOCK):
            pass
    return {}


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    name = os.path.normpath(member.name)
    if name.startswith("/") or name == ".." or name.startswith("../"):
        raise Refused("invalid", "a member of the archive leaves the directory: %r" % member.name)
    target = os.path.join(root, name) if name != "." else root
    folder = os.path.realpath(os.path.dirname(target)) if target != root else root
    if not _is_within(folder, root):
        raise Refused("invalid", "a member of the archive leaves the directory by a link: %r" % member.name)
    if member.isdir():
        if os.path.islink(target):
            raise Refused("invalid", "a directory of the archive is a link here: %r" % member.name)
        os.makedirs(target, exist_ok=True)
        os.chmod(target, (member.mode & 0o777) | 0o700)
        return
    if target == root:
        raise Refused("invalid", "a member of the archive has no name: %r" % member.name)
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(target):
        os.unlink(target)
    if member.issym():
        os.symlink(member.linkname, target)
    elif member.islnk():
        origin = os.path.realpath(os.path.join(root, member.linkname))
        if not _is_within(origin, root):
            raise Refused("invalid", "a hard link of the archive leaves the directory: %r" % member.name)
        os.link(origin, target)
    elif member.isreg():
        _extract_file(archive, member, target)
    else:
        raise Refused("invalid", "a device or pipe in the archive: %r" % member.name)


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _extract_file(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, (member.mode & 0o777) | 0o600)
    try:
        source = archive.extractfile(member)
        left = member.size
        while source is not None and left:
            data = source.read(min(BLOCK, left))
            if not data:
                raise Refused("invalid", "the archive is cut off in %r" % member.name)
            write_all(fd, data)
            left -= len(data)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)


# --- out ------------------------------------------------------------------------------------------------------------


def pack(path: str, max_bytes: int) -> dict[str, Any]:
    """A plain tar of what is below `path` to standard output. What can't be read is left out, as are devices."""
    total = 0
    sink = os.fdopen(os.dup(1), "wb")
    with sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for relative in _walk(path):
            try:
                member, source = _member(archive, os.path.join(path, relative), relative)
            except OSError:
                continue
            if member is None:
                continue
            total += tarfile.BLOCKSIZE + member.size
            if total > max_bytes:
                raise Refused("too_large", "more than %d bytes: %s" % (max_bytes, path))
            if source is None:
                archive.addfile(member)
            else:
                with source:
                    archive.addfile(member, _Padded(source))  # type: ignore[arg-type]
    return {}


def _member(archive: tarfile.TarFile, full: str, name: str) -> tuple[tarfile.TarInfo | None, BinaryIO | None]:
    """The header for a path, and its open file if it is one; opened so that a pipe in its place can't hold us."""
    source = None
    if stat.S_ISREG(os.lstat(full).st_mode):
        source = os.fdopen(os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    member: tarfile.TarInfo | None = archive.gettarinfo(full, arcname=name, fileobj=source)
    if member is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        member = None
    else:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
    if source is not None and (member is None or not member.isreg()):
        source.close()
        source = None
    return member, source


class _Padded:
    """A file that is being changed: what is missing at its end reads as zeros, so that the archive stays whole."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def read(self, size: int) -> bytes:
        return self._source.read(size).ljust(size, b"\0")


def _walk(path: str) -> Iterator[str]:
    """Relative paths below `path`, directories before what is in them, in a stable order; links are not followed."""
    pending = sorted(os.listdir(path), reverse=True)
    while pending:
        relative = pending.pop()
        yield relative
        full = os.path.join(path, relative)
        try:
            if stat.S_ISDIR(os.lstat(full).st_mode):
                pending.extend(os.path.join(relative, name) for name in sorted(os.listdir(full), reverse=True))
        except OSError:
            continue
