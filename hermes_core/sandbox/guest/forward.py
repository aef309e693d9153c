"""Forwards: a port of a slot's loopback whose connections the guest carries over the driver's channel."""

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
"""The first byte of a carrier's stream, sent when the carrier has a connection."""
_AGAIN_S = 0.1
"""The pause after a connection could not be accepted, for example because there are no descriptors left."""


def _error(code: str, message: str) -> Error:
    return {"kind": "command", "code": code, "message": message}


class Carrier:
    """Waits for one connection of a program, and carries bytes in both directions between this program and the driver.

    Ends when both directions have ended, or when the connection is reset because of `error`. Then `on_end(carrier)` is
    called.
    """

    cancel_grace = 0.0

    def __init__(self, loop: Loop, outlet: Outlet, identity: str, on_end: Callable[[Carrier], object]) -> None:
        self.ended = False
        self.error: Error | None = None
        self.stream = Stream(identity, outlet.send, outlet.is_congested)
        self.stdin = Input(loop, None, identity, outlet.send, on_end=self._on_input_end)
        self._loop = loop
        self._outlet = outlet
        self._on_end = on_end
        self._sock: socket.socket | None = None
        self._reading = self._writing = True
        self._paused = False

    def connect(self, sock: socket.socket) -> None:
        """Take a connection. Raises OSError if there are no descriptors left."""
        writer = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, 0)  # the loop takes one handler per descriptor
        self._sock = sock
        self.stream.feed(CONNECTED)
        self.stdin.connect(writer)
        self._loop.add(sock.fileno(), select.POLLIN, self._readable)

    def resume(self) -> None:
        """Read again, because there may be room."""
        if self._paused and self._sock is not None and not self.ended:
            self._paused = False
            self._loop.add(self._sock.fileno(), select.POLLIN, self._readable)

    def stop(self, _grace: float) -> None:
        """Reset the connection, because the driver cancelled the request."""
        self.fail(_error("cancelled", "the connection was closed by the driver"))

    def fail(self, error: Error) -> None:
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
            self.fail(_error("reset", "the program broke the connection: %s" % error))
            return
        if data:
            self.stream.feed(data)
            return
        self._loop.remove(self._sock.fileno())
        self._reading = False
        self.stream.end()
        self._end_if_over()

    def _on_input_end(self, whole: bool) -> None:
        """Shut down our direction if the program has received the `whole` input. Otherwise the program has stopped
        reading, so reset the connection."""
        if self.ended or self._sock is None:
            return
        if not whole:
            self.fail(_error("reset", "the program takes no more"))
            return
        self._writing = False
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # the program has closed it, after it received everything
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
            else:  # the kernel still delivers what was written
                self._sock.close()
        self._on_end(self)


class ForwardListener:
    """A listening socket, made by the slot's parent. It is open until it is stopped or the slot is emptied.

    The slot treats it like an execution. A connection is accepted only when a carrier waits for it; others wait in the
    kernel.

    Args:
        guard: decides which connections are served, one at a time.
        on_end: called once, with this object. Its `error` says why it ended.
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
        self.stream = Stream(identity, outlet.send, outlet.is_congested)
        """Carries the number of the port."""
        self._loop = loop
        self._outlet = outlet
        self._guard = guard
        self._on_end = on_end
        self._listener: socket.socket | None = None
        self._guarded: socket.socket | None = None
        """A connection about which the guard has not decided yet."""
        self._waiting: collections.OrderedDict[Carrier, None] = collections.OrderedDict()
        self._connected: set[Carrier] = set()

    # --- the methods of an execution that the slot, its link and the requests call ----------------------------------

    def close_sent_fds(self) -> None:
        """Do nothing: no descriptors were sent."""

    def resume(self) -> None:
        """Do nothing: the stream is too short to be paused."""

    def record_exit(self, _status: int) -> None:
        """Do nothing: there is no process."""

    def record_start(self, _pid: int | None, fds: list[int]) -> None:
        """Take the listening socket out of the list `fds`."""
        if self.ended:
            return
        try:
            self._listener = socket.socket(fileno=fds.pop(0))
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
        except (OSError, IndexError) as error:  # there were no descriptors left
            self.fail({"kind": "infra", "code": "resources", "message": "no port could be taken over: %s" % error})
        else:
            self.stream.feed(b"%d" % self.port)

    def stop(self, _grace: float) -> None:
        """Close the port and reset its connections, because the driver cancelled the forward."""
        self.fail(_error("cancelled", "the forward was closed by the driver"))

    def end_with_slot(self, error: Error | None = None) -> None:
        """Close the port and reset its connections, because the slot was emptied, or was lost with `error`."""
        self.fail(error or _error("killed", "the slot's processes were killed, and its forwards closed"))

    def fail(self, error: Error) -> None:
        """Close the port and reset its connections because of an error. Idempotent."""
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
            carrier.fail(error)
        self._on_end(self)

    # --- connections ------------------------------------------------------------------------------------------------

    def carry(self, identity: str, on_end: Callable[[Carrier], object]) -> Carrier:
        """Return a carrier that waits for the next connection."""

        def finish(carrier: Carrier) -> None:
            self._waiting.pop(carrier, None)
            self._connected.discard(carrier)
            self._watch()
            on_end(carrier)

        carrier = Carrier(self._loop, self._outlet, identity, finish)
        self._waiting[carrier] = None
        self._watch()
        return carrier

    def _watch(self) -> None:
        """Accept connections while carriers wait for them and the guard is idle."""
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
        self._guard(sock, self._on_verdict)

    def _on_verdict(self, served: bool) -> None:
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
