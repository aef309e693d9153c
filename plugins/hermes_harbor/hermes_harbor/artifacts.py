"""Takes a task's artifacts out of the agent's sandbox.

An archive from a sandbox where the agent is root can hold anything. So the size of archives is bounded, and they are
never unpacked on the driver. They are written anew, only with plain files, directories and harmless links, whose mode
and owner we set.
"""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from hermes_core import CommandError, SlotCommands, SlotHandle
from hermes_harbor.config import HarborConfig
from hermes_harbor.container import as_user, kinds
from hermes_harbor.task_toml import Artifact, Collect

PUBLISHED = "/logs/artifacts"
"""The directory from which artifacts are taken in any case."""

SHOWN = 500
"""Number of last characters of a command's output that the record keeps."""

Member = tuple[tarfile.TarInfo, bytes]


class _Refused(Exception):
    """An artifact can't be taken; the message is the reason."""


@dataclass(frozen=True)
class Taken:
    """An artifact: a tar of a directory's contents, or of one file."""

    source: str
    """The absolute path in the sandbox."""
    kept_at: str
    """The relative path among the kept artifacts."""
    is_dir: bool
    archive: bytes


@dataclass
class Collection:
    """The artifacts of a task or a step."""

    taken: list[Taken] = field(default_factory=list)
    manifest: list[dict[str, Any]] = field(default_factory=list)
    """For each artifact its `source`, and its `bytes` or an `error`; also an entry for each command that failed."""


@dataclass
class _Left:
    """The number of bytes and of files that may still be taken."""

    bytes: int
    files: int

    def take(self, size: int) -> None:
        """Subtract a file of this size.

        Raises:
            _Refused: the file exceeds the number of bytes or of files that may still be taken.
        """
        if size > self.bytes or not self.files:
            raise _Refused("too large, or too many files")
        self.bytes, self.files = self.bytes - size, self.files - 1


async def collect_artifacts(
    leased: SlotHandle, hooks: Sequence[Collect], artifacts: Sequence[Artifact], workdir: str, config: HarborConfig
) -> Collection:
    """Run the commands of `verifier.collect`, then take the artifacts. Failures are only listed in the manifest,
    because the tests notice missing artifacts."""
    collection = Collection()
    for hook in hooks:
        commands = as_user(leased, hook.user)
        result = await commands.run(hook.command, timeout_s=hook.timeout_sec, merge_stderr=True)
        if not result.ok:
            reason = "time limit" if result.timed_out else f"status {result.returncode}"
            failure = {"command": hook.command, "error": reason, "output": result.text.strip()[-SHOWN:]}
            collection.manifest.append(failure)
    left = _Left(config.max_artifact_bytes, config.max_artifact_files)
    for artifact in _with_published(artifacts):
        source = str(PurePosixPath(workdir) / artifact.source)
        try:
            if PurePosixPath(source).is_relative_to("/tests") or source == "/":
                raise _Refused("it would replace the tests")
            taken = await _take(leased.commands, artifact, source, left)
        except _Refused as error:
            collection.manifest.append({"source": source, "error": str(error)})
            continue
        collection.taken.append(taken)
        collection.manifest.append({"source": source, "bytes": len(taken.archive)})
    return collection


def _with_published(artifacts: Sequence[Artifact]) -> list[Artifact]:
    """Return the artifacts, and `PUBLISHED` if it is not among them."""
    if any(each.source.rstrip("/") == PUBLISHED for each in artifacts):
        return [*artifacts]
    return [Artifact(source=PUBLISHED), *artifacts]


async def _take(commands: SlotCommands, artifact: Artifact, source: str, left: _Left) -> Taken:
    """Take an artifact from the sandbox.

    Raises:
        _Refused: the artifact is missing, too large, or neither a file nor a directory.
    """
    [kind] = await kinds(commands, source)
    try:
        if kind == "dir":
            data = await commands.tar_out(source, max_bytes=left.bytes + 2048 * (left.files + 1))
            archive = await asyncio.to_thread(_rewrite, data, artifact.exclude, left)
        elif kind == "file":
            content = await commands.read_file(source, limit=left.bytes + 1)
            left.take(len(content.data))
            archive = _pack([_file(PurePosixPath(source).name, content.data, executable=True)])
        else:
            raise _Refused("missing" if kind == "none" else f"it is a {kind}, and neither a file nor a directory")
    except CommandError as error:
        raise _Refused(error.message) from error
    return Taken(source, artifact.destination or source.lstrip("/"), kind == "dir", archive)


def _rewrite(archive: bytes, exclude: Sequence[str], left: _Left) -> bytes:
    """Write a sandbox's archive anew, with its harmless members that are not excluded. Blocking.

    Raises:
        _Refused: the data are no archive, or too large.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            return _pack(_harmless(tar, exclude, left))
    except _Refused:
        raise
    except Exception as error:  # `tarfile` raises errors of many kinds for numbers out of range
        raise _Refused(f"no archive: {error}") from error


def _harmless(tar: tarfile.TarFile, exclude: Sequence[str], left: _Left) -> Iterator[Member]:
    """Yield the files, directories and links of an archive that do not lead out of its directory, and whose path does
    not go through a link."""
    links: set[PurePosixPath] = set()
    for member in tar:
        path = PurePosixPath(member.name)
        if not path.parts or path.is_absolute() or ".." in path.parts or links & {path, *path.parents}:
            continue
        if _is_excluded(path, exclude):
            continue
        clean, content = tarfile.TarInfo(str(path)), b""
        if member.isdir():
            clean.type, clean.mode = tarfile.DIRTYPE, 0o755
        elif member.issym():
            target = PurePosixPath(member.linkname)
            if target.is_absolute() or ".." in target.parts:
                continue
            links.add(path)
            clean.type, clean.linkname = tarfile.SYMTYPE, str(target)
        elif (member.isreg() or member.islnk()) and not member.issparse():
            file = tar.extractfile(member)
            content = b"" if file is None else file.read(left.bytes + 1)
            clean, _ = _file(str(path), content, executable=bool(member.mode & 0o111))
        else:
            continue
        left.take(len(content))
        yield clean, content


def _file(name: str, content: bytes, *, executable: bool) -> Member:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o755 if executable else 0o644
    return member, content


def _is_excluded(path: PurePosixPath, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the end of the path, or of a directory above it, as in tar's `--exclude`."""
    return any(fnmatchcase(f"/{path}/", f"*/{pattern.strip('/').removeprefix('./')}/*") for pattern in patterns)


def _pack(members: Iterable[Member]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


async def lay_out(commands: SlotCommands, collection: Collection) -> None:
    """Put the artifacts into another sandbox, each at its source path."""
    for each in collection.taken:
        folder = each.source if each.is_dir else str(PurePosixPath(each.source).parent)
        await commands.tar_in(folder, each.archive)


def keep(collection: Collection, folder: Path, name: str) -> Path | None:
    """Write the artifacts to a tar in a folder, and return its path; None if there are no artifacts. Blocking.

    Args:
        name: the name of the rollout, and of the step if there is one. Characters that a file's name can't have are
            replaced.
    """
    if not collection.taken:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.tar"
    path.write_bytes(_pack(_members(collection)))
    return path


def _members(collection: Collection) -> Iterator[Member]:
    for each in collection.taken:
        with tarfile.open(fileobj=io.BytesIO(each.archive), mode="r:") as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isreg() else None
                member.name = f"{each.kept_at}/{member.name}" if each.is_dir else each.kept_at
                yield member, b"" if file is None else file.read()
