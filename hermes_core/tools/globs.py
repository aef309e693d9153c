"""Globs as models write them, with `**` and braces, for slots whose `find` knows neither."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

MAX_GLOBS = 32
"""Maximum number of globs from expanding braces."""


def expand_braces(glob: str) -> list[str]:
    """Return `*.{js,ts}` as `*.js` and `*.ts`. Braces beyond `MAX_GLOBS` are left as they are."""
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
    """Return whether a relative path matches. A glob without a slash is compared with the last part, others with the
    whole path.

    `*` and `?` do not match a slash; a part `**` matches any number of directories.
    """
    parts = path.split("/")
    if "/" not in glob:
        return fnmatchcase(parts[-1], glob)
    wanted = glob.removeprefix("./").lstrip("/").split("/")
    # Run as an automaton, so that a glob with many `**` takes only its length times the path's length.
    states = _closed({0}, wanted)
    for part in parts:
        reached = {n if wanted[n] == "**" else n + 1 for n in states if n < len(wanted) and _part(part, wanted[n])}
        states = _closed(reached, wanted)
    return len(wanted) in states


def _part(part: str, glob: str) -> bool:
    return glob == "**" or fnmatchcase(part, glob)


def _closed(states: Iterable[int], wanted: Sequence[str]) -> set[int]:
    """Return these states, and those reached by letting `**` match nothing."""
    closed = set[int]()
    for first in states:
        state = first
        closed.add(state)
        while state < len(wanted) and wanted[state] == "**":
            state += 1
            closed.add(state)
    return closed
