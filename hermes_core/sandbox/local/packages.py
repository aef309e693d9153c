"""Remembers where this host's Pythons keep installed packages, for as long as no directory in question has changed."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_core.sandbox.local import view

_SETTLED_NS = 2_000_000_000
"""A directory that changed less than this before the search may change again without a new time."""


@functools.cache
def package_folders(file: Path) -> tuple[str, ...]:
    """Return what `view.package_folders` finds, from this file if it is still right; else search and write the file.

    A search reads thousands of directories and takes a third of a second. Asking each of them for the time of its last
    change takes a tenth of that, and no folder can come, go, or become readable without such a change.
    """
    prefixes = view.interpreter_prefixes()
    kept = _read(file)
    if kept is not None and kept["prefixes"] == list(prefixes) and _unchanged(kept["searched"]):
        return tuple(kept["found"])
    found, searched, settled = _searched(prefixes, os.geteuid())
    if settled:
        _write(file, {"prefixes": prefixes, "found": found, "searched": searched})
    return found


@functools.cache
def _searched(prefixes: tuple[str, ...], user: int) -> tuple[tuple[str, ...], Mapping[str, int], bool]:
    """Search, once for all runtimes of a process and the user that it runs as.

    Returns what was found, when each directory that was read was last changed, and whether all of them were at rest.
    """
    searched: dict[str, int] = {}
    began = time.time_ns()
    found = view.search_packages(prefixes, lambda directory: searched.update({directory: _changed(directory)}))
    return found, searched, all(changed < began - _SETTLED_NS for changed in searched.values())


def _unchanged(searched: Mapping[str, int]) -> bool:
    return all(_changed(directory) == changed for directory, changed in searched.items())


def _changed(directory: str) -> int:
    """Return when a directory, or who may read it, was last changed: in nanoseconds; -1 if we can't know."""
    try:
        return os.stat(directory).st_ctime_ns  # noqa: PTH116 - paths as objects would take twice the time
    except OSError:
        return -1


def _read(file: Path) -> dict[str, Any] | None:
    """Return the contents of the file; None if there is none, or it was written by another version."""
    try:
        kept = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and kept.keys() == {"prefixes", "found", "searched"} else None


def _write(file: Path, kept: Mapping[str, Any]) -> None:
    """Replace the file as a whole, as other processes read it. Without it, they search."""
    unfinished = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
            unfinished = Path(stream.name)
            json.dump(kept, stream)
        unfinished.replace(file)
    except OSError:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
