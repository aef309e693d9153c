"""Pseudo-terminals. The slot's parent opens them, with the rights of the slot, and the guest has the other end."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

TYPE = "xterm-256color"
"""The value of `TERM`, unless the caller sets it."""
DEVICE = "/dev/ptmx"
_SIZE = struct.Struct("4H")


def open_pair(rows: int, columns: int) -> tuple[int, int, str]:
    """Open a terminal. Return our end, the program's end, and the path of the program's end.

    Raises:
        OSError: no terminal is available.
    """
    ours, theirs = os.openpty()
    try:
        resize(ours, rows, columns)
        return ours, theirs, os.ttyname(theirs)
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise


def resize(fd: int, rows: int, columns: int) -> None:
    """Set the size of a terminal in characters. If it changes, the programs get SIGWINCH. Raises OSError."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, _SIZE.pack(rows, columns, 0, 0))


def end_of_file(fd: int) -> bytes:
    """Return the end-of-file key of a terminal: Ctrl-D, unless a program has set another key."""
    try:
        key = termios.tcgetattr(fd)[6][termios.VEOF]
    except termios.error:
        return b"\x04"
    return key if isinstance(key, bytes) and key != b"\0" else b"\x04"
