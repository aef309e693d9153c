"""The commands of a slot that is root, run as another user of its system: implements `SlotCommands` on those of root.

Works with a guest and without one, as it needs only `sh`, and `setpriv` or `su`. Files are read and written by the
scripts of the direct mode, with the user's rights.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import (
    MAX_FILE_BYTES,
    OUTPUT_LIMIT,
    CommandResult,
    Compression,
    FileContent,
    FileStat,
    LogChunk,
    ProcessStatus,
    SlotCommands,
    WindowSize,
)
from hermes_core.sandbox.direct import files, sh

MAX_COMMAND = 100_000
"""Maximum number of bytes of a command: all of it is one word of a command line."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,99})?")

# Arguments: a user as Docker writes it, and a command line. Like there, a number need not be that of a user, and with a
# group there are no others. Root runs this with variables that the item may have set, so no program is looked for in
# PATH. `setpriv` becomes the command, so that signals and the exit status are its own. Where it is busybox's, it can't
# do that.
_SWITCH = """
name=${1%%:*} group=${1#"${1%%:*}"} found= groups=--init-groups
group=${group#:}
while IFS=: read -r each _ uid gid _ home _; do
  if [ "$each" = "$name" ] || [ "$uid" = "$name" ]; then found=$each; break; fi
done </etc/passwd
if [ -z "$found" ]; then
  case $name in *[!0-9]*) echo "there is no user $name" >&2; exit 126 ;; esac
  found=$name uid=$name gid=0 home=/ groups=--clear-groups
fi
if [ -n "$group" ]; then
  gid= groups=--clear-groups
  while IFS=: read -r each _ id _; do
    if [ "$each" = "$group" ] || [ "$id" = "$group" ]; then gid=$id; break; fi
  done </etc/group
  case ${gid:-$group} in *[!0-9]*) echo "there is no group $group" >&2; exit 126 ;; esac
  gid=${gid:-$group}
fi
HOME=$home USER=$found LOGNAME=$found TMPDIR=/tmp
export HOME USER LOGNAME TMPDIR
umask 022
if [ -x /usr/bin/setpriv ] && [ ! -L /usr/bin/setpriv ]; then
  exec /usr/bin/setpriv --reuid="$uid" --regid="$gid" "$groups" -- /bin/sh -c "$2"
fi
for su in /bin/su /usr/bin/su; do
  if [ -x "$su" ] && [ "$groups" = --init-groups ]; then exec "$su" -s /bin/sh "$found" -c "$2"; fi
done
echo 'there is neither setpriv nor su' >&2
exit 126
"""

_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec sh -c "$1"'

_PRELUDE = """
fail() { echo "$1" >&2; exit 1; }
exists() { [ -e "$1" ] || [ -L "$1" ] || fail 'No such file or directory'; }
"""


def is_root(user: str) -> bool:
    """Return whether a user, as Docker writes it, is root. Its group does not matter."""
    return user.partition(":")[0] in ("", "0", "root")


class AsUser:
    """The commands of a slot as another user than root. They have this user's home, and files that it makes are its
    own. A program that can't be run ends with status 126 or 127, as in a shell.

    Args:
        commands: the slot's own, which run as root.
        user: as Docker writes it: a name or a number, or with a group, `user:group`.
        cwd: where relative paths of files start; None is the slot's workspace.

    Raises:
        CommandError: `user` can't be a user's name.
    """

    def __init__(self, commands: SlotCommands, user: str, cwd: str | None = None) -> None:
        if not _NAME.fullmatch(user):
            raise CommandError(f"{user[:100]!r} can't be a user's name", code="invalid")
        self._root = commands
        self._user = user
        self._cwd = cwd or ""

    @property
    def workspace_dir(self) -> str:
        """Return the slot's workspace, as a path inside the sandbox."""
        return self._root.workspace_dir

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterator[bytes] | None = None,
        timeout_s: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = False,
        spool: bool = False,
        pty: WindowSize | None = None,
        stdout: Callable[[bytes], Awaitable[object]] | None = None,
    ) -> CommandResult:
        """Run a command and wait for its end."""
        return await self._root.run(
            self._argv(command),
            cwd=cwd,
            env=env,
            stdin=stdin,
            timeout_s=timeout_s,
            output_limit=output_limit,
            merge_stderr=merge_stderr,
            spool=spool,
            pty=pty,
            stdout=stdout,
        )

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        buffer_bytes: int = 200_000,
        spool: bool = False,
        pty: WindowSize | None = None,
    ) -> ProcessStatus:
        """Start a background process."""
        argv = self._argv(command)
        return await self._root.start(argv, cwd=cwd, env=env, buffer_bytes=buffer_bytes, spool=spool, pty=pty)

    def _argv(self, command: str | Sequence[str]) -> list[str]:
        words = ["sh", "-c", _SHELL, "sh", command] if isinstance(command, str) else command
        if not words:
            raise CommandError("the command is empty", code="invalid")
        line = "exec " + shlex.join(words)
        if len(line.encode("utf-8", "surrogateescape")) > MAX_COMMAND:
            raise CommandError(
                f"a command of another user than root has at most {MAX_COMMAND} bytes",
                code="invalid",
                hint="write long texts to a file",
            )
        return ["/bin/sh", "-c", _SWITCH, "sh", self._user, line]

    async def processes(self) -> Sequence[ProcessStatus]:
        """Return the slot's background processes."""
        return await self._root.processes()

    async def poll(self, process_id: str) -> ProcessStatus:
        """Return one background process."""
        return await self._root.poll(process_id)

    async def log(
        self, process_id: str, *, offset: int = 0, limit: int = 200_000, wait_s: float | None = None
    ) -> LogChunk:
        """Return its output from a byte offset on."""
        return await self._root.log(process_id, offset=offset, limit=limit, wait_s=wait_s)

    async def wait(self, process_id: str, *, timeout_s: float | None = None) -> ProcessStatus:
        """Wait for its end, or until the time limit."""
        return await self._root.wait(process_id, timeout_s=timeout_s)

    async def write(self, process_id: str, data: bytes, *, eof: bool = False) -> int:
        """Write to its standard input."""
        return await self._root.write(process_id, data, eof=eof)

    async def resize(self, process_id: str, size: WindowSize) -> ProcessStatus:
        """Change the size of its terminal."""
        return await self._root.resize(process_id, size)

    async def kill(self, process_id: str, *, grace_s: float = 2.0) -> ProcessStatus:
        """End a background process and everything that it started."""
        return await self._root.kill(process_id, grace_s=grace_s)

    async def _file(self, script: str, path: str, *args: str, stdin: bytes = b"", limit: int = 1 << 20) -> bytes:
        if not path:
            raise CommandError("a path has at least one character", code="invalid")
        place = posixpath.join(self._root.workspace_dir, self._cwd, path)
        sh.check_words(place, *args)
        source, word = files.with_path(script, place)
        argv = ["sh", "-c", _PRELUDE + source, "sh", word, *args]
        done = await self.run(argv, cwd="/", env={"LC_ALL": "C"}, stdin=stdin, output_limit=limit)
        if not done.ok:
            error = sh.failure(done.error_text)
            raise CommandError(f"{path}: {error.message}", code=error.code)
        if done.stdout_bytes > limit:
            raise CommandError(f"{path}: more than {limit} bytes", code="too_large")
        return done.stdout

    async def read_file(self, path: str, *, offset: int = 0, limit: int = MAX_FILE_BYTES) -> FileContent:
        """Return up to `limit` bytes of a regular file from `offset`."""
        if offset < 0 or limit < 0:
            raise CommandError("offset and limit must not be negative", code="invalid")
        answer = await self._file(files.READ, path, str(offset + 1), str(limit), limit=limit + 64)
        size, _, data = answer.partition(b"\n")
        return FileContent(data=data, offset=offset, size=int(size))

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        """Replace or append to a file. Either all is written or an error is raised."""
        rights, name = "" if mode is None else f"{mode:o}", secrets.token_hex(8)
        words = [str(len(data)), rights, "1" if append else "", name, f"/tmp/.hermes-{name}"]
        await self._file(files.WRITE, path, *words, stdin=data)

    async def stat(self, path: str) -> FileStat:
        """Return information about the path. Links are not followed."""
        return files.file_stat(path, await self._file(files.STAT, path))

    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 10_000
    ) -> Sequence[FileStat]:
        """Return the entries of a directory, sorted by path."""
        answer = await self._file(files.LIST, path, "1" if recursive else "", limit=MAX_FILE_BYTES)
        entries = files.parse_list(answer)
        if len(entries) > max_entries:
            raise CommandError(f"{path} has more than {max_entries} entries", code="too_large")
        return entries

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory tree."""
        await self._file(files.REMOVE, path, "1" if recursive else "")

    async def clear(self, keep: Sequence[str] = ()) -> None:
        """Refuse: the slot's files are root's."""
        raise CommandError("only root can remove all files of the slot", code="permission")

    async def tar_in(self, path: str, data: bytes | AsyncIterator[bytes], *, compression: Compression = "") -> None:
        """Unpack a tar stream below a directory; a plain one, or one of gzip."""
        if compression not in files.COMPRESSIONS:
            raise CommandError(f"{compression!r} can't be unpacked as another user", code="invalid")
        archive = data if isinstance(data, bytes) else await files.gathered(data)
        await asyncio.to_thread(files.check_archive, archive, compression)
        if not compression:
            archive = files.headed(archive)
        await self._file(files.TAR_IN, path, str(len(archive)), files.COMPRESSIONS[compression], stdin=archive)

    async def tar_out(self, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a plain tar of a directory's contents."""
        return await self._file(files.TAR_OUT, path, limit=max_bytes)

    async def tar_out_to(
        self, sink: Callable[[bytes], Awaitable[object]], path: str = ".", *, max_bytes: int = MAX_FILE_BYTES
    ) -> int:
        """Write a plain tar of a directory's contents to `sink`, in one piece."""
        data = await self.tar_out(path, max_bytes=max_bytes)
        await sink(data)
        return len(data)
