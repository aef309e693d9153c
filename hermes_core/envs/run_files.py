"""The files in a run's folder. Somebody else may have made it, so what is read is a file, and no link is written
through."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_LINK = "it is a link, and no link in a run's folder is written through"


def open_to_read(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file. A pipe or a device is refused, and not waited for.

    Raises:
        OSError: it can't be read, or is no file.
    """
    return os.fdopen(_file(path, os.O_RDONLY), "rb", buffering)


def open_to_write(path: Path, flags: int = 0) -> int:
    """Open a file, which is made if it is missing, and return its descriptor.

    Args:
        flags: in addition to `O_CREAT`; without an access mode for writing alone.

    Raises:
        OSError: it can't be written, is no file, or is a link.
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
        OSError: it can't be made, or is a link.
    """
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))
