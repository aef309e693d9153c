"""Data as a descriptor to read from, with no name anywhere."""

from __future__ import annotations

import os


def memory_file(data: bytes, folder: str) -> int:
    """A descriptor to read `data` from; of a file in `folder` where there are no memory files. Raises OSError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hermes", os.MFD_CLOEXEC)
    else:
        path = os.path.join(folder, "data-" + os.urandom(8).hex())
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd
