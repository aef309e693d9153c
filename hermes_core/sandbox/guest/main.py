"""The guest's entry: become the bridge to the daemon that is there already, or start it first."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import sys
import tarfile  # noqa: F401  (the slots' parents use it, and can't import any more once they are confined)
import traceback

from . import confine
from .daemon import Daemon
from .loop import Loop


NO_GUEST = 4
"""The exit status that says: there is no guest to join, so its slots are gone."""


def main(state_dir, join):
    """Connect this process's standard input and output to the sandbox's one daemon, started if not `join`."""
    os.makedirs(state_dir, mode=0o700, exist_ok=True)
    os.chmod(state_dir, 0o700)
    with open(os.path.join(state_dir, "lock"), "a") as lock:
        # Two channels opened at once must not start two daemons.
        fcntl.flock(lock, fcntl.LOCK_EX)
        sock = _connect(state_dir)
        if sock is None:
            if join or _has_ended(state_dir):
                sys.exit(NO_GUEST)
            sock = _start(state_dir)
    bridge(sock)


def _has_ended(state_dir):
    try:
        with open(os.path.join(state_dir, "heartbeat")) as file:
            return file.read().strip() == "end"
    except FileNotFoundError:
        return False


def _address(state_dir):
    return os.path.join(state_dir, "guest.sock")


def _connect(state_dir):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _by_short_name(sock.connect, state_dir)
    except OSError as error:
        sock.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
            return None
        raise
    return sock


def _by_short_name(call, state_dir):
    """A socket's address is at most 108 bytes long: go through the directory's descriptor."""
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call("/proc/self/fd/%d/guest.sock" % fd)
    finally:
        os.close(fd)


def _start(state_dir):
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
                _serve(listener, state_dir)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    listener.close()
    os.wait()
    return _connect(state_dir)


def _serve(listener, state_dir):
    log = os.open(os.path.join(state_dir, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, 256)
    listener.setblocking(False)
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    confine.become_subreaper()
    loop = Loop()
    Daemon(loop, listener, state_dir)
    loop.run()
    os._exit(0)


def bridge(sock):
    """Copy both ways until one side ends. Bounded: nothing is read that the other side has not taken yet."""
    sock.setblocking(False)
    os.set_blocking(0, False)
    os.set_blocking(1, False)
    inward, outward = bytearray(), bytearray()
    limit = 1 << 18
    poll = select.poll()
    while True:
        events = (select.POLLIN if len(outward) < limit else 0) | (select.POLLOUT if inward else 0)
        poll.register(sock.fileno(), events)
        poll.register(0, select.POLLIN if len(inward) < limit else 0)
        poll.register(1, select.POLLOUT if outward else 0)
        for fd, ready in poll.poll():
            if fd == 1 and ready & (select.POLLERR | select.POLLHUP):
                return
            if fd == 0 and ready & (select.POLLIN | select.POLLHUP) and not _move(lambda: os.read(0, limit), inward):
                return
            if fd == sock.fileno() and ready & (select.POLLIN | select.POLLHUP):
                if not _move(lambda: sock.recv(limit), outward):
                    _write_rest(outward)
                    return
        # Written at once where that is possible: one round of the poll less for every frame.
        _push(inward, sock.send)
        _push(outward, lambda data: os.write(1, data))


def _move(read, buffer):
    try:
        data = read()
    except BlockingIOError:
        return True
    except OSError:
        return False
    buffer += data
    return bool(data)


def _push(buffer, write):
    try:
        while buffer:
            del buffer[: write(buffer)]
    except BlockingIOError:
        pass
    except OSError:
        sys.exit(0)


def _write_rest(buffer):
    os.set_blocking(1, True)
    _push(buffer, lambda data: os.write(1, data))
