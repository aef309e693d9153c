"""The heartbeat for the watchdog, and processes that search and remove files while the guest goes on serving."""

from __future__ import annotations

import json
import os
import select
import signal
import sys

from ..linux import removal
from . import confine

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from .loop import Loop

_USUAL = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
"""The usual world-writable directories of a system."""

END = "end"
"""The content of the heartbeat file that makes the watchdog end the sandbox."""


class Heartbeat:
    """The file that the sandbox's watchdog reads. Its first line changes with each beat.

    The line holds a number that grows, and the sandbox's time to live in seconds, for `hermes-rl reap`. It always has
    the same length and is overwritten in place, so that it can be written on a full disk too.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._beats = 0

    def beat(self, ttl_s: float) -> None:
        """Record a sign of life of the driver. Raises OSError."""
        self._beats += 1
        os.pwrite(self._fd, b"%020d %020d\n" % (self._beats, ttl_s), 0)

    def end(self) -> None:
        """Make the watchdog end the sandbox. Raises OSError."""
        os.pwrite(self._fd, END.encode("ascii") + b"\n", 0)


class Trash:
    """Removes the files that slots have discarded, in another process that lives as long as the guest.

    Args:
        path: the directory with the discarded files.
        before_removal: called in that process before each removal.
    """

    def __init__(self, path: str, before_removal: Callable[[], object]) -> None:
        self._path = path
        self._before_removal = before_removal
        self._bell: int | None = None
        self._pid = 0

    def empty(self) -> None:
        """Start to remove all files in the trash. Raises OSError."""
        try:
            self._ring()
        except BlockingIOError:
            return  # the pipe is full, so the process will wake anyway
        except BrokenPipeError:  # the process was killed
            self._stop()
            self._ring()

    def _ring(self) -> None:
        if self._bell is None:
            reader, self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._pid = confine.run_detached(lambda: self._serve(reader), keep=reader, niceness=10)
            finally:
                os.close(reader)
        os.write(self._bell, b"x")

    def _stop(self) -> None:
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None

    def close(self) -> None:
        """End the process, and remove the remaining files in our own process."""
        if self._bell is not None:
            self._stop()
            try:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            except OSError:
                pass
        self._remove_all()

    def _serve(self, reader: int) -> None:
        os.set_blocking(reader, True)
        while os.read(reader, 4096):
            try:
                self._before_removal()
            except OSError as error:
                complain("before emptying the trash: %s" % error)
            self._remove_all()

    def _remove_all(self) -> None:
        for name in os.listdir(self._path):
            path = os.path.join(self._path, name)
            try:
                if os.path.isdir(path) and not os.path.islink(path):
                    removal.remove_tree(path)
                else:
                    os.unlink(path)
            except OSError as error:  # the next removal tries again
                complain("%s was not removed: %s" % (path, error))


class WritableSearch:
    """Finds the world-writable directories once, in another process."""

    LIMIT_S = 10.0

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: list[Callable[[], object]] = []
        self._pid: int | None = None
        self.paths: list[str] = []
        """The world-writable directories. Until the search has ended, only the usual ones that exist."""

    def begin(self, skip: Collection[str]) -> None:
        """Begin the search. `skip` and all directories below are left out. Raises OSError."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._pid = confine.run_detached(lambda: _search(writer, skip), keep=writer)
        finally:
            os.close(writer)
        self.paths = [path for path in _USUAL if os.path.isdir(path) and path not in skip]
        data = bytearray()

        def read(_events: int) -> None:
            piece = os.read(reader, 1 << 16)
            data.extend(piece)
            if not piece:
                self._loop.remove(reader)
                os.close(reader)
                self._finish(bytes(data))

        self._loop.add(reader, select.POLLIN, read)

    def when_done(self, call: Callable[[], object]) -> None:
        """Call `call` when the search has ended; at once if it has ended already, or was never begun."""
        if self._pid is not None:
            self._waiting.append(call)
        else:
            call()

    def stop(self) -> None:
        """End the search early. Idempotent."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)

    def _finish(self, data: bytes) -> None:
        try:
            self.paths = json.loads(data.decode("ascii"))
        except ValueError:
            complain("the search for world-writable directories failed")
        self._pid = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()


def _search(writer: int, skip: Collection[str]) -> None:
    with os.fdopen(writer, "wb") as file:
        file.write(json.dumps(removal.find_world_writable(skip, WritableSearch.LIMIT_S)).encode("ascii"))


def complain(text: str) -> None:
    """Write a line to the guest's log."""
    sys.stderr.write("hermes guest: %s\n" % text)
    sys.stderr.flush()
