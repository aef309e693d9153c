"""Images that a backend builds from a folder: what to build, and how the folder is read, hashed and packed.

A folder may come with a repository that nobody has looked at. So links are packed as links and never followed, other
special files are refused, and the number, size and depth of files are limited.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import re
import stat
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hermes_core.errors import ImageError

IGNORE = ".dockerignore"
MAX_IGNORE_BYTES = 64 << 10
MAX_PATTERNS = 500
"""Maximum number of patterns in a `.dockerignore`."""

MAX_DEPTH = 64
"""Maximum number of folders above a file."""

_PIECE = 1 << 20


@dataclass(frozen=True)
class ImageBuild:
    """An image that is built from a folder, once for each content of the folder."""

    folder: Path
    """The build context, whose files the Dockerfile's `COPY` can see, except those that its `.dockerignore` names."""
    dockerfile: str = "Dockerfile"
    """The path of the Dockerfile, relative to the folder."""
    timeout_s: float = 600.0
    """Time limit of the build in seconds."""
    max_bytes: int = 1 << 30
    """Maximum size of the folder's files together."""
    max_files: int = 20_000
    """Maximum number of files and folders in it."""

    def __str__(self) -> str:
        return str(self.folder / self.dockerfile)


Image = str | ImageBuild
"""The name of an image, or the description of an image that is to be built."""


def context_digest(build: ImageBuild) -> str:
    """Return a digest of everything that the build can see: names, modes and contents. Blocking.

    The digest depends neither on the folder's path nor on times and owners of files.

    Raises:
        ImageError: the folder can't be built, for example because it has no Dockerfile or is too large.
    """
    return _read(build, None)


def write_context(build: ImageBuild, file: BinaryIO) -> str:
    """Write the folder as a tar archive, and return its `context_digest`. Blocking.

    Raises:
        ImageError: as `context_digest` does.
    """
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        return _read(build, archive)


def _read(build: ImageBuild, archive: tarfile.TarFile | None) -> str:
    digest = _Digest(build.dockerfile)
    size = 0
    try:
        for name, info in _entries(build):
            entry = _tar_entry(name, info)
            if stat.S_ISREG(info.st_mode):
                size += info.st_size
                if size > build.max_bytes:
                    raise _unfit(build, f"its files have more than {build.max_bytes} bytes", "list in .dockerignore")
                with _open_regular(build.folder / name) as content:
                    digest.add(entry)
                    _copy(entry, _Hashed(content, digest), archive)
                continue
            if stat.S_ISLNK(info.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(build.folder / name)  # noqa: PTH115 - as it is
            elif stat.S_ISDIR(info.st_mode):
                entry.type = tarfile.DIRTYPE
            else:
                raise _unfit(build, f"{name!r} is neither a file, a folder nor a link", "remove it")
            digest.add(entry)
            if archive is not None:
                archive.addfile(entry)
    except OSError as error:
        raise _unfit(build, f"it can't be read: {error}", "check its files and their rights") from error
    return digest.hexdigest()


def _copy(entry: tarfile.TarInfo, content: _Hashed, archive: tarfile.TarFile | None) -> None:
    """Read the content of a file to its end, and add it to the archive if there is one.

    Raises:
        OSError: the file has become shorter.
    """
    if archive is not None:
        archive.addfile(entry, content)  # type: ignore[arg-type]  # it only calls `read`
        return
    size = entry.size
    while size:
        piece = content.read(min(_PIECE, size))
        if not piece:
            raise OSError("a file became shorter while it was read")
        size -= len(piece)


class _Digest:
    """A digest of fields. Each is preceded by its length, so that no two sequences of fields have the same digest."""

    def __init__(self, dockerfile: str) -> None:
        self._hash = hashlib.sha256()
        self._field(dockerfile)

    def add(self, entry: tarfile.TarInfo) -> None:
        """Add the header of a file. `update` adds its content."""
        for value in (entry.name, f"{entry.mode:o}", entry.type.decode(), entry.linkname, str(entry.size)):
            self._field(value)

    def _field(self, value: str) -> None:
        data = value.encode("utf-8", "surrogateescape")
        self._hash.update(b"%d:" % len(data) + data)

    def update(self, data: bytes) -> None:
        """Add a piece of a file's content."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal."""
        return self._hash.hexdigest()


class _Hashed:
    """A file whose content is added to a digest while it is read."""

    def __init__(self, file: BinaryIO, digest: _Digest) -> None:
        self._file = file
        self._digest = digest

    def read(self, size: int) -> bytes:
        """Return the next bytes of the file."""
        piece = self._file.read(size)
        self._digest.update(piece)
        return piece


def _tar_entry(name: str, info: os.stat_result) -> tarfile.TarInfo:
    """Return the header for a file, without its owner."""
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(info.st_mode)
    entry.mtime = max(0, int(info.st_mtime))
    entry.size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    return entry


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Links are not followed, and opening a named pipe does not block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(f"{path} is not a file any more")
    return file


def _entries(build: ImageBuild) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file and folder that the build can see: its path relative to the folder, and its status. The order is
    always the same."""
    _check_dockerfile(build)
    ignored = _Ignored.of(build)
    deadline = time.monotonic() + build.timeout_s
    count, pending = 0, [""]
    while pending:
        names = _names(build, pending.pop(), count)
        count += len(names)
        folders: list[str] = []
        for name in names:
            if time.monotonic() > deadline:
                raise _unfit(build, f"it can't be read within {build.timeout_s:g} s", "shorten its .dockerignore")
            info = os.lstat(build.folder / name)
            is_ignored = ignored.has(name) and name not in (build.dockerfile, IGNORE)
            if not is_ignored:
                yield name, info
            # An ignored folder may hold the Dockerfile, or files that an exception (`!pattern`) includes.
            skips = is_ignored and not ignored.has_exceptions and not build.dockerfile.startswith(f"{name}/")
            if stat.S_ISDIR(info.st_mode) and not skips:
                if name.count("/") >= MAX_DEPTH:
                    raise _unfit(build, f"it has more than {MAX_DEPTH} folders in each other", "flatten it")
                folders.append(name)
        pending += reversed(folders)


def _names(build: ImageBuild, folder: str, count: int) -> list[str]:
    """Return the sorted paths of a folder's entries. Raises ImageError if they and `count` others are too many."""
    names: list[str] = []
    with os.scandir(build.folder / folder) as entries:
        for entry in entries:
            names.append(f"{folder}/{entry.name}" if folder else entry.name)
            if count + len(names) > build.max_files:
                raise _unfit(build, f"it has more than {build.max_files} files", "remove some")
    return sorted(names)


def _check_dockerfile(build: ImageBuild) -> None:
    """Check that the Dockerfile is a regular file in the folder.

    Raises:
        ImageError: it is not.
    """
    path = PurePosixPath(build.dockerfile)
    if path.is_absolute() or ".." in path.parts or str(path) != build.dockerfile:
        raise _unfit(build, f"its Dockerfile {build.dockerfile!r} is not a path in the folder", "name one in it")
    place = build.folder
    for part in path.parts:
        place /= part
        if place.is_symlink():
            raise _unfit(build, f"{place.relative_to(build.folder)} is a link", "put the file there")
    if not place.is_file():
        raise _unfit(build, f"it has no {build.dockerfile}", "write one")


def _unfit(build: ImageBuild, reason: str, hint: str) -> ImageError:
    return ImageError(f"no image can be built of {build.folder}: {reason}", hint=hint)


class _Ignored:
    """The patterns of a `.dockerignore`. The last pattern that matches a path, or a folder above the path, decides.

    `**` stands for any number of folders if it is a whole part of a path; otherwise it is the same as `*`.
    """

    def __init__(self, patterns: list[tuple[bool, tuple[str, ...]]]) -> None:
        self._patterns = patterns
        self.has_exceptions = any(not ignores for ignores, _ in patterns)

    @classmethod
    def of(cls, build: ImageBuild) -> _Ignored:
        """Return the patterns of the folder's `.dockerignore`; none if it has no such file.

        Raises:
            ImageError: the file is too large, or a link.
        """
        place = build.folder / IGNORE
        try:
            with _open_regular(place) as file:
                data = file.read(MAX_IGNORE_BYTES + 1)
        except FileNotFoundError:
            return cls([])
        lines = [line.strip() for line in io.StringIO(data.decode("utf-8-sig", "surrogateescape"))]
        lines = [line for line in lines if line and not line.startswith("#")]
        if len(data) > MAX_IGNORE_BYTES or len(lines) > MAX_PATTERNS:
            raise _unfit(build, f"its {IGNORE} has more than {MAX_PATTERNS} patterns", "shorten it")
        return cls([*filter(None, map(_pattern, lines))])

    def has(self, name: str) -> bool:
        """Return whether the file or folder with this path is ignored."""
        parts = name.split("/")
        return next((ignores for ignores, each in reversed(self._patterns) if _covers(each, parts)), False)


def _pattern(line: str) -> tuple[bool, tuple[str, ...]] | None:
    """Return (whether a line ignores paths, False for an exception `!…`; the parts of its pattern); None if the pattern
    is empty."""
    ignores = not line.startswith("!")
    path = os.path.normpath(line.removeprefix("!").strip()).lstrip("/")
    if path in ("", "."):
        return None
    return ignores, tuple(_part(part) for part in path.split("/"))


def _part(part: str) -> str:
    """Translate a part of a pattern to the syntax of `fnmatch`."""
    return re.sub(r"\\(.)", r"[\1]", part).replace("[^", "[!")


def _covers(pattern: tuple[str, ...], parts: list[str]) -> bool:
    """Return whether the pattern matches a path, or a folder above it."""
    places, end = _with_skipped({0}, pattern), len(pattern)
    for part in parts:
        reached = {at + (pattern[at] != "**") for at in places if fnmatch.fnmatchcase(part, pattern[at])}
        if end in reached or (end - 1 in reached and pattern[-1] == "**" and end - 1 in places):
            return True
        places = _with_skipped(reached, pattern)
    return False


def _with_skipped(places: set[int], pattern: tuple[str, ...]) -> set[int]:
    """Return `places` (indices in a pattern) with the index after each `**` added: a `**` may stand for no folder."""
    result = set(places)
    for at, part in enumerate(pattern[:-1]):
        if at in result and part == "**":
            result.add(at + 1)
    return result
