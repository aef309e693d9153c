"""The guest's entry: become the bridge to the daemon that is there already, or start it first."""

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
"""The exit status that says: there is no guest to join, so its slots are gone."""
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
    """Use a short name by the directory's descriptor, as a socket's address is at most 108 bytes long."""
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
                from .daemon import serve  # a bridge that only joins has no need of it

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
    """Give our standard input and output to the daemon, and stay until one side ends; whether the daemon has died.

    The daemon reads and writes them itself: copying here would be two more processes to wake for each frame.
    """
    descriptors.send(sock, b"\0", (0, 1))
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    for fd in (0, 1):
        poll.register(fd, 0)  # no more than whether its other end is gone
    ready = dict(poll.poll())
    return sock.fileno() in ready and not sock.recv(1)
