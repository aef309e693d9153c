"""The file operations of the direct mode: scripts for sh with the path as $1, their output, and checks of archives."""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import stat
import tarfile
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import PurePosixPath

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import (
    MAX_FILE_BYTES,
    Compression,
    FileContent,
    FileStat,
    Sink,
    SlotCommands,
    operation,
)

MAX_TAR_IN = 1 << 30
"""Maximum number of bytes of a stream for `tar_in`. The stream is read to its end first, because its length is sent
before its content."""

COMPRESSIONS: Mapping[str, str] = {"": "-xof", "gz": "-xzof"}
"""Options of tar for the compression of an archive."""

# $2: the first byte, counted from 1. $3: how many bytes. Prints a line with the size, then the bytes.
READ = """
exists "$1"
[ ! -d "$1" ] || fail 'Is a directory'
[ -e "$1" ] || fail 'No such file or directory'
[ -f "$1" ] || fail 'Not a regular file'
[ -r "$1" ] || fail 'Permission denied'
stat -L -c %s "$1" || exit 1
[ "$3" -eq 0 ] || tail -c "+$2" "$1" | head -c "$3"
"""

# $2: the size. $3: the mode or nothing. $4: not empty to append. $5: a name for a temporary file beside $1. $6: the
# path of a temporary file elsewhere. The new content is complete before it replaces the old. As with a guest, a file
# that has other names, or whose directory can't be written, is changed in place, once there is room for all of it.
WRITE = """
path=$1
if [ -L "$path" ]; then path=$(readlink -f "$path" && echo .) && path=${path%??} || fail 'No such file or directory'; fi
[ ! -d "$path" ] || fail 'Is a directory'
[ ! -e "$path" ] || [ -f "$path" ] || fail 'Not a regular file'
case $path in */) fail 'Invalid argument' ;; esac
folder=${path%/*}/ new= mode=$3
mkdir -p "$folder" || exit 1
try() { said=$("$@" 2>&1) || fail "${said##*: }"; }
make() { set -C; : >"$1"; }
cut() { dd if=/dev/null of="$path" bs=1 seek="$1" count=0 2>/dev/null; }
if [ -e "$path" ]; then
  [ -w "$path" ] || fail 'Permission denied'
  if [ -n "$4" ] || [ ! -w "$folder" ] || [ "$(stat -c %h "$path")" -gt 1 ]; then new=$6; fi
  [ -n "$mode" ] || mode=$(stat -c %a "$path")
fi
in_place=$new
new=${new:-$folder.hermes-$5}
trap 'rm -f "$new"' EXIT
try make "$new"
# What busybox says of a full disk, and its status, can be anything: the size tells.
if [ "$2" -gt 0 ]; then head -c "$2" >"$new" 2>/dev/null; fi
[ "$(stat -c %s "$new")" -eq "$2" ] || fail 'No space left on device'
if [ -n "$in_place" ]; then
  old=$(stat -c %s "$path")
  more=$(($2 - old))
  [ -z "$4" ] || more=$2
  if [ "$more" -gt 0 ]; then
    tail -c "$more" "$new" >>"$path" 2>/dev/null
    [ "$(stat -c %s "$path")" -eq $((old + more)) ] || { cut "$old"; fail 'No space left on device'; }
  fi
  if [ -z "$4" ]; then
    try dd if="$new" of="$path" bs=65536 conv=notrunc
    [ "$more" -ge 0 ] || cut "$2" || exit 1
  fi
  [ -z "$3" ] || chmod "$3" "$path"
else
  [ -z "$mode" ] || chmod "$mode" "$new" || exit 1
  try mv -f "$new" "$path"
fi
"""

STAT = """
exists "$1"
stat -c '%f %s %Y' "$1"
"""

# $2: not empty to go deeper. Prints for each batch of entries their stat lines, then their names, each ended by NUL.
LIST = """
exists "$1"
[ -d "$1" ] || fail 'Not a directory'
cd "$1" 2>/dev/null || fail 'Permission denied'
[ -n "$2" ] && depth= || depth='-maxdepth 1'
find . -mindepth 1 $depth -exec sh -c 'stat -c "%f %s %Y" "$@" && printf "%s\\0" "$@"' sh {} +
"""

# $2: not empty to remove a directory with its contents.
REMOVE = """
exists "$1"
if [ -d "$1" ] && [ ! -L "$1" ]; then
  [ -n "$2" ] || fail 'Is a directory'
  chmod -R u+rwx "$1" 2>/dev/null
  rm -rf "$1"
else
  rm -f "$1"
fi
"""

# $2: the size. $3: the options of tar.
TAR_IN = """
mkdir -p "$1" || exit 1
cd "$1" 2>/dev/null || fail 'Permission denied'
head -c "$2" | tar "$3" -
"""

# $2: the home. $3: the directory for temporary files. Then names in $1 to keep.
CLEAR = """
workspace=$1 home=$2 tmp=$3; shift 3
for each in "$@"; do set -- "$@" ! -name "$each"; shift; done
empty() {
  folder=$1; shift
  find "$folder" -mindepth 1 -maxdepth 1 "$@" \
    -exec sh -c 'chmod -R u+rwx "$@" 2>/dev/null; rm -rf "$@"' sh {} + || exit 1
}
empty "$home"
empty "$tmp"
empty "$workspace" "$@"
"""

TAR_OUT = """
exists "$1"
[ -d "$1" ] || fail 'Not a directory'
cd "$1" 2>/dev/null || fail 'Permission denied'
tar -cf - .
"""

# Put before a script whose path is not UTF-8. The path is then passed as octal escapes, as some providers accept only
# UTF-8 arguments.
_UNESCAPE = """
path=$(printf "$1."); shift; set -- "${path%.}" "$@"
"""

_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}


def with_path(script: str, path: str) -> tuple[str, str]:
    """Return the script to run, and the text to pass as its $1, which stands for the path.

    For a path that is not UTF-8, the text has octal escapes, and the script begins by decoding them.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        return _UNESCAPE + script, "".join(f"\\{byte:03o}" for byte in path.encode("utf-8", "surrogateescape"))
    return script, path


def file_stat(path: str, line: bytes) -> FileStat:
    """Return the file status from the output of `stat -c '%f %s %Y'`.

    Raises:
        CommandError: the output has another form.
    """
    if not re.fullmatch(rb"[0-9a-f]+ [0-9]+ -?[0-9]+\n?", line):
        raise CommandError(f"stat gave {line[:200]!r}")
    mode, size, mtime = line.split()
    bits = int(mode, 16)
    return FileStat(path, _KINDS.get(stat.S_IFMT(bits), "other"), int(size), stat.S_IMODE(bits), float(mtime))


def parse_list(answer: bytes) -> list[FileStat]:
    """Return the entries in the answer of `LIST`, sorted by path."""
    entries, at = [], 0
    while at < len(answer):
        names = answer.find(b"./", at)
        lines = answer[at:names].splitlines()
        at = names
        for line in lines:
            end = answer.find(b"\0", at)
            if names < 0 or end < 0:
                raise CommandError("the directory changed while it was listed")
            entries.append(file_stat(answer[at + 2 : end].decode("utf-8", "surrogateescape"), line))
            at = end + 1
        if not lines:
            raise CommandError("the directory changed while it was listed")
    return sorted(entries, key=lambda entry: entry.path)


def prepend_entry(archive: bytes) -> bytes:
    """Put the entry `./` in front of an uncompressed archive. Some programs guess the compression from the first bytes,
    which would otherwise be a file name that the sender chose."""
    first = tarfile.TarInfo("./")
    first.type, first.mode = tarfile.DIRTYPE, 0o755
    return first.tobuf() + archive


async def read_all(stream: AsyncIterator[bytes]) -> bytes:
    """Read a stream to its end.

    Raises:
        CommandError: the stream is too long, with code `too_large`.
    """
    data = bytearray()
    async for piece in stream:
        data += piece
        if len(data) > MAX_TAR_IN:
            raise CommandError(f"more than {MAX_TAR_IN} bytes", code="too_large")
    return bytes(data)


def check_archive(data: bytes, compression: str) -> None:
    """Refuse a tar whose members could end up outside the directory that it is unpacked in.

    Raises:
        CommandError: it is not a tar, or a member is absolute, contains `..`, or lies behind a link; with code
            `invalid`.
    """
    links: set[PurePosixPath] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode=f"r:{compression}") as archive:  # type: ignore[call-overload]
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or links & {path, *path.parents}:
                    raise CommandError(f"the member {member.name!r} leaves the archive's directory", code="invalid")
                if member.issym():
                    links.add(path)
                if member.islnk() and (
                    PurePosixPath(member.linkname).is_absolute() or ".." in PurePosixPath(member.linkname).parts
                ):
                    raise CommandError(f"the link {member.name!r} leaves the archive's directory", code="invalid")
    except CommandError:
        raise
    except Exception as error:  # `tarfile` raises errors of many kinds for numbers out of range
        raise CommandError(f"not a tar archive: {error}", code="invalid") from error


class ScriptedFiles(SlotCommands):
    """Slot commands whose operations on files run the scripts of this module."""

    _aside: str
    """The prefix of the paths of temporary files."""

    @abstractmethod
    async def _file(self, script: str, path: str, *args: str, stdin: bytes = b"", limit: int = 1 << 20) -> bytes:
        """Run a script on a path, and return its output.

        Raises:
            CommandError: the script fails, or prints more than `limit` bytes. The message names the path.
        """

    @operation
    async def read_file(self, path: str, *, offset: int = 0, limit: int = MAX_FILE_BYTES) -> FileContent:
        """Return up to `limit` bytes of a regular file from `offset`."""
        if offset < 0 or limit < 0:
            raise CommandError("offset and limit must not be negative", code="invalid")
        answer = await self._file(READ, path, str(offset + 1), str(limit), limit=limit + 64)
        size, _, data = answer.partition(b"\n")
        return FileContent(data=data, offset=offset, size=int(size))

    @operation
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        """Replace or append to a file. Either all is written or an error is raised."""
        await self._write(path, data, mode=mode, append=append)

    async def _write(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        rights, name = "" if mode is None else f"{mode:o}", secrets.token_hex(8)
        words = [str(len(data)), rights, "1" if append else "", name, f"{self._aside}{name}"]
        await self._file(WRITE, path, *words, stdin=data)

    @operation
    async def stat(self, path: str) -> FileStat:
        """Return information about the path. Links are not followed."""
        return file_stat(path, await self._file(STAT, path))

    @operation
    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 10_000
    ) -> Sequence[FileStat]:
        """Return the entries of a directory, sorted by path."""
        answer = await self._file(LIST, path, "1" if recursive else "", limit=MAX_FILE_BYTES)
        entries = parse_list(answer)
        if len(entries) > max_entries:
            raise CommandError(f"{path} has more than {max_entries} entries", code="too_large")
        return entries

    @operation
    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory tree."""
        await self._file(REMOVE, path, "1" if recursive else "")

    @operation
    async def tar_in(self, path: str, data: bytes | AsyncIterator[bytes], *, compression: Compression = "") -> None:
        """Unpack a tar stream, uncompressed or with gzip, below a directory."""
        if compression not in COMPRESSIONS:
            message = f"{compression!r} can't be unpacked without Python, or as another user"
            raise CommandError(message, code="invalid", hint="send a plain tar, or one of gzip")
        archive = data if isinstance(data, bytes) else await read_all(data)
        await asyncio.to_thread(check_archive, archive, compression)
        if not compression:
            archive = prepend_entry(archive)
        await self._file(TAR_IN, path, str(len(archive)), COMPRESSIONS[compression], stdin=archive)

    @operation
    async def tar_out(self, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a plain tar of a directory's contents."""
        return await self._file(TAR_OUT, path, limit=max_bytes)

    @operation
    async def tar_out_to(self, sink: Sink, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> int:
        """Write a plain tar of a directory's contents to `sink`, in one piece."""
        data = await self._file(TAR_OUT, path, limit=max_bytes)
        await sink(data)
        return len(data)
