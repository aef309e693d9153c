"""The context of a reward function: commands and files of the rollout's slot, under the names that users know."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from hermes_core.errors import CommandError
from hermes_core.handles import RolloutHandle
from hermes_core.rollout.unawaited import Calls, must_await
from hermes_core.sandbox.commands import MAX_FILE_BYTES

_NO_SUCH_NAME = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""Error numbers for names that a slot can have but this host can't, because its paths are shorter or its file system
differs."""

PART = 16 << 20
"""Number of bytes of a file that are transferred at a time."""

MAX_DIR_BYTES = 1 << 30
"""Maximum number of bytes of a directory, or of a file copied to this host's disk."""

PIECE = 1 << 20
"""Number of bytes of a file that are unpacked at a time."""

MAX_NAMES = 1000
"""Maximum number of names in the report of what was left out of a directory."""

_awaited = must_await("ctx.")


class ToolContext:
    """The slot of one rollout, for `compute_reward`, which is called after the agent's processes are dead.

    Bytes are transferred unchanged in both directions, up to a limit. A failed operation (no such file, too large) is
    reported in the result, under `error`. An `InfraError` is raised, and never becomes a reward.
    """

    def __init__(self, rollout: RolloutHandle) -> None:
        self.task_id = rollout.trajectory_id
        """The rollout's trajectory id."""
        self.rollout = rollout
        """The same slot with all methods for environment hooks: fresh slots, diffs, prepared directories."""
        self.calls = Calls()
        """Calls of this object's methods that were not awaited."""

    @_awaited
    async def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:  # noqa: ASYNC109 - the known name
        """Run a shell command. Return `exit_code` (124 after the time limit) and `output`, including standard error."""
        try:
            done = await self.rollout.commands.run(command, timeout_s=timeout, merge_stderr=True)
        except CommandError as error:
            return {"exit_code": -1, "output": "", "error": str(error)}
        return {"exit_code": done.returncode, "output": done.text}

    @_awaited
    async def read_file(self, path: str) -> dict[str, Any]:
        """Read a text file. Return `content`, with U+FFFD for invalid UTF-8, and `size` in bytes; or `error`."""
        try:
            data = await self.read_bytes(path)
        except CommandError as error:
            return {"error": str(error)}
        return {"content": data.decode("utf-8", "replace"), "size": len(data)}

    @_awaited
    async def read_bytes(self, path: str) -> bytes:
        """Read a whole file. Raise `CommandError` if there is no such file, or the file is larger than 64 MiB."""
        return b"".join([part async for part in self._parts(path, MAX_FILE_BYTES)])

    @_awaited
    async def write_file(self, path: str, content: str | bytes) -> dict[str, Any]:
        """Write a file, replacing any old one and making missing directories. Return `success` and `bytes`; or
        `error`."""
        data = content.encode() if isinstance(content, str) else content
        return await _result_of(self._write(path, data))

    @_awaited
    async def upload_file(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Copy a file of this host into the slot. Return `success` and `bytes`; or `error`."""
        return await _result_of(self._write(remote, await asyncio.to_thread(Path(local).read_bytes)))

    @_awaited
    async def upload_dir(self, local: str | Path, remote: str) -> dict[str, Any]:
        """Copy a directory of this host into the slot, with links as links. Return `success` and `bytes`; or
        `error`."""
        packed = await asyncio.to_thread(_pack, Path(local))
        return await _result_of(self._unpack(remote, packed))

    @_awaited
    async def download_file(self, remote: str, local: str | Path) -> dict[str, Any]:
        """Copy a file of the slot to this host. Return `success` and `bytes`; or `error`."""
        return await _result_of(self._fetch(remote, Path(local)))

    @_awaited
    async def download_dir(self, remote: str, local: str | Path) -> dict[str, Any]:
        """Copy a directory of the slot to this host. Return `success`, `bytes` and `left_out`; or `error`.

        Links, devices and names that this host can't have are left out, and `left_out` names them. Nothing is written
        outside of `local`.
        """
        folder = Path(local)
        with await asyncio.to_thread(_scratch_beside, folder) as packed:

            async def keep(piece: bytes) -> None:
                await asyncio.to_thread(packed.write, piece)

            try:
                size = await self.rollout.commands.tar_out_to(keep, remote, max_bytes=MAX_DIR_BYTES)
                left_out = await asyncio.to_thread(_unpack_into, packed, folder)
            except (CommandError, tarfile.TarError, ValueError, OverflowError) as error:
                return {"success": False, "error": str(error)}
        return {"success": True, "bytes": size, "left_out": left_out}

    @_awaited
    async def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Return lines of the slot's files that match a pattern, in the form of the tool `search_files`."""
        found: dict[str, Any] = json.loads(await self.call_tool("search_files", {"pattern": query, "path": path}))
        return found

    @_awaited
    async def call_tool(self, name: str, args: Mapping[str, Any] | None = None) -> str:
        """Call any tool that runs in a sandbox. Return the answer that a model would get, as JSON text."""
        result = await self.rollout.exec_tool(name, dict(args or {}))
        return json.dumps(result.to_tool_result(), ensure_ascii=False, default=str)

    @_awaited
    async def cleanup(self) -> None:
        """Kill everything that runs in the slot."""
        await self.rollout.kill_everything()

    async def _write(self, path: str, data: bytes) -> int:
        for begin in range(0, max(len(data), 1), PART):
            await self.rollout.commands.write_file(path, data[begin : begin + PART], append=begin > 0)
        return len(data)

    async def _unpack(self, path: str, data: bytes) -> int:
        await self.rollout.commands.tar_in(path, data)
        return len(data)

    async def _fetch(self, path: str, local: Path) -> int:
        size = 0
        async for part in self._parts(path, MAX_DIR_BYTES):
            await asyncio.to_thread(_write, local, part, append=size > 0)
            size += len(part)
        return size

    async def _parts(self, path: str, most: int) -> AsyncIterator[bytes]:
        """Yield a file in parts; an empty file is one empty part. Raise `CommandError` for more than `most` bytes: an
        agent can make a file of any size at no cost."""
        size = 0
        while True:
            part = await self.rollout.commands.read_file(path, offset=size, limit=PART)
            size += len(part.data)
            if max(size, part.size) > most:
                raise CommandError(f"{path} has {part.size} bytes, more than {most}", code="too_large")
            yield part.data
            if not part.data or size >= part.size:
                return


async def _result_of(work: Any) -> dict[str, Any]:
    try:
        return {"success": True, "bytes": await work}
    except CommandError as error:
        return {"success": False, "error": str(error)}


def _write(path: Path, data: bytes, *, append: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab" if append else "wb") as file:
        file.write(data)


def _pack(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def _scratch_beside(folder: Path) -> IO[bytes]:
    """Return an unnamed temporary file on the disk of the folder, because /tmp may be in memory."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    return tempfile.TemporaryFile(dir=there)


def _unpack_into(packed: IO[bytes], folder: Path) -> list[str]:
    """Unpack files and directories. Return the names of entries left out: links, devices, and paths outside of
    `folder`."""
    left_out: list[str] = []
    more = 0
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # or the archive would keep every member
            parts = PurePosixPath(member.name).parts
            outside = ".." in parts or member.name.startswith("/")
            if outside or not _unpack(archive, member, folder.joinpath(*parts)):
                if len(left_out) < MAX_NAMES:
                    left_out.append(member.name)
                else:
                    more += 1
    return [*left_out, f"… and {more} more"] if more else left_out


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> bool:
    """Unpack a member. Return False if it is neither a file nor a directory, or this host can't have its name."""
    try:
        if member.isdir():
            target.mkdir(parents=True, exist_ok=True)
        elif member.isreg() and not member.issparse():  # a sparse file can be larger than the whole archive
            content = archive.extractfile(member)
            assert content is not None  # not None, as this is a regular file
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file, PIECE)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
        else:
            return False
    except OSError as error:
        if error.errno not in _NO_SUCH_NAME:
            raise
        return False
    return True
