"""What the guest does beside serving: the heartbeat for the watchdog; searching and removing, at leisure."""

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
"""Where the world-writable directories of a system usually are."""

END = "end"
"""What the heartbeat file holds when the sandbox is to end."""


class Heartbeat:
    """The file that the sandbox's watchdog reads: its first line changes for as long as a driver is heard.

    Behind the changing number stands the sandbox's time to live in seconds, for `hermes-rl reap`. It is written in
    place, in one piece of the same length: a disk that a slot has filled must not stop the heart.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._beats = 0

    def beat(self, ttl_s: float) -> None:
        """Record that a driver was heard. Raises OSError."""
        self._beats += 1
        os.pwrite(self._fd, b"%020d %020d\n" % (self._beats, ttl_s), 0)

    def end(self) -> None:
        """Let the watchdog end the sandbox now. Raises OSError."""
        os.pwrite(self._fd, END.encode("ascii") + b"\n", 0)


class Trash:
    """Removes what slots have discarded, in a process of its own that lives as long as the guest.

    Args:
        path: the directory of what is discarded.
        first: called before each removal, there.
    """

    def __init__(self, path: str, first: Callable[[], object]) -> None:
        self._path = path
        self._first = first
        self._bell: int | None = None
        self._pid = 0

    def empty(self) -> None:
        """Start to remove what the trash holds. Raises OSError."""
        try:
            self._ring()
        except BlockingIOError:
            return  # rung often enough
        except BrokenPipeError:  # something has killed it
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
        """End the process and remove all that is left, here and now."""
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
                self._first()
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
            except OSError as error:  # tried again with what is discarded next
                complain("%s was not removed: %s" % (path, error))


class WritableSearch:
    """Finds the world-writable directories once, in a process of its own; whoever needs them waits for it."""

    LIMIT_S = 10.0

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: list[Callable[[], object]] = []
        self._pid: int | None = None
        self.found: list[str] = []
        """Those that are known."""

    def begin(self, skip: Collection[str]) -> None:
        """Begin the search, `skip` and what is below left out. Raises OSError."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._pid = confine.run_detached(lambda: _search(writer, skip), keep=writer)
        finally:
            os.close(writer)
        self.found = [path for path in _USUAL if os.path.isdir(path) and path not in skip]
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
        """Call once the result is there: at once if it is."""
        if self._pid is not None:
            self._waiting.append(call)
        else:
            call()

    def stop(self) -> None:
        """Do without what is still to be found. Idempotent."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)

    def _finish(self, data: bytes) -> None:
        try:
            self.found = json.loads(data.decode("ascii"))
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
