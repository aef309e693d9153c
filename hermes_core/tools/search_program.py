"""The program behind `search_files`: finds files, searches them, and makes the answer.

The program runs in the slot, so that a hostile pattern or file harms only its own slot. If the slot has no Python, the
program runs on the driver's host. So a search has the same result in every slot, whatever programs the slot has.

Its standard input is the request, which is a line of JSON, followed by the files unless these are in its working
directory. Its standard output is the answer. Like the guest, it needs only Python 3.7 and the standard library.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import json
import os
import re
import resource
import signal
import sys
import tarfile
from fnmatch import fnmatchcase

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, BinaryIO

    Files = dict[str, Callable[[], BinaryIO]]
    """Files by their paths below the searched directory, with a way to open each."""

LINE_CHARS = 500
"""Maximum number of characters of a line. Longer lines are cut around their match."""

_BEFORE_CHARS = 100
"""Number of characters that are shown before a match in a long line."""
_LONGEST_LINE = 16 << 20
"""Maximum number of characters that are searched at once."""
_MEMORY_BYTES = 2 << 30
_SNIFF_BYTES = 8192

_BRACKETS = re.compile(r"\\.|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]\\])*\]", re.DOTALL)
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\s",
    "upper": "A-Z",
    "word": r"\w",
    "xdigit": "0-9A-Fa-f",
}


class _Stopped(Exception):
    """The time limit is reached."""


class Search:
    """A search, with its findings so far.

    Args:
        request: the parameters of `search_files`; `globs`: globs of wanted files; `directory`: the first part of paths
            in the answer; `chars`: the maximum size of the answer.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.mode = "files_only" if request["target"] == "files" else request["output_mode"]
        self.whole = not request.get("cut")
        """Whether all files were searched."""
        self._context = request["context"] if self.mode == "content" else 0
        self._room = request["chars"] // (1 + 2 * self._context)
        self._entries: list[dict[str, Any]] = []
        self._total = self._shown = self._lines = 0

    def run(self, files: Files) -> None:
        """Search these files. Raise `re.error` or another error for a wrong pattern."""
        globs, names = self.request["globs"], self.request["target"] == "files"
        pattern = None if names else compile_pattern(self.request["pattern"])
        for name in sorted(files):
            if globs and not any(path_matches(name, glob) for glob in globs):
                continue
            path = os.path.normpath(os.path.join(self.request["directory"], name))
            path = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            if pattern is None:
                self._add({"path": path})
                continue
            with contextlib.suppress(OSError), files[name]() as file:
                self._search(path, lines_of(file), pattern)

    def _search(self, path: str, lines: Iterable[tuple[int, str]], pattern: re.Pattern[str]) -> None:
        if self.mode == "content":
            self._search_lines(path, lines, pattern)
            return
        matches = (1 for _, line in lines if pattern.search(line))
        count = sum(itertools.islice(matches, None if self.mode == "count" else 1))
        self._lines += count
        if count:
            self._add({"path": path, "count": count})

    def _search_lines(self, path: str, lines: Iterable[tuple[int, str]], pattern: re.Pattern[str]) -> None:
        before: collections.deque[dict[str, Any]] = collections.deque(maxlen=self._context)
        last = -1 - self._context
        for number, line in lines:
            match = pattern.search(line)
            entry = {"path": path, "line": number, "content": _around(line, match)}
            if match is None and number - last <= self._context:
                self._entries.append({**entry, "context": True})
            elif match is None:
                before.append({**entry, "context": True})
            elif self._add(entry):
                self._entries[-1:-1] = [each for each in before if number - each["line"] <= self._context]
                before.clear()
                last = number

    def _add(self, entry: dict[str, Any]) -> bool:
        """Count a finding, and add it to the answer if the finding is on the requested page and there is room."""
        self._total += 1
        if self._total <= self.request["offset"] or self._shown >= self.request["limit"] or self._room < 0:
            return False
        self._room -= len(entry["path"]) + len(entry.get("content", ""))
        if self._room < 0 and self._shown:
            return False
        self._shown += 1
        self._entries.append(entry)
        return True

    def answer(self) -> dict[str, Any]:
        """Return the answer for the model."""
        answer: dict[str, Any] = {"matches": self._entries}
        if self.mode == "files_only":
            answer = {"files": [entry["path"] for entry in self._entries]}
        elif self.mode == "count":
            answer = {"counts": {entry["path"]: entry["count"] for entry in self._entries}}
        shown = self.request["offset"] + self._shown
        answer.update(total_count=self._total, truncated=shown < self._total or not self.whole)
        if shown < self._total:
            answer["hint"] = "go on with offset=%d" % shown
        elif not self.whole:
            answer["hint"] = "there is more than could be searched: narrow the pattern, the path or file_glob"
        if self.mode == "count" and self.whole:
            answer["total_matches"] = self._lines
        return answer


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern. Forms that other programs use, `[[:alpha:]]` and `(?<name>…)`, are accepted, too."""

    def plain(token: re.Match[str]) -> str:
        return re.sub(r"\[:(\w+):\]", lambda name: _CLASSES.get(name[1], name[0]), token[0])

    return re.compile(re.sub(r"\(\?<(?=\w)", "(?P<", _BRACKETS.sub(plain, pattern)))


def lines_of(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the number and the text, without its end, of each line of a file; nothing for binary data."""
    start = file.read(_SNIFF_BYTES)
    wide = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in start and not wide:
        return
    file.seek(0)
    text = io.TextIOWrapper(file, "utf-16" if wide else "utf-8-sig", errors="replace", newline="\n")
    number, ended = 0, True
    for line in iter(lambda: text.readline(_LONGEST_LINE), ""):
        number, ended = number + ended, line.endswith("\n")
        yield number, (line[:-1] if ended else line).rstrip("\r")


def _around(line: str, match: re.Match[str] | None) -> str:
    """Return a line, cut around its match if it is long."""
    start = 0
    if match is not None and match.end() > LINE_CHARS:
        start = max(0, min(match.start() - _BEFORE_CHARS, len(line) - LINE_CHARS))
    end = start + LINE_CHARS
    return "..." * (start > 0) + line[start:end] + "..." * (end < len(line))


def path_matches(path: str, glob: str) -> bool:
    """Return whether a relative path matches a glob. A glob without a slash is compared with the path's last part, any
    other glob with the whole path.

    `*` and `?` do not match a slash; a part `**` matches any number of directories.
    """
    parts = path.split("/")
    if "/" not in glob:
        return fnmatchcase(parts[-1], glob)
    glob_parts = (glob[2:] if glob.startswith("./") else glob).lstrip("/").split("/")
    # An automaton, so that even a glob with many `**` takes only time proportional to its length times the path's.
    states = _close({0}, glob_parts)
    for part in parts:
        reached = {
            n if glob_parts[n] == "**" else n + 1 for n in states if n < len(glob_parts) and _part(part, glob_parts[n])
        }
        states = _close(reached, glob_parts)
    return len(glob_parts) in states


def _part(part: str, glob: str) -> bool:
    return glob == "**" or fnmatchcase(part, glob)


def _close(states: Iterable[int], wanted: Sequence[str]) -> set[int]:
    """Return these states, and all states reached from them if `**` matches nothing."""
    closed: set[int] = set()
    for first in states:
        state = first
        closed.add(state)
        while state < len(wanted) and wanted[state] == "**":
            state += 1
            closed.add(state)
    return closed


# The files to search.


def files_below(start: str, skipped: Sequence[str]) -> Files:
    """Return the regular files below a directory, or `start` itself if it is a file. Links to files count as files.
    Links to directories are not followed, because they may lead in circles, or out of the workspace."""
    names = [start]
    if os.path.isdir(start):
        names = []
        for directory, below, inside in os.walk(start):
            below[:] = [name for name in below if not _is_skipped(name, skipped)]
            names += [os.path.join(directory, name) for name in inside if not _is_skipped(name, skipped)]
    return {os.path.normpath(name): _opening(name) for name in names if os.path.isfile(name)}


def _is_skipped(name: str, skipped: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in skipped)


def _opening(name: str) -> Callable[[], BinaryIO]:
    return lambda: open(name, "rb")


def add_archived(files: Files, stream: BinaryIO) -> None:
    """Add the files of a stream of several tar archives. If the stream was cut off, add the files before the cut and
    raise `tarfile.TarError`."""
    with tarfile.open(fileobj=stream, mode="r|", ignore_zeros=True) as archive:
        for member in archive:
            name, linked = os.path.normpath(member.name), os.path.normpath(member.linkname)
            if member.islnk() and linked in files:
                files[name] = files[linked]
            elif member.isreg() and not member.issparse():
                opened = archive.extractfile(member)
                files[name] = functools.partial(io.BytesIO, opened.read() if opened else b"")


def _stop(*_: object) -> None:
    raise _Stopped


def main() -> None:
    """Search as the request says, and print the answer."""
    stream = sys.stdin.buffer
    request = json.loads(stream.readline().decode())
    search = Search(request)
    files: Files = {}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft > _MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))
    signal.signal(signal.SIGALRM, _stop)
    more = {}
    try:
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        if request["source"] == "slot":
            files = files_below(request["start"], request["skipped"])
        elif request["source"] == "names":
            names = stream.read().decode("utf-8", "surrogateescape").split("\0")[:-1]
            files = {os.path.normpath(name): _opening(name) for name in names}
        else:
            with contextlib.suppress(tarfile.TarError):
                add_archived(files, stream)
        search.run(files)
    except (re.error, OverflowError, RecursionError) as error:
        more = {"error": "the search failed: %s" % error}
    except MemoryError:
        search.whole = False
    except _Stopped:
        search.whole = False
        more = {"note": "stopped after %g s: these are not all; narrow the path or the pattern" % request["limit_s"]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(more if "error" in more else {**search.answer(), **more}))


if __name__ == "__main__":
    main()
