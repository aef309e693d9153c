"""The output of builds: a file for each image, with a limit on its size and on the number of files."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("hermes_core.docker")

KEPT = 200
"""Number of files that are kept, the newest ones."""

MAX_BYTES = 4 << 20
"""Maximum size of one file. What a build writes after that is left out, except for its last lines."""

LAST_LINES, LINE = 20, 500
"""Number of lines that an error repeats, and of characters of each."""


class BuildLog:
    """The output of one build. A file that can't be written is reported once, and does not end the build.

    Args:
        folder: where the files are; None keeps none.
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
        """Return where the whole output is, for people."""
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
    """Open a log anew, unbuffered, so that people can follow it. Remove the oldest ones if there are too many.

    Another driver that builds the same image keeps writing to the file that it has, which has no name any more.
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
