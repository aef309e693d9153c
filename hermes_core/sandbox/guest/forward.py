"""Forwards: a slot's loopback port, whose connections the guest carries over the driver's channel."""

from __future__ import annotations

import collections
import fcntl
import os
import select
import socket
import time

from . import peers
from .streams import Input, Stream

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Outlet
    from .loop import Loop

    Error = dict[str, str]

CONNECTED = b"\1"
"""The first byte of a carrier's stream, once it has a connection."""
_AGAIN_S = 0.1
"""How long no connection is accepted after that has failed: there are no descriptors, say."""


def _error(code: str, message: str) -> Error:
    return {"kind": "command", "code": code, "message": message}


class Carrier:
    """One connection, or the wait for one: what its program sends goes to the driver, and the driver's bytes to it.

    It ends by itself when both directions have. `on_end(carrier)` is called once; `error` is why it was reset.
    """

    cancel_grace = 0.0

    def __init__(self, loop: Loop, outlet: Outlet, identity: str, on_end: Callable[[Carrier], object]) -> None:
        self.ended = False
        self.error: Error | None = None
        self.stream = Stream(identity, outlet.send, outlet.congested)
        self.stdin = Input(loop, None, identity, outlet.send, on_end=self._written)
        self._loop = loop
        self._outlet = outlet
        self._on_end = on_end
        self._sock: socket.socket | None = None
        self._reading = self._writing = True
        self._paused = False

    def connect(self, sock: socket.socket) -> None:
        """Take a connection. Raises OSError: there are no descriptors for it."""
        writer = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)  # each direction is watched by its own
        self._sock = sock
        self.stream.feed(CONNECTED)
        self.stdin.connect(writer)
        self._loop.add(sock.fileno(), select.POLLIN, self._readable)

    def resume(self) -> None:
        """Resume paused reading, as there may be room again."""
        if self._paused and self._sock is not None and not self.ended:
            self._paused = False
            self._loop.add(self._sock.fileno(), select.POLLIN, self._readable)

    def stop(self, _grace: float) -> None:
        """Reset the connection, as the driver wants no more of it."""
        self.failed(_error("cancelled", "the connection was closed by the driver"))

    def failed(self, error: Error) -> None:
        """Reset the connection. Idempotent."""
        if not self.ended:
            self.error = error
            self._end()

    def _readable(self, _events: int) -> None:
        if self._sock is None or self.ended:
            return
        room = self.stream.room()
        if room <= 0:
            self._loop.remove(self._sock.fileno())
            self._paused = True
            self._outlet.pause(self.resume)
            return
        try:
            data = os.read(self._sock.fileno(), room)
        except BlockingIOError:
            return
        except OSError as error:
            self.failed(_error("reset", "the program broke the connection: %s" % error))
            return
        if data:
            self.stream.feed(data)
            return
        self._loop.remove(self._sock.fileno())
        self._reading = False
        self.stream.end()
        self._end_if_over()

    def _written(self, whole: bool) -> None:
        """Tell the program that nothing more comes, if it has got all; else it takes no more."""
        if self.ended or self._sock is None:
            return
        if not whole:
            self.failed(_error("reset", "the program takes no more"))
            return
        self._writing = False
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # it is gone, having got all
            pass
        self._end_if_over()

    def _end_if_over(self) -> None:
        if not (self._reading or self._writing or self.ended):
            self._end()

    def _end(self) -> None:
        self.ended = True
        self.stdin.close()
        if self._sock is not None:
            self._loop.remove(self._sock.fileno())
            if self._writing:
                peers.reset(self._sock)
            else:  # what the program has not received yet goes on its way
                self._sock.close()
        self._on_end(self)


class ForwardListener:
    """A listening socket that the slot's parent has made, until it is stopped or the slot is emptied.

    To the slot it is one of its executions. No connection is accepted before a carrier waits for it: the others wait in
    the kernel. `on_end(forward)` is called once; `error` is why.

    Args:
        guard: says which connections are served, one after the other.
    """

    cancel_grace = 0.0
    pty = stdin = pid = status = None

    def __init__(
        self,
        loop: Loop,
        outlet: Outlet,
        identity: str,
        guard: peers.Guard,
        on_end: Callable[[ForwardListener], object],
    ) -> None:
        self.id = identity
        self.ended = self.handed_over = False
        self.error: Error = {}
        self.began = time.monotonic()
        self.port = 0
        self.stream = Stream(identity, outlet.send, outlet.congested)
        """Says which port it is."""
        self._loop = loop
        self._outlet = outlet
        self._guard = guard
        self._on_end = on_end
        self._listener: socket.socket | None = None
        self._guarded: socket.socket | None = None
        """A connection that the guard has not judged yet."""
        self._waiting: collections.OrderedDict[Carrier, None] = collections.OrderedDict()
        self._connected: set[Carrier] = set()

    # --- what the slot, its link and the requests tell an execution ------------------------------------------------

    def spawned(self) -> None:
        """Do nothing: nothing was sent along."""

    def resume(self) -> None:
        """Do nothing: what the stream says is short."""

    def exited(self, _status: int) -> None:
        """Do nothing: there is no process."""

    def started(self, _pid: int | None, fds: list[int]) -> None:
        """Take the listening socket out of the list `fds`."""
        if self.ended:
            return
        try:
            self._listener = socket.socket(fileno=fds.pop(0))
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
        except (OSError, IndexError) as error:  # there was no descriptor for it
            self.failed({"kind": "infra", "code": "resources", "message": "no port could be taken over: %s" % error})
        else:
            self.stream.feed(b"%d" % self.port)

    def stop(self, _grace: float) -> None:
        """Close the port and reset its connections, as the driver wants no more of it."""
        self.failed(_error("cancelled", "the forward was closed by the driver"))

    def killed_with_slot(self, error: Error | None = None) -> None:
        """Close it likewise, as the slot was emptied, or lost because of `error`."""
        self.failed(error or _error("killed", "the slot's processes were killed, and its forwards closed"))

    def failed(self, error: Error) -> None:
        """Close it because of an error. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        if self._listener is not None:
            self._loop.remove(self._listener.fileno())
            self._listener.close()
        if self._guarded is not None:
            peers.reset(self._guarded)
        for carrier in [*self._waiting, *self._connected]:
            carrier.failed(error)
        self._on_end(self)

    # --- connections ------------------------------------------------------------------------------------------------

    def carry(self, identity: str, on_end: Callable[[Carrier], object]) -> Carrier:
        """Return a carrier that waits for the next connection."""

        def ended(carrier: Carrier) -> None:
            self._waiting.pop(carrier, None)
            self._connected.discard(carrier)
            self._watch()
            on_end(carrier)

        carrier = Carrier(self._loop, self._outlet, identity, ended)
        self._waiting[carrier] = None
        self._watch()
        return carrier

    def _watch(self) -> None:
        """Wait for connections for as long as carriers do."""
        if self._listener is None or self.ended:
            return
        if self._waiting and self._guarded is None:
            self._loop.add(self._listener.fileno(), select.POLLIN, self._accept)
        else:
            self._loop.remove(self._listener.fileno())

    def _accept(self, _events: int) -> None:
        if self._listener is None or self.ended or self._guarded is not None:
            return
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._rest()
            return
        sock.setblocking(False)
        self._guarded = sock
        self._watch()
        self._guard(sock, self._judged)

    def _judged(self, served: bool) -> None:
        if self._guarded is None or self.ended:
            return
        sock, self._guarded = self._guarded, None
        if not served or not self._waiting:
            peers.reset(sock)
            self._watch()
            return
        carrier = next(iter(self._waiting))
        try:
            carrier.connect(sock)
        except OSError:
            peers.reset(sock)
            self._rest()
            return
        del self._waiting[carrier]
        self._connected.add(carrier)
        self._watch()

    def _rest(self) -> None:
        if self._listener is not None:
            self._loop.remove(self._listener.fileno())
            self._loop.later(_AGAIN_S, self._watch)
