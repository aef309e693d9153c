"""The guest's entry: become the bridge to the daemon that is there already, or start it first."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

NO_GUEST = 4
"""The exit status that says: there is no guest to join, so its slots are gone."""
_BUFFER = 1 << 18
_LAST_WORDS = 4000


def main(state_dir: str, join: bool) -> None:
    """Connect this process's standard input and output to the sandbox's one daemon, started if not `join`."""
    os.makedirs(state_dir, mode=0o700, exist_ok=True)
    os.chmod(state_dir, 0o700)
    with open(os.path.join(state_dir, "lock"), "a") as lock:
        # Two channels opened at once must not start two daemons.
        fcntl.flock(lock, fcntl.LOCK_EX)
        sock = _connect(state_dir)
        if sock is None:
            if join or _has_ended(state_dir):
                sys.stderr.write(_last_words(state_dir))
                sys.exit(NO_GUEST)
            sock = _start(state_dir)
    if bridge(sock) and not _has_ended(state_dir):
        sys.stderr.write(_last_words(state_dir))


def _has_ended(state_dir: str) -> bool:
    try:
        with open(os.path.join(state_dir, "heartbeat"), "rb") as file:
            return file.readline().strip() == b"end"
    except FileNotFoundError:
        return False


def _last_words(state_dir: str) -> str:
    try:
        with open(os.path.join(state_dir, "log"), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LAST_WORDS))
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
    """A socket's address is at most 108 bytes long: go through the directory's descriptor."""
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
                from .service import serve  # a bridge that only joins has no need of it

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
        sys.stderr.write(_last_words(state_dir))
        sys.exit("the guest ended as soon as it was started")
    return sock


def bridge(sock: socket.socket) -> bool:
    """Copy both ways until one side ends; whether that was the daemon.

    Bounded: nothing is read that the other side has not taken yet.
    """
    sock.setblocking(False)
    os.set_blocking(0, False)
    os.set_blocking(1, False)
    inward, outward = bytearray(), bytearray()
    poll = select.poll()
    while True:
        events = (select.POLLIN if len(outward) < _BUFFER else 0) | (select.POLLOUT if inward else 0)
        poll.register(sock.fileno(), events)
        poll.register(0, select.POLLIN if len(inward) < _BUFFER else 0)
        poll.register(1, select.POLLOUT if outward else 0)
        for fd, ready in poll.poll():
            if fd == 1 and ready & (select.POLLERR | select.POLLHUP):
                return False
            if fd == 0 and ready & (select.POLLIN | select.POLLHUP) and not _move(lambda: os.read(0, _BUFFER), inward):
                return False
            if fd == sock.fileno() and ready & (select.POLLIN | select.POLLHUP):
                if not _move(lambda: sock.recv(_BUFFER), outward):
                    os.set_blocking(1, True)
                    _push(outward, lambda data: os.write(1, data))
                    return True
        # Written at once where that is possible: one round of the poll less for every frame.
        _push(inward, sock.send)
        _push(outward, lambda data: os.write(1, data))


def _move(read: Callable[[], bytes], buffer: bytearray) -> bool:
    try:
        data = read()
    except BlockingIOError:
        return True
    except OSError:
        return False
    buffer += data
    return bool(data)


def _push(buffer: bytearray, write: Callable[[bytearray], int]) -> None:
    try:
        while buffer:
            del buffer[: write(buffer)]
    except BlockingIOError:
        pass
    except OSError:
        sys.exit(0)
