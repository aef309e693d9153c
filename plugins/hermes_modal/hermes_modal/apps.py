"""The apps in which this user's drivers have made sandboxes. Modal lists sandboxes by app, but `ps` names no app."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from hermes_modal.config import APP_NAME

log = logging.getLogger(__name__)

KEPT = 64
"""Maximum number of names that are taken from the file, the latest ones, because each costs a request."""
_READ_BYTES = KEPT * 80


class Apps:
    """Names of apps: those of this process, and those in a file of the user.

    Args:
        known: the first names.
        file: a file with one name per line, to which new names are appended; None keeps them in this process only.
    """

    def __init__(self, known: Iterable[str], file: Path | None) -> None:
        self._known = set(known)
        self._file = file
        self._noted: set[str] = set()

    def add(self, name: str) -> None:
        """Add the app of a profile."""
        self._known.add(name)

    def names(self) -> list[str]:
        """Return all names. Blocks while the file is read, which is small."""
        return sorted(self._known.union(self._read_names()))

    def note(self, name: str) -> None:
        """Add the app of a sandbox that is about to be made, also to the file. Blocks as `names` does."""
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
