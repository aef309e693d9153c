"""The guest's entry point: becomes the bridge between a channel and the daemon, and starts the daemon if needed."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import sys

from ..linux import descriptors

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

NO_GUEST = 4
"""The exit status for a guest that can't be joined because it has ended. Its slots are gone."""
_LOG_TAIL = 4000
"""Bytes of the guest's log that are reported when it has died."""


def main(state_dir: str, join: bool) -> None:
    """Connect our standard input and output to the sandbox's one daemon. Unless `join`, start it if there is none."""
    os.makedirs(state_dir, mode=0o700, exist_ok=True)
    os.chmod(state_dir, 0o700)
    with open(os.path.join(state_dir, "lock"), "a") as lock:
        # Two channels that are opened at once must not start two daemons.
        fcntl.flock(lock, fcntl.LOCK_EX)
        sock = _connect(state_dir)
        if sock is None:
            if join or _has_ended(state_dir):
                sys.stderr.write(_log_tail(state_dir))
                sys.exit(NO_GUEST)
            sock = _start(state_dir)
    if bridge(sock) and not _has_ended(state_dir):
        sys.stderr.write(_log_tail(state_dir))


def _has_ended(state_dir: str) -> bool:
    try:
        with open(os.path.join(state_dir, "heartbeat"), "rb") as file:
            return file.readline().strip() == b"end"
    except FileNotFoundError:
        return False


def _log_tail(state_dir: str) -> str:
    try:
        with open(os.path.join(state_dir, "log"), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _address(state_dir: str) -> str:
    return os.path.join(state_dir, "guest.sock")


def _connect(state_dir: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _by_short_name(sock.connect, state_dir)
    except OSError as error:
        sock.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            return None
        raise
    return sock


def _by_short_name(call: Callable[[str], object], state_dir: str) -> None:
    """Call `call` with a short path of the socket: an address has at most 108 bytes, and `state_dir` may be longer."""
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call("/proc/self/fd/%d/guest.sock" % fd)
    finally:
        os.close(fd)


def _start(state_dir: str) -> socket.socket:
    try:
        os.unlink(_address(state_dir))
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _by_short_name(listener.bind, state_dir)
    os.chmod(_address(state_dir), 0o600)
    listener.listen(8)
    if os.fork() == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                from .daemon import serve  # slow to import, and a bridge that only joins doesn't need it

                serve(listener, state_dir)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    listener.close()
    os.wait()
    sock = _connect(state_dir)
    if sock is None:
        sys.stderr.write(_log_tail(state_dir))
        sys.exit("the guest ended as soon as it was started")
    return sock


def bridge(sock: socket.socket) -> bool:
    """Pass our standard input and output to the daemon, and wait until one side ends. Return whether the daemon died.

    The daemon reads and writes the descriptors itself. A bridge that copies would have to be woken for each frame.
    """
    descriptors.send(sock, b"\0", (0, 1))
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    for fd in (0, 1):
        poll.register(fd, 0)  # only to learn that the other end is gone
    ready = dict(poll.poll())
    return sock.fileno() in ready and not sock.recv(1)  # a daemon that ends the connection itself sends a byte first
