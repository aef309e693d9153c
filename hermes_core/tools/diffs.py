"""Unified diffs of a tool's changes, limited in time and size."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from hermes_core.tools.limits import cut_output

DIFF_CHARS = 20_000
"""Maximum number of characters of a diff in one answer."""

_CONTEXT = 3
_MAX_COMPARED = 5000
"""Maximum number of differing lines that are compared. More are shown as one replacement, because comparing takes too
long."""


def unified_diff(path: str, old: str | None, new: str | None) -> str:
    """Return the change of one file, at most `DIFF_CHARS` long. None stands for a file that does not exist."""
    name = path.lstrip("/")
    if "\0" in (old or "") or "\0" in (new or ""):
        return f"Binary file {name} differs\n"
    header = [
        "--- /dev/null\n" if old is None else f"--- a/{name}\n",
        "+++ /dev/null\n" if new is None else f"+++ b/{name}\n",
    ]
    hunks = list(_hunks(_lines(old or ""), _lines(new or "")))
    text = "".join([*header, *hunks]) if hunks or old is None or new is None else ""
    return cut_output(text.encode("utf-8", "surrogateescape"), limit=DIFF_CHARS)[0]


def _lines(text: str) -> list[str]:
    *ended, rest = text.split("\n")
    lines = [f"{line}\n" for line in ended]
    return [*lines, rest] if rest else lines


def _hunks(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    # Don't compare the common start and end, so that a small change of a long file is cheap.
    same = _common(old, new)
    same_end = _common(old[same:][::-1], new[same:][::-1])
    skip = max(0, same - _CONTEXT)
    ends = [max(len(lines) - same_end, len(lines) - same_end + _CONTEXT) for lines in (old, new)]
    one, other = old[skip : ends[0]], new[skip : ends[1]]
    for group in _groups(one, other):
        first, last = group[0], group[-1]
        yield f"@@ -{_range(skip, first[1], last[2])} +{_range(skip, first[3], last[4])} @@\n"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (_marked(" ", line) for line in one[i1:i2])
                continue
            yield from (_marked("-", line) for line in one[i1:i2])
            yield from (_marked("+", line) for line in other[j1:j2])


def _groups(one: Sequence[str], other: Sequence[str]) -> Iterator[list[tuple[str, int, int, int, int]]]:
    if max(len(one), len(other)) > _MAX_COMPARED:
        yield [("replace", 0, len(one), 0, len(other))]
    elif one != other:
        yield from map(list, difflib.SequenceMatcher(None, one, other).get_grouped_opcodes(_CONTEXT))


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _range(skip: int, start: int, end: int) -> str:
    """Return a range of lines in diff notation: counted from 1; an empty range names the line before it."""
    length = end - start
    first = skip + start + (1 if length else 0)
    return str(first) if length == 1 else f"{first},{length}"


def _marked(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"
