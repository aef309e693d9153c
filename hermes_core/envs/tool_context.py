"""What a reward function works with: commands and files of the rollout's own slot, under the names that users know."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hermes_core.errors import CommandError

if TYPE_CHECKING:
    from hermes_core.envs.rollout import Rollout

PART = 16 << 20
"""Bytes of a file that are carried at a time."""

MAX_DIR_BYTES = 1 << 30
"""Bytes of a directory that is carried, at most."""


class ToolContext:
    """The slot of one rollout, for `compute_reward`. What the agent started is dead when it is called.

    Bytes go both ways as they are, whatever there is of them. What fails for a reason of its own (no such file) is in
    the result, under `error`; an `InfraError` is raised, and is never a reward.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.task_id = rollout.trajectory_id
        """The rollout's trajectory id."""
        self.rollout = rollout
        """The same slot with all that environment hooks can do: fresh slots, diffs, prepared directories."""

    async def terminal(self, command: str, timeout: float = 180) -> dict[str, Any]:  # noqa: ASYNC109 - the known name
        """Run a shell command; `exit_code` (124 after the time limit) and `output`, standard error included."""
        try:
            done = await self.rollout.commands.run(command, timeout_s=timeout, merge_stderr=True)
        except CommandError as error:
            return {"exit_code": -1, "output": "", "error": str(error)}
        return {"exit_code": done.returncode, "output": done.text}

    async def read_file(self, path: str) -> dict[str, Any]:
        """A text file: `content`, with U+FFFD for what is not UTF-8, and `size` in bytes; or `error`."""
        try:
            data = await self.read_bytes(path)
        except CommandError as error:
            return {"error": str(error)}
        return {"content": data.decode("utf-8", "replace"), "size": len(data)}

    async def read_bytes(self, path: str) -> bytes:
        """A whole file. `CommandError` if there is none."""
        whole = bytearray()
        while True:
            part = await self.rollout.commands.read_file(path, offset=len(whole), limit=PART)
            whole += part.data
            if not part.data or len(whole) >= part.size:
                return bytes(whole)

    async def write_file(self, path: str, content: str | bytes) -> dict[str, Any]:
        """Replace a file, its directories made: `success` and `bytes`; or `error`."""
        data = content.encode() if isinstance(content, str) else content
        return await _told(self._write(path, data))

    async def upload_file(self, local: str | Path, remote: str) -> dict[str, Any]:
        """A file of this host into the slot: `success` and `bytes`; or `error`."""
        return await _told(self._write(remote, await asyncio.to_thread(Path(local).read_bytes)))

    async def upload_dir(self, local: str | Path, remote: str) -> dict[str, Any]:
        """A directory of this host into the slot, links as links: `success` and `bytes`; or `error`."""
        packed = await asyncio.to_thread(_packed, Path(local))
        return await _told(self._unpack(remote, packed))

    async def download_file(self, remote: str, local: str | Path) -> dict[str, Any]:
        """A file of the slot to this host: `success` and `bytes`; or `error`."""
        return await _told(self._fetch(remote, Path(local)))

    async def download_dir(self, remote: str, local: str | Path) -> dict[str, Any]:
        """A directory of the slot to this host: `success`, `bytes` and `left_out`; or `error`.

        Links and devices are left out, and named; nothing lands outside of `local`.
        """
        try:
            packed = await self.rollout.commands.tar_out(remote, max_bytes=MAX_DIR_BYTES)
        except CommandError as error:
            return {"success": False, "error": str(error)}
        left_out = await asyncio.to_thread(_unpacked, packed, Path(local))
        return {"success": True, "bytes": len(packed), "left_out": left_out}

    async def search(self, query: str, path: str = ".") -> dict[str, Any]:
        """Lines of the slot's files that match a pattern, as the tool `search_files` gives them."""
        found: dict[str, Any] = json.loads(await self.call_tool("search_files", {"pattern": query, "path": path}))
        return found

    async def call_tool(self, name: str, args: Mapping[str, Any] | None = None) -> str:
        """Call any tool that runs in a sandbox; what the model would be told, as JSON text."""
        result = await self.rollout.exec_tool(name, dict(args or {}))
        return json.dumps(result.to_tool_result(), ensure_ascii=False, default=str)

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
        data = await self.read_bytes(path)
        await asyncio.to_thread(_write, local, data)
        return len(data)


async def _told(work: Any) -> dict[str, Any]:
    try:
        return {"success": True, "bytes": await work}
    except CommandError as error:
        return {"success": False, "error": str(error)}


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _packed(folder: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def _unpacked(packed: bytes, folder: Path) -> list[str]:
    """Unpack files and directories; the names of what is neither (links, devices) or would land outside."""
    left_out = []
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts
            target = folder.joinpath(*parts)
            if ".." in parts or member.name.startswith("/"):
                left_out.append(member.name)
            elif member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None  # it is a regular file
                _write(target, content.read())
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
            else:
                left_out.append(member.name)
    return left_out
