"""Unpacks tar streams into a directory, and packs a directory into a tar stream.

Nothing outside the directory is read or written, whatever running processes change meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

BLOCK = 256 << 10
_MAX_FOLDERS = 10_000

COMPRESSIONS = ("", "gz", "bz2", "xz")
"""How a tar stream may be compressed. The sender says how; it can't be guessed, as a file name in a plain archive may
begin like a compressed one."""

_NOT_READABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENAMETOOLONG,
)
"""With these errors, `pack` leaves a file out. With others (no descriptors, no memory, a lease) it fails."""


class ArchiveRefused(Exception):
    """An operation on files is refused; `code` is the stable code for the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _in_archive(path: str) -> str:
    """Return a path as archives store it: its bytes decoded as UTF-8, whatever encoding this interpreter uses."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def _on_disk(name: str) -> str:
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# --- in -------------------------------------------------------------------------------------------------------------


def unpack(path: str, compression: str = "") -> dict[str, Any]:
    """Unpack a tar stream from standard input below `path`. Only `compression` decides how it is decompressed."""
    if compression not in COMPRESSIONS:
        raise ArchiveRefused("invalid", "unknown compression: %r" % compression)
    os.makedirs(path, exist_ok=True)
    folders = _Folders(os.path.realpath(path))
    mode: Any = "r|" + compression
    with os.fdopen(os.dup(0), "rb") as source:
        try:
            with tarfile.open(
                fileobj=source, mode=mode, bufsize=BLOCK, encoding="utf-8", errors="surrogateescape"
            ) as archive:
                for member in archive:
                    _extract(archive, member, folders)
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every member
        except (tarfile.TarError, EOFError) as error:
            raise ArchiveRefused("invalid", "not a tar archive, or cut off: %s" % error) from error
        except OSError:
            raise
        except Exception as error:  # decompressors have their own errors, in modules that may be missing
            raise (
                error if isinstance(error, ArchiveRefused) else ArchiveRefused("invalid", "not readable: %s" % error)
            ) from error
        # Read the padding behind the last member too, or the writer gets a broken pipe.
        while source.read(BLOCK):
            pass
    return {}


class _Folders:
    """Resolves links in the directories of an archive's members.

    A directory with no link in its path is resolved only once, because resolving each member's path from the top would
    take time cubic in its depth. The result stays true, because no member of the archive can replace a directory by a
    link.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._resolved = {root}

    def resolve(self, folder: str) -> str:
        """Return the real path of a directory below the root. The caller makes the directory if it is missing."""
        parents = []
        parent = folder
        while parent not in self._resolved:
            parents.append(parent)
            parent = os.path.dirname(parent)
        if any(map(os.path.islink, reversed(parents))):
            return os.path.realpath(folder)
        if len(self._resolved) > _MAX_FOLDERS:
            self._resolved = {self.root}
        self._resolved.update(parents)
        return folder


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folders: _Folders) -> None:
    root = folders.root
    name = os.path.normpath(_on_disk(member.name))
    if name.startswith("/") or name == ".." or name.startswith("../"):
        raise ArchiveRefused("invalid", "a member of the archive leaves the directory: %r" % member.name)
    target = os.path.join(root, name) if name != "." else root
    folder = folders.resolve(os.path.dirname(target)) if target != root else root
    if not _is_within(folder, root):
        raise ArchiveRefused("invalid", "a member of the archive leaves the directory by a link: %r" % member.name)
    if member.size < 0:
        raise ArchiveRefused("invalid", "a member of the archive has a negative size: %r" % member.name)
    if member.isdir():
        if os.path.islink(target):
            raise ArchiveRefused("invalid", "a directory of the archive is a link here: %r" % member.name)
        os.makedirs(target, exist_ok=True)
        os.chmod(target, (member.mode & 0o777) | 0o700)
        return
    if target == root:
        raise ArchiveRefused("invalid", "a member of the archive has no name: %r" % member.name)
    os.makedirs(folder, exist_ok=True)
    if os.path.lexists(target):
        os.unlink(target)
    if member.issym():
        os.symlink(_on_disk(member.linkname), target)
    elif member.islnk():
        origin = os.path.realpath(os.path.join(root, _on_disk(member.linkname)))
        if not _is_within(origin, root):
            raise ArchiveRefused("invalid", "a hard link of the archive leaves the directory: %r" % member.name)
        os.link(origin, target)
    elif member.isreg():
        _extract_file(archive, member, target)
    else:
        raise ArchiveRefused("invalid", "a device or pipe in the archive: %r" % member.name)


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _extract_file(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, (member.mode & 0o777) | 0o600)
    try:
        source = archive.extractfile(member)
        size = member.size
        while source is not None and size:
            data = source.read(min(BLOCK, size))
            if not data:
                raise ArchiveRefused("invalid", "the archive is cut off in %r" % member.name)
            write_all(fd, data)
            size -= len(data)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)


# --- out ------------------------------------------------------------------------------------------------------------


def pack(path: str, max_bytes: int) -> dict[str, Any]:
    """Write an uncompressed tar of the directory `path` to standard output, without devices and unreadable files.

    A file with several names is stored once; its other names become hard links.
    """
    sink = os.fdopen(os.dup(1), "wb")
    with sink, tarfile.open(
        fileobj=sink,
        mode="w|",
        bufsize=BLOCK,
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        for relative in _walk(path, max_bytes // tarfile.BLOCKSIZE):
            try:
                member, source = _member(archive, os.path.join(path, relative), _in_archive(relative))
            except OSError as error:
                _raise_unless_unreadable(error)
                continue
            if member is None:
                continue
            # Count the bytes written, because headers of long names and link targets can be larger than the files.
            if archive.offset + tarfile.BLOCKSIZE + member.size > max_bytes:
                raise ArchiveRefused("too_large", "more than %d bytes: %s" % (max_bytes, path))
            if source is None:
                archive.addfile(member)
            else:
                with source:
                    archive.addfile(member, _Padded(source))  # type: ignore[arg-type]
            archive.members = []  # type: ignore[attr-defined]  # else it keeps every member
    return {}


def _member(archive: tarfile.TarFile, full: str, name: str) -> tuple[tarfile.TarInfo | None, BinaryIO | None]:
    """Return the header of a path (None if it is left out), and the open file if it is a regular file."""
    source = None
    if stat.S_ISREG(os.lstat(full).st_mode):  # non-blocking, because a pipe may take its place meanwhile
        source = os.fdopen(os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
    member: tarfile.TarInfo | None = archive.gettarinfo(full, arcname=name, fileobj=source)
    if member is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        member = None
    else:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        if member.issym():
            member.linkname = _in_archive(member.linkname)
    if source is not None and (member is None or not member.isreg()):
        source.close()
        source = None
    return member, source


class _Padded:
    """A file that may shrink while it is read. Missing bytes are read as zeros, so that the archive stays valid."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def read(self, size: int) -> bytes:
        return self._source.read(size).ljust(size, b"\0")


def _raise_unless_unreadable(error: OSError) -> None:
    """Raise the error again, unless it only means that this file can't be read."""
    if error.errno not in _NOT_READABLE:
        raise error


def _walk(path: str, most: int) -> Iterator[str]:
    """Yield relative paths below `path` in a stable order, parents first. Links are not followed."""
    pending = _names(path, "", most)
    most -= len(pending)
    while pending:
        relative = pending.pop()
        yield relative
        full = os.path.join(path, relative)
        try:
            names = _names(full, relative, most) if stat.S_ISDIR(os.lstat(full).st_mode) else []
        except OSError as error:
            _raise_unless_unreadable(error)
            continue
        most -= len(names)
        pending += names


def _names(folder: str, relative: str, most: int) -> list[str]:
    """Return the relative paths of a directory's entries in reverse order. More than `most` raise ArchiveRefused."""
    paths: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(paths) >= most:
                raise ArchiveRefused("too_large", "too many files: %s" % folder)
            paths.append(os.path.join(relative, entry.name))
    return sorted(paths, reverse=True)
