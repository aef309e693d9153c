"""Which processes run, found with nothing but /proc and grep: a small system has no `ps` and no `pgrep`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def listing(pattern: str) -> str:
    """Return a command of the shell that prints a line for each process whose command line has this pattern.

    A bracket in the pattern keeps it from being found in the command's own: `sleep 432[1]`.
    """
    return f"grep -als '{pattern.replace(' ', '.')}' /proc/[0-9]*/cmdline"  # a NUL is between two arguments


def runs(pattern: str) -> bool:
    """Return whether a process of this host has this pattern in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if re.search(pattern, path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")):
                return True
    return False
