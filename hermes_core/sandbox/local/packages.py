"""A cache in a file for the search for installed packages of this host's Pythons."""

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
"""If a directory changed less than 2 s before the search, another change may not change its time."""


@functools.cache
def package_folders(file: Path) -> tuple[str, ...]:
    """Return the result of `view.package_folders`: from `file` if that is up to date, otherwise from a new search, with
    whose result the file is replaced.

    A search reads thousands of directories and takes a third of a second. Comparing the times of their last changes
    takes a tenth of that. No folder can come, go, or become readable without such a change.
    """
    prefixes = view.interpreter_prefixes()
    content = _read(file)
    if content is not None and content["prefixes"] == list(prefixes) and _is_current(content["searched"]):
        return tuple(content["found"])
    folders, change_times, is_settled = _search(prefixes, os.geteuid())
    if is_settled:
        _write(file, {"prefixes": prefixes, "found": folders, "searched": change_times})
    return folders


@functools.cache
def _search(prefixes: tuple[str, ...], user: int) -> tuple[tuple[str, ...], Mapping[str, int], bool]:
    """Search, but only once for each process and user, however many runtimes the process has.

    Returns:
        The folders, the time of the last change of each directory that was read, and whether these times can be used.
    """
    times: dict[str, int] = {}
    began = time.time_ns()
    folders = view.search_packages(prefixes, lambda directory: times.update({directory: _change_time(directory)}))
    return folders, times, all(changed < began - _SETTLED_NS for changed in times.values())


def _is_current(times: Mapping[str, int]) -> bool:
    return all(_change_time(directory) == changed for directory, changed in times.items())


def _change_time(directory: str) -> int:
    """Return the time of the last change of a directory or of its mode, in nanoseconds; -1 if it is unknown."""
    try:
        return os.stat(directory).st_ctime_ns  # noqa: PTH116 - paths as objects would take twice the time
    except OSError:
        return -1


def _read(file: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if there is no file, or another version wrote it."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.keys() == {"prefixes", "found", "searched"} else None


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file atomically, because other processes read it. If that fails, they search again."""
    unfinished = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
            unfinished = Path(stream.name)
            json.dump(content, stream)
        unfinished.replace(file)
    except OSError:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
