"""The tools `read_file` and `write_file`: text files of the slot, by lines."""

from __future__ import annotations

import asyncio
import difflib
import posixpath
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic import Field, field_validator

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.tools.base import CallContext, CommandText, Text, Tool, ToolParams
from hermes_core.tools.limits import OUTPUT_CHARS, printable

MAX_LINES = 2000
LINE_CHARS = 2000
"""Maximum number of characters of a line; longer lines are cut."""
SIMILAR = 5
"""Maximum number of similar names that are suggested."""
_COMPARED = 500
_COMPARED_CHARS = 64
"""Maximum number of names, and of characters of each name, that are compared with a missing name, because the
comparison takes quadratic time."""

_PART_BYTES = 1 << 20
_COUNT_BYTES = 8 << 20
"""Maximum number of bytes that are read just to count a file's lines."""
_SCAN_BYTES = 64 << 20
"""Maximum number of bytes that are read to find the requested lines."""
_SNIFF_BYTES = 8192
_LINE_BYTES = 4 * LINE_CHARS

_MAGIC = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF": "a PDF document",
    b"\x7fELF": "an ELF program",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "gzip data",
}

READ_DESCRIPTION = """\
Read a text file by lines. Each line of the answer is `N|text`, N being its number from 1. Use offset and limit to \
page through a long file. Paths are relative to the workspace."""

WRITE_DESCRIPTION = """\
Write a whole file, replacing what it held and making its directories. To change part of a file use patch."""

Answer = dict[str, Any]


class ReadFileParams(ToolParams):
    """Parameters of `read_file`."""

    path: CommandText = Field(min_length=1, description="The file to read.")
    offset: int = Field(default=1, ge=1, description="The first line, counted from 1.")
    limit: int = Field(default=500, ge=1, le=MAX_LINES, description="Lines at most.")

    @field_validator("offset", mode="before")
    @classmethod
    def _first(cls, value: object) -> object:
        return 1 if value == 0 else value


class WriteFileParams(ToolParams):
    """Parameters of `write_file`."""

    path: CommandText = Field(min_length=1, description="The file to write.")
    content: Text = Field(description="Its whole new content.")


@dataclass
class _WantedLines:
    """Collects the wanted lines of a file that is read in parts, and counts all lines. Keeps only lines to be shown in
    memory."""

    first: int
    """Number of the first wanted line, from 0."""
    limit: int
    shown: list[str] = field(default_factory=list)
    chars: int = 0
    total: int = 0
    """Number of complete lines so far."""
    invalid: bool = False
    crlf: bool = False
    _start: bytearray = field(default_factory=bytearray)
    """The start of the incomplete line, up to the length that can be shown."""
    _length: int = 0
    """Number of bytes of the incomplete line."""

    @property
    def full(self) -> bool:
        return len(self.shown) >= self.limit or self.chars >= OUTPUT_CHARS

    def feed(self, data: bytes) -> None:
        """Process the next part. Only wanted lines are examined one by one, because a file may have millions of other
        lines."""
        while data:
            skip, room = self.first - self.total, self.limit - len(self.shown)
            if self.full or data.count(b"\n") < skip:
                self._pass_over(data)
                return
            *ended, data = data.split(b"\n", skip if skip > 0 else room)
            if skip > 0:
                self._pass_over(b"\n" * skip)
                continue
            for piece in ended:
                self._extend(piece)
                self._end()
            if len(ended) < room:
                self._extend(data)
                return

    def _pass_over(self, data: bytes) -> None:
        lines = data.count(b"\n")
        self.total += lines
        self._length = len(data) - data.rfind(b"\n") - 1 if lines else self._length + len(data)

    def close(self) -> None:
        if self._length:
            self._end()

    def _extend(self, piece: bytes) -> None:
        self._length += len(piece)
        if not self.full:
            self._start += piece[: _LINE_BYTES - len(self._start)]

    def _end(self) -> None:
        if self.first <= self.total and not self.full:
            self._show()
        self._start.clear()
        self._length = 0
        self.total += 1

    def _show(self) -> None:
        if self._length == len(self._start) and self._start.endswith(b"\r"):
            self.crlf = True
            self._length -= 1
            del self._start[-1]
        text = self._start.decode("utf-8", "surrogateescape")[:LINE_CHARS]
        more = self._length - len(text.encode("utf-8", "surrogateescape"))
        shown = f"{self.total + 1}|{printable(text)}" + (f"... [{more} bytes more]" if more else "")
        self.invalid = self.invalid or (not text.isascii() and printable(text) != text)
        self.shown.append(shown)
        self.chars += len(shown) + 1


async def run_read_file(ctx: CallContext, params: ReadFileParams) -> Answer:
    """Return an answer with the requested lines and the data to continue; or with the reason why there are none."""
    commands, path = ctx.require_commands(), await ctx.path(params.path)
    try:
        first = await commands.read_file(path, limit=_PART_BYTES)
    except CommandError as error:
        return await path_error(commands, path, error)
    if kind := _binary(first.data):
        return {"error": f"{path} is {kind} of {first.size} bytes, not text", "file_size": first.size}
    lines = _WantedLines(params.offset - 1, params.limit)
    data, read = first.data, len(first.data)
    lines.feed(data.removeprefix(BOM_UTF8))
    size = first.size or _SCAN_BYTES  # files of the kernel, such as those in /proc, report size 0
    while data and read < size and read < (_COUNT_BYTES if lines.full else _SCAN_BYTES):
        data = (await commands.read_file(path, offset=read, limit=_PART_BYTES)).data
        lines.feed(data)
        read += len(data)
    whole = not data or read >= size
    if whole:
        lines.close()
    return _read_answer(params, lines, first.size or read, whole)


def _read_answer(params: ReadFileParams, lines: _WantedLines, size: int, whole: bool) -> Answer:
    answer: Answer = {"content": "\n".join(lines.shown), "total_lines": lines.total if whole else None}
    answer |= {"file_size": size, "truncated": False}
    last = params.offset - 1 + len(lines.shown)
    notes = []
    if size == 0:
        notes.append("the file is empty")
    elif not lines.shown and whole:
        return {"error": f"{params.path} has {lines.total} lines, so there is no line {params.offset}"}
    elif not lines.shown:
        return {"error": f"line {params.offset} is too far into this file of {size} bytes: use sed -n in the terminal"}
    elif not whole or last < lines.total:
        answer["truncated"] = True
        of = f" of {lines.total}" if whole else ""
        notes.append(f"lines {params.offset} to {last}{of} are shown: go on with offset={last + 1}")
    if lines.invalid:
        notes.append("bytes that are not UTF-8 are shown as \ufffd")
    if lines.crlf:
        notes.append("lines end with CRLF")
    return {**answer, "hint": "; ".join(notes)} if notes else answer


def _binary(start: bytes) -> str | None:
    """Return the kind of binary data that has this start; None for text."""
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            return kind
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text (iconv in the terminal makes it readable)"
    return "binary data" if b"\0" in start[:_SNIFF_BYTES] else None


async def path_error(commands: SlotCommands, path: str, error: CommandError) -> Answer:
    """Return the answer for a path that can't be used, with names that the model may have meant."""
    if error.code == "is_a_directory":
        return {"error": f"{path} is a directory: list it with search_files(pattern='*', target='files', path=...)"}
    if error.code != "not_found":
        return {"error": f"{error.message} ({error.hint})" if error.hint else error.message}
    answer: Answer = {"error": f"{path} does not exist"}
    similar = await similar_names(commands, path)
    return {**answer, "similar_files": similar} if similar else answer


async def similar_names(commands: SlotCommands, path: str) -> list[str]:
    """Return up to five entries of the path's directory with similar names, best first."""
    directory, name = posixpath.split(path)
    try:
        entries = [entry.path for entry in await commands.list_dir(directory or ".")]
    except CommandError:
        return []
    close = await asyncio.to_thread(_closest, name.lower(), {entry.lower(): entry for entry in entries})
    return [posixpath.join(directory, entry) for entry in close]


def _closest(wanted: str, by_folded: Mapping[str, str]) -> list[str]:
    """Return the entries whose folded names are most similar, then entries whose names contain the wanted name without
    its suffix."""
    starts = {each[:_COMPARED_CHARS]: each for each in islice(by_folded, _COMPARED)}
    alike = difflib.get_close_matches(wanted[:_COMPARED_CHARS], starts, n=SIMILAR, cutoff=0.6)
    close = [starts[each] for each in alike]
    stem = wanted.partition(".")[0]
    close += [each for each in by_folded if stem and stem in each and each not in close]
    return [by_folded[each] for each in close[:SIMILAR]]


async def run_write_file(ctx: CallContext, params: WriteFileParams) -> Answer:
    """Write the file. The answer is `{bytes_written, dirs_created}`."""
    commands, path = ctx.require_commands(), await ctx.path(params.path)
    data = params.content.encode()
    try:
        directory = posixpath.dirname(path)
        missing = bool(directory) and await is_missing(commands, directory)
        if not missing and await _has_mark(commands, path):
            data = BOM_UTF8 + data.removeprefix(BOM_UTF8)
        await commands.write_file(path, data)
    except CommandError as error:
        return {"error": write_error(path, error)}
    return {"bytes_written": len(data), "dirs_created": missing}


async def _has_mark(commands: SlotCommands, path: str) -> bool:
    """Return whether the path is a file that begins with a byte order mark, which models don't see."""
    try:
        return (await commands.read_file(path, limit=len(BOM_UTF8))).data == BOM_UTF8
    except CommandError:
        return False


def write_error(path: str, error: CommandError) -> str:
    """Return a text that says why a path could not be written, and what to do."""
    if error.code == "is_a_directory":
        return f"{path} is a directory"
    text = f"{path} was not written: {error.message}" + (f" ({error.hint})" if error.hint else "")
    return f"{text}; write below the workspace instead" if error.code == "permission" else text


async def is_missing(commands: SlotCommands, path: str) -> bool:
    """Return whether nothing has this path."""
    try:
        await commands.stat(path)
    except CommandError as error:
        if error.code == "not_found":
            return True
        raise
    return False


READ_FILE = Tool(
    "read_file", ReadFileParams, run_read_file, READ_DESCRIPTION, toolsets=("file", "safe"), parallel_safe=True
)
WRITE_FILE = Tool("write_file", WriteFileParams, run_write_file, WRITE_DESCRIPTION, toolsets=("file",))
