"""Descriptors: sending them over a unix socket, and unnamed files to pass data in."""

from __future__ import annotations

import array
import os
import socket

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 8
_CLOEXEC = 0x40000000
"""MSG_CMSG_CLOEXEC, which the socket module does not name."""


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors. Raises BlockingIOError if the socket's buffer is full."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive one message: up to `size` bytes and its descriptors (close-on-exec). No bytes: the peer is gone."""
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MOST * 4), _CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def memory_file(data: bytes, folder: str) -> int:
    """Return a descriptor to read `data` from: a memory file, or else an unnamed file in `folder`. Raises OSError."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hermes", os.MFD_CLOEXEC)
    else:  # Python 3.7
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
