"""The output of builds: a file for each image, with a limit on its size and on the number of files."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("hermes_core.docker")

KEPT = 200
"""Maximum number of files. The oldest ones are removed."""

MAX_BYTES = 4 << 20
"""Maximum size of one file in bytes. Later output is left out, except for the last lines."""

LAST_LINES, LINE = 20, 500
"""The number of last lines that an error shows, and the maximum number of characters of each."""


class BuildLog:
    """The output of one build. If the file can't be written, a warning is logged, and the build goes on.

    Args:
        folder: the folder of the files; None writes no file.
        tag: the tag of the image, which names the file.
    """

    def __init__(self, folder: Path | None, tag: str) -> None:
        self.path = None if folder is None else folder / f"{tag}.log"
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._size = 0
        self._file: BinaryIO | None = None
        try:
            if self.path is not None:
                self._file = _new_file(self.path)
        except OSError as error:
            self._give_up(error)

    def add(self, text: str) -> None:
        """Add a piece of output."""
        self._last.extend(line[:LINE] for line in text.splitlines() if line.strip())
        data = text.encode("utf-8", "replace")
        fits, self._size = self._size + len(data) <= MAX_BYTES, self._size + len(data)
        if fits:
            self._write(data)

    @property
    def last_lines(self) -> str:
        """Return the end of the output."""
        return "\n".join(self._last)

    @property
    def hint(self) -> str:
        """Return a hint for people on where to find the output."""
        return f"its output is in {self.path}" if self._file is not None else "its last lines are above"

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._size > MAX_BYTES:
            self._write(f"\n… {self._size - MAX_BYTES} bytes or more are left out …\n{self.last_lines}\n".encode())
        if self._file is not None and not self._file.closed:
            self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            if self._file is not None and not self._file.closed:
                self._file.write(data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the output of a build can't be kept in %s: %s", self.path, error.strerror)
        if self._file is not None:
            self._file.close()
        self._file = None


def _new_file(path: Path) -> BinaryIO:
    """Make a log, unbuffered so that people can follow it. Remove the oldest logs if there are too many.

    The old file is unlinked, not truncated, because another driver that builds the same image may still write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    others = sorted(path.parent.glob("*.log"), key=_mtime)
    for old in {*others[: max(0, len(others) + 1 - KEPT)], path}:
        old.unlink(missing_ok=True)
    return path.open("xb", buffering=0)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another driver has removed it
        return 0.0
