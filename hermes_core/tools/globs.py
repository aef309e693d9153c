"""Globs as models write them, with `**` and braces, for slots whose `find` knows neither."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

MAX_GLOBS = 32
"""The most globs that braces are expanded to."""


def expand_braces(glob: str) -> list[str]:
    """`*.{js,ts}` as `*.js` and `*.ts`. Braces beyond `MAX_GLOBS` stay as they are."""
    pending, done = [glob], list[str]()
    while pending:
        each = pending.pop(0)
        braces = re.search(r"\{([^{}]*,[^{}]*)\}", each)
        words = braces[1].split(",") if braces else []
        if braces is None or len(words) + len(pending) + len(done) > MAX_GLOBS:
            done.append(each)
        else:
            pending = [each[: braces.start()] + word + each[braces.end() :] for word in words] + pending
    return list(dict.fromkeys(done))


def path_matches(path: str, glob: str) -> bool:
    """Whether a relative path matches: without a slash in the glob by its last part, else as a whole.

    `*` and `?` do not match a slash; a part `**` matches any number of directories.
    """
    parts = path.split("/")
    if "/" not in glob:
        return fnmatchcase(parts[-1], glob)
    wanted = glob.removeprefix("./").lstrip("/").split("/")
    # As an automaton, so that a glob of many `**` takes no more than its length times the path's.
    states = _closed({0}, wanted)
    for part in parts:
        reached = {n if wanted[n] == "**" else n + 1 for n in states if n < len(wanted) and _part(part, wanted[n])}
        states = _closed(reached, wanted)
    return len(wanted) in states


def _part(part: str, glob: str) -> bool:
    return glob == "**" or fnmatchcase(part, glob)


def _closed(states: Iterable[int], wanted: Sequence[str]) -> set[int]:
    """These states, and those reached by letting `**` match nothing."""
    closed = set[int]()
    for first in states:
        state = first
        closed.add(state)
        while state < len(wanted) and wanted[state] == "**":
            state += 1
            closed.add(state)
    return closed
