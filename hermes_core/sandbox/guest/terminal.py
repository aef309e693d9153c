"""Pseudo-terminals: opened by the slot's parent with the slot's rights, driven by the guest from the other end."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

TYPE = "xterm-256color"
"""What programs are told that their terminal is (`TERM`), unless the caller says so."""
DEVICE = "/dev/ptmx"
_SIZE = struct.Struct("4H")


def open_pair(rows: int, columns: int) -> tuple[int, int, str]:
    """Open a terminal: return our end, the program's end, and its path, by which a session makes it its own.

    Raises:
        OSError: no terminal is available here.
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
    """Give the terminal a size in characters; its programs get SIGWINCH if it is another one. Raises OSError."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, _SIZE.pack(rows, columns, 0, 0))


def end_of_file(fd: int) -> bytes:
    """Return the end-of-file key: Ctrl-D, unless its programs have chosen another one."""
    try:
        key = termios.tcgetattr(fd)[6][termios.VEOF]
    except termios.error:
        return b"\x04"
    return key if isinstance(key, bytes) and key != b"\0" else b"\x04"
