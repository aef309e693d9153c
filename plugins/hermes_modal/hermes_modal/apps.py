"""The apps in which this user's drivers have made sandboxes. Modal lists sandboxes by app, and `ps` is given none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from hermes_modal.config import APP_NAME

log = logging.getLogger(__name__)

KEPT = 64
"""Maximum number of remembered names that are checked, latest first, because each costs a request."""
_READ_BYTES = KEPT * 80


class Apps:
    """Names of apps: those known in this process, and those in a file of the user.

    Args:
        file: has one name per line, and is appended to; None remembers nothing.
    """

    def __init__(self, known: Iterable[str], file: Path | None) -> None:
        self._known = set(known)
        self._file = file
        self._noted: set[str] = set()

    def add(self, name: str) -> None:
        """Note that the process has a profile with this app."""
        self._known.add(name)

    def names(self) -> list[str]:
        """Return all names. Blocks while a small file is read."""
        return sorted(self._known.union(self._read_names()))

    def note(self, name: str) -> None:
        """Note that a sandbox is about to be made there, and remember it for other processes. Blocks as `names`
        does."""
        self._known.add(name)
        if self._file is None or name in self._noted:
            return
        self._noted.add(name)
        if name in self._read_names():
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._file.open("a", encoding="ascii") as file:
                file.write(f"{name}\n")  # one write, so that the names of two processes don't mix
        except OSError as error:
            log.warning("`hermes-rl ps` will not know of the app %s: %s", name, error)

    def _read_names(self) -> set[str]:
        if self._file is None:
            return set()
        try:
            with self._file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
                lines = file.read().decode("ascii", "replace").splitlines()
        except FileNotFoundError:
            return set()
        except OSError as error:
            log.warning("the apps of other processes are not known: %s", error)
            return set()
        return {line for line in lines[-KEPT:] if APP_NAME.fullmatch(line)}
