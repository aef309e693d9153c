"""Messages with descriptors over a unix socket."""

from __future__ import annotations

import array
import socket

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 8
_CLOEXEC = 0x40000000
"""MSG_CMSG_CLOEXEC, which the socket module does not name."""


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """One message with descriptors; raises BlockingIOError when the other side is not reading."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Up to `size` bytes of one message and its descriptors (close-on-exec); no bytes when the other side is gone."""
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(_MOST * 4), _CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)
