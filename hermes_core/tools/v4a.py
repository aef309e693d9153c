"""Parses the multi-file patch format that models write (V4A), and applies the part for one file to the file's text.

*** Begin Patch
*** Update File: src/app.py
*** Move to: src/main.py          (optional)
@@ class App                      (optional: the change is below this line; several narrow it down)
 a line that stays
-a line that goes
+a line that comes
*** End of File                   (optional: the lines above are the file's last)
*** Add File: notes.txt
+its only line
*** Delete File: old.py
*** End Patch
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hermes_core.errors import HermesError
from hermes_core.tools.fuzzy import compose, find_lines, with_single_blanks, without_indent, without_trailing
from hermes_core.tools.indents import reindent, unit_of

BEGIN, END, END_OF_FILE = "*** Begin Patch", "*** End Patch", "*** End of File"
_FILE = re.compile(r"\*\*\* (Update|Add|Delete) File:(.*)")
_MOVE = re.compile(r"\*\*\* Move to:(.*)")
MAX_SEARCHED = 20_000_000
"""Maximum total number of lines that are searched for the changes and hints of one file; takes some seconds."""

_LINE_NUMBERS = re.compile(r"-\d+(?:,\d+)? \+\d+(?:,\d+)? @@(.*)")


class PatchError(HermesError):
    """The patch is malformed, or does not fit the files."""


@dataclass(frozen=True)
class Hunk:
    """One change: lines that stay (` `), are removed (`-`) or are added (`+`), and hints: lines above it that tell its
    place."""

    line: int
    """The number of the change's first line in the patch, from 1."""
    lines: tuple[tuple[str, str], ...]
    """`(mark, text)` of each line."""
    hints: tuple[str, ...] = ()
    at_end: bool = False

    @property
    def old(self) -> list[str]:
        """Return the lines that must be in the file."""
        return [text for mark, text in self.lines if mark != "+"]


@dataclass(frozen=True)
class FilePatch:
    """The part of a patch for one file."""

    action: Literal["update", "add", "delete"]
    path: str
    hunks: tuple[Hunk, ...] = ()
    content: str = ""
    """For `add`, the new file's content."""
    move_to: str | None = None


def parse_patch(patch: str) -> list[FilePatch]:
    """Return the files that a patch changes, in its order.

    Raises:
        PatchError: the patch is malformed; the message names the line of the patch.
    """
    return _Parser(patch).parse()


class _Parser:
    """Reads a patch line by line; `number` is the index of the next line."""

    def __init__(self, patch: str) -> None:
        self.lines = patch.replace("\r\n", "\n").strip("\n").split("\n")
        self.number = 0

    def parse(self) -> list[FilePatch]:
        if self.lines[0].strip() != BEGIN:
            raise self._error(f"a patch begins with {BEGIN!r}", 0)
        self.number = 1
        files = []
        while (line := self._peek()) is not None and line.rstrip() != END:
            if not line.strip():
                self.number += 1
            else:
                files.append(self._file())
        if line is None:
            raise self._error(f"a patch ends with {END!r}", len(self.lines))
        if any(rest.strip() for rest in self.lines[self.number + 1 :]):
            raise self._error(f"there is more text after {END!r}", self.number + 1)
        if not files:
            raise self._error("the patch names no file", self.number)
        return files

    def _peek(self) -> str | None:
        return self.lines[self.number] if self.number < len(self.lines) else None

    def _error(self, message: str, number: int) -> PatchError:
        text = f", {self.lines[number][:200]!r}" if number < len(self.lines) else ", its end"
        return PatchError(f"line {number + 1} of the patch{text}: {message}", hint="see the tool's description")

    def _file(self) -> FilePatch:
        header = _FILE.fullmatch(self.lines[self.number])
        if header is None:
            raise self._error(
                "expected '*** Update File: <path>', '*** Add File: …' or '*** Delete File: …'", self.number
            )
        path = self._path(header[2])
        if header[1] == "Delete":
            return FilePatch("delete", path)
        if header[1] == "Add":
            return FilePatch("add", path, content=self._read_new_file())
        move = _MOVE.fullmatch(self._peek() or "")
        move_to = self._path(move[1]) if move else None
        hunks = []
        while (line := self._peek()) is not None and not _ends_file(line):
            if line:
                hunks.append(self._hunk())
            else:
                self.number += 1  # an empty line between two parts
        if not hunks and move_to is None:
            raise self._error(f"nothing is changed in {path}", self.number - 1)
        return FilePatch("update", path, tuple(hunks), move_to=move_to)

    def _path(self, text: str) -> str:
        path = text.strip()
        if not path or "\0" in path or path.endswith("/"):
            raise self._error("a file's path is needed", self.number)
        self.number += 1
        return posixpath.normpath(path)

    def _read_new_file(self) -> str:
        lines = []
        while (line := self._peek()) is not None and not _ends_file(line):
            if line.startswith("+"):
                lines.append(line[1:])
            elif line.strip():
                raise self._error("each line of a new file begins with '+'", self.number)
            self.number += 1
        return "".join(f"{line}\n" for line in lines)

    def _hunk(self) -> Hunk:
        start, hints, numbers = self.number, [], []
        while (line := self._peek()) is not None and line.startswith("@@"):
            if hint := _hint(line):
                hints.append(hint)
            self.number += 1
        at_end = False
        while (line := self._peek()) is not None and not _ends_file(line) and not line.startswith("@@") and not at_end:
            at_end = line.rstrip() == END_OF_FILE
            if not at_end:
                numbers.append(self.number)
            self.number += 1
        while numbers and not self.lines[numbers[-1]]:
            numbers.pop()  # empty lines that only separate this part of the patch from the next
        lines = tuple(self._split_mark(number) for number in numbers)
        if all(mark == " " for mark, _ in lines):
            raise self._error("this part of the patch changes nothing", start)
        return Hunk(start + 1, lines, tuple(hints), at_end)

    def _split_mark(self, number: int) -> tuple[str, str]:
        line = self.lines[number]
        if not line:
            return " ", ""  # an empty line that stays, whose leading blank is missing
        if line[0] not in " +-":
            raise self._error("a line begins with ' ' (stays), '-' (goes) or '+' (comes)", number)
        return line[0], line[1:]


def _ends_file(line: str) -> bool:
    return line.rstrip() == END or _FILE.match(line) is not None


def _hint(line: str) -> str:
    """Return the line of text that a `@@` line names, without a unified diff's line numbers."""
    hint = line.removeprefix("@@").strip()
    numbers = _LINE_NUMBERS.fullmatch(hint)
    return numbers[1].strip() if numbers else hint.removesuffix("@@").strip()


def apply_hunks(text: str, file: FilePatch) -> str:
    """Return the text of a file after its hunks, which are applied from top to bottom.

    Raises:
        PatchError: a hunk's lines are not found, or found in several places; or there is too much to search.
    """
    ends = re.findall(r"\r?\n|\Z", text)
    lines = re.split(r"\r?\n", text)
    searches = sum(1 + len(hunk.hints) for hunk in file.hunks)
    if searches * len(lines) > MAX_SEARCHED:
        message = f"{file.path}: {searches} changes and '@@' lines are too many for {len(lines)} lines"
        raise PatchError(message, hint="split the patch, or write the file anew")
    ends_with_newline = not lines[-1]
    if ends_with_newline:
        del lines[-1], ends[-1]
    else:
        ends[-1] = ends[-2] if len(ends) > 1 else "\n"  # for a line that is added after the last one
    done = 0
    for hunk in file.hunks:
        place = _locate(lines, hunk, done, file.path)
        end = place + len(hunk.old)
        put, put_ends = _apply_hunk(hunk, lines, ends, place)
        lines[place:end], ends[place:end] = put, put_ends
        done = place + len(put)
    if lines and not ends_with_newline:
        ends[-1] = ""
    return "".join(line + end for line, end in zip(lines, ends, strict=True))


def _apply_hunk(hunk: Hunk, lines: Sequence[str], ends: Sequence[str], place: int) -> tuple[list[str], list[str]]:
    """Return the hunk's lines after the change, and their line ends. Unchanged lines stay as in the file, even if the
    patch quotes them inexactly. An added line ends like the line before it."""
    found = lines[place : place + len(hunk.old)]
    added = iter(reindent([text for mark, text in hunk.lines if mark == "+"], hunk.old, found, lambda: unit_of(lines)))
    put, put_ends, own = [], [], place
    end = [*ends[max(0, place - 1) : place + 1], "\n"][0]
    for mark, _ in hunk.lines:
        if mark != "+":
            end = ends[own]
        if mark != "-":
            put.append(next(added) if mark == "+" else lines[own])
            put_ends.append(end)
        own += mark != "+"
    return put, put_ends


def _locate(lines: Sequence[str], hunk: Hunk, start: int, path: str) -> int:
    """Return the index of the file's line at which the hunk's lines begin."""
    for hint in hunk.hints:
        start = _below(lines, hint, start, hunk, path)
    quoted = hunk.old
    if not quoted:
        return start if hunk.hints and not hunk.at_end else len(lines)
    # The first line of the change may repeat the line that a hint names.
    for first in (start, start - 1) if hunk.hints else (start,):
        for key in _KEYS:
            places = list(
                find_lines(lines, quoted, key, max(first, len(lines) - len(quoted)) if hunk.at_end else first)
            )
            if len(places) > 1 and not hunk.hints:
                raise _ambiguous(hunk, places, path)
            if places:
                return places[0]
    hint = "read the file again and quote its lines as they are; changes apply from top to bottom"
    message = f"{path}: the lines of the change at line {hunk.line} of the patch were not found"
    raise PatchError(f"{message} (the first is {quoted[0]!r})", hint=hint)


def _ambiguous(hunk: Hunk, places: Sequence[int], path: str) -> PatchError:
    numbers = ", ".join(str(place + 1) for place in places[:5]) + (", …" if len(places) > 5 else "")
    times = f"there {len(places)} times (line {numbers} of the file)"
    message = f"{path}: the lines of the change at line {hunk.line} of the patch are {times}"
    return PatchError(message, hint="quote more lines around the change, or name a line above it with '@@ '")


def _below(lines: Sequence[str], hint: str, start: int, hunk: Hunk, path: str) -> int:
    for key in _KEYS:
        for place in find_lines(lines, [hint], key, start):
            return place + 1
    for place in range(start, len(lines)):  # a hint may be only the beginning: `def run` for `def run(self):`
        if lines[place].strip().startswith(hint):
            return place + 1
    message = f"{path}: there is no line {hint!r} (named by '@@' at line {hunk.line} of the patch)"
    raise PatchError(message, hint="'@@' names a line of the file above the change")


_KEYS = (compose, without_trailing, without_indent, with_single_blanks)
"""The ways to search for a hunk's lines; each is tried only if the earlier ways found nothing."""
