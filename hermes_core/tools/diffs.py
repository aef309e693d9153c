"""Unified diffs of a tool's changes, limited in time and size."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from hermes_core.tools.fuzzy import common_parts
from hermes_core.tools.limits import cut_output

DIFF_CHARS = 20_000
"""Maximum number of characters of a diff in one answer."""


def make_diff(path: str, old: str | None, new: str | None) -> str:
    """Return a diff of one file's old and new text, at most `DIFF_CHARS` long. None stands for a missing file."""
    name = path.lstrip("/")
    if "\0" in (old or "") or "\0" in (new or ""):
        return f"Binary file {name} differs\n"
    header = [
        "--- /dev/null\n" if old is None else f"--- a/{name}\n",
        "+++ /dev/null\n" if new is None else f"+++ b/{name}\n",
    ]
    hunks = list(_hunks(*(re.findall(r".*\n|.+", text or "") for text in (old, new))))
    text = "".join([*header, *hunks]) if hunks or old is None or new is None else ""
    return cut_output(text.encode("utf-8", "surrogateescape"), limit=DIFF_CHARS)[0]


class _Matcher(difflib.SequenceMatcher[str]):
    """Compares the lines of two texts, within a limited time."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        super().__init__()
        self._parts = [*common_parts(old, new), (len(old), len(new), 0)]

    def get_matching_blocks(self) -> list[difflib.Match]:
        return [difflib.Match(*part) for part in self._parts]


def _hunks(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    for group in _Matcher(old, new).get_grouped_opcodes():
        first, last = group[0], group[-1]
        yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
        for tag, i1, i2, j1, j2 in group:
            yield from (_mark(" " if tag == "equal" else "-", line) for line in old[i1:i2])
            yield from (_mark("+", line) for line in new[j1:j2] if tag != "equal")


def _range(start: int, end: int) -> str:
    """Return a range of lines in diff notation, which counts from 1 and gives an empty range the number of the line
    before it."""
    length = end - start
    first = start + (1 if length else 0)
    return str(first) if length == 1 else f"{first},{length}"


def _mark(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"
