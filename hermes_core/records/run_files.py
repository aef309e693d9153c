"""Opens the files in a run's folder. Somebody else may have made the folder, so only regular files are read, and
symbolic links are not followed for writing."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from hermes_core.errors import OutputError

_LINK = "it is a link, and no link in a run's folder is written through"


def open_to_read(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file. A pipe or a device is refused at once.

    Raises:
        OSError: the path can't be read, or is no regular file.
    """
    return os.fdopen(_file(path, os.O_RDONLY), "rb", buffering)


def open_to_write(path: Path, flags: int = 0) -> int:
    """Open a file, made if it is missing, and return its descriptor.

    Args:
        flags: flags of `os.open` in addition to `O_CREAT`. Without an access mode, the file is open for writing only.

    Raises:
        OSError: the path can't be written, is no regular file, or is a link.
    """
    try:
        return _file(path, flags | (0 if flags & os.O_RDWR else os.O_WRONLY) | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _LINK, str(path)) from error
        raise


def _file(path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no file", str(path))


def make_folder(path: Path) -> None:
    """Make a folder if it is missing.

    Raises:
        OSError: the folder can't be made, or the path is a link.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))


class LineFile:
    """A file of lines that one program writes. Each line is appended in one write, so after `kill -9` at most the last
    line is incomplete. The methods block.

    Args:
        hint: advice for the error if the file can't be written.
        flags: as for `open_to_write`.
    """

    def __init__(self, path: Path, hint: str, flags: int = 0) -> None:
        self.path = path
        self.size = 0
        """The file's size in bytes, once it is open."""
        self._hint = hint
        self._flags = flags | os.O_RDWR | os.O_APPEND
        self._file = -1

    def open(self) -> None:
        """Open the file; without this call, the first `append` opens it.

        Raises:
            OSError: as `open_to_write`.
        """
        self._file = open_to_write(self.path, self._flags)
        self.size = os.fstat(self._file).st_size

    def append(self, line: bytes) -> None:
        """Write a line.

        Raises:
            OutputError: the file can't be opened, or the disk is full or fails. A partly written line is removed.
        """
        written = 0
        try:
            if self._file < 0:
                self.open()
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            if self._file >= 0:
                os.ftruncate(self._file, self.size)
            raise OutputError(f"can't write to {self.path}: {error.strerror}", hint=self._hint) from error
        self.size += len(line)

    def sync(self) -> None:
        """Wait until all written lines are on the disk, which can take a while."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
