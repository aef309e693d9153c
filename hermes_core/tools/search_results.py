"""The parameters of `search_files`, and its answers, made from the output of ripgrep, grep or find."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from hermes_core.tools.base import CommandText, ToolParams
from hermes_core.tools.globs import expand_braces, path_matches
from hermes_core.tools.limits import OUTPUT_CHARS

LINE_CHARS = 500
"""Longer lines are cut."""

MAX_COMPARED = 1_000_000
"""Maximum number of comparisons of a part of a glob with a part of a name: some seconds' work."""

Answer = dict[str, Any]

_T = TypeVar("_T")
_NUMBERED = re.compile(r"(\d+)([:-])(.*)", re.DOTALL)


class SearchParams(ToolParams):
    """Parameters of `search_files`."""

    pattern: CommandText = Field(min_length=1, description="A regular expression, or for target=files a glob.")
    target: Literal["content", "files"] = Field(default="content", description="What to search: lines, or names.")
    path: CommandText = Field(default=".", min_length=1, description="The directory or file to search.")
    file_glob: CommandText | None = Field(default=None, description="For content: only files like this, as in *.py.")
    limit: int = Field(default=50, ge=1, le=1000, description="Results at most.")
    offset: int = Field(default=0, ge=0, description="Results to skip.")
    output_mode: Literal["content", "files_only", "count"] = Field(
        default="content", description="For content: the lines, the files that have some, or how many each has."
    )
    context: int = Field(default=0, ge=0, le=20, description="For content: lines to show around each match.")

    @field_validator("target", mode="before")
    @classmethod
    def _older_names(cls, value: object) -> object:
        return {"grep": "content", "find": "files"}.get(value, value) if isinstance(value, str) else value

    @field_validator("pattern")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if "\n" in value:
            raise ValueError("a search is within lines: the pattern can't contain a newline")
        return value

    @field_validator("file_glob")
    @classmethod
    def _no_negation(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("!"):
            raise ValueError("a glob can't be negated: say which files to search")
        return value or None

    @property
    def globs(self) -> list[str]:
        """Return the globs of wanted files; an empty list means all files."""
        glob = self.pattern if self.target == "files" else self.file_glob
        return expand_braces(glob) if glob else []


class SearchEngine(StrEnum):
    """The search program, which decides the format of the output."""

    RIPGREP = "rg"
    GNU = "gnu"
    POSIX = "posix"
    """Any grep."""
    FIND = "find"


@dataclass(frozen=True)
class Place:
    """Where to search: the directory to search from, and what to search in it (`.`, or one file)."""

    directory: str
    start: str

    def name(self, found: str) -> str:
        """Return a found path in a form that other tools accept."""
        return posixpath.normpath(posixpath.join(self.directory, found))


@dataclass(frozen=True)
class _Line:
    path: str
    number: int
    text: str
    matches: bool

    def entry(self) -> Answer:
        cut = "..." if len(self.text) > LINE_CHARS else ""
        entry: Answer = {"path": self.path, "line": self.number, "content": self.text[:LINE_CHARS] + cut}
        return entry if self.matches else {**entry, "context": True}

    @property
    def size(self) -> int:
        return len(self.path) + min(len(self.text), LINE_CHARS)


@dataclass(frozen=True)
class SearchOutput:
    """Makes the answer of a search from its output."""

    params: SearchParams
    place: Place
    engine: SearchEngine
    globs: Sequence[str]
    whole: bool
    """Whether the output is complete."""

    def answer(self, data: bytes) -> Answer:
        """Return the requested page of the answer."""
        text = data.decode("utf-8", "replace")
        listed = self.engine is SearchEngine.FIND or self.params.output_mode == "files_only"
        # With names, the last piece is empty, or was cut in the middle.
        names = text.split("\n" if self.engine is SearchEngine.POSIX else "\0")[:-1] if listed else []
        records = [] if listed else self._records(text)
        most = self._affordable(names or [path for path, _ in records])
        found = self if most is None else replace(self, whole=False)
        if listed:
            return found._files(names[:most])
        return (found._counts if self.params.output_mode == "count" else found._lines)(records[:most])

    def _affordable(self, names: Sequence[str]) -> int | None:
        """Return how many of these names can be compared with the globs; None is all."""
        if self._all_wanted:
            return None
        parts = [glob.count("/") + 1 for glob in self.globs]
        room = MAX_COMPARED
        for number, name in enumerate(names):
            depth = name.count("/") + 1
            room -= sum(each if each == 1 else each * depth for each in parts)
            if room < 0:
                return number
        return None

    def _files(self, names: Sequence[str]) -> Answer:
        files = sorted(self.place.name(name) for name in names if self._wanted(name))
        page = self._page(files)
        return {"files": page, **self._more(len(files), len(page))}

    def _counts(self, records: Sequence[tuple[str, str]]) -> Answer:
        counts = sorted(
            (self.place.name(path), int(rest))
            for path, rest in records
            if rest.isdecimal() and int(rest) and self._wanted(path)
        )
        page = self._page(counts)
        answer: Answer = {"counts": dict(page), **self._more(len(counts), len(page))}
        return {**answer, "total_matches": sum(count for _, count in counts)} if self.whole else answer

    def _lines(self, records: Sequence[tuple[str, str]]) -> Answer:
        lines = sorted(self._parsed(records), key=lambda line: (line.path, line.number))
        matches = [line for line in lines if line.matches]
        page = self._fitting(self._page(matches))
        around = range(-self.params.context, self.params.context + 1)
        near = {(line.path, line.number + distance) for line in page for distance in around}
        shown = {(line.path, line.number) for line in page}
        entries = [line.entry() for line in lines if (line.path, line.number) in (shown if line.matches else near)]
        return {"matches": entries, **self._more(len(matches), len(page))}

    def _parsed(self, records: Sequence[tuple[str, str]]) -> list[_Line]:
        lines = []
        for path, rest in records:
            numbered = _NUMBERED.fullmatch(rest)
            if numbered and self._wanted(path):
                content = numbered[3].removesuffix("\r")
                lines.append(_Line(self.place.name(path), int(numbered[1]), content, numbered[2] == ":"))
        return lines

    def _records(self, text: str) -> list[tuple[str, str]]:
        """Return `(path, the rest of the line)`. Other lines (a separator, a note about a binary file) are left out."""
        if self.engine is SearchEngine.POSIX:
            parts = text.split("\0")
            found = zip(parts[::2], parts[1::2], strict=False)
            return [(path, rest) for path, lines in found for rest in lines.split("\n")[:-1]]
        pieces = (piece.partition("\0") for piece in text.split("\n")[:-1])
        return [(path, rest) for path, nul, rest in pieces if nul]

    @property
    def _all_wanted(self) -> bool:
        return self.engine is SearchEngine.RIPGREP or not self.globs

    def _wanted(self, found: str) -> bool:
        return self._all_wanted or any(path_matches(found.removeprefix("./"), glob) for glob in self.globs)

    def _page(self, items: list[_T]) -> list[_T]:
        return items[self.params.offset : self.params.offset + self.params.limit]

    def _fitting(self, page: list[_Line]) -> list[_Line]:
        """Return as many lines as one answer may hold, with their context; at least one."""
        room = OUTPUT_CHARS // (1 + 2 * self.params.context)
        for n, line in enumerate(page):
            room -= line.size
            if room < 0 and n:
                return page[:n]
        return page

    def _more(self, total: int, shown: int) -> Answer:
        more = self.params.offset + shown < total
        answer: Answer = {"total_count": total, "truncated": more or not self.whole}
        if more:
            answer["hint"] = f"go on with offset={self.params.offset + shown}"
        elif not self.whole:
            answer["hint"] = "there is more than could be counted: narrow the pattern, the path or file_glob"
        return answer
