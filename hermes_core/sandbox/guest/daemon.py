"""The guest's main object: keeps the session with the driver and the slots, and ends the sandbox without a driver."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import sys
import time

from ..linux import processes
from ..linux.probe import boot_id
from . import confine, wire
from .background import BackgroundProcesses
from .connection import DriverConnection
from .housekeeping import Heartbeat, complain
from .loop import Loop
from .operations import Operations
from .parent import close_all_but
from .request import RequestTable
from .site import DEDICATED, NAMESPACE, PRIVATE_ROOT, SHARED, USER, Site
from .slot import GuestSlot
from .wire import Refusal
from .workspace import PREPARE

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .request import Error, Header

_PEER = struct.Struct("3i")
_LEVELS = {"shared": SHARED, "user": USER, "namespace": NAMESPACE, "root": PRIVATE_ROOT}
_FIRST_DRIVER_S = 60.0
"""How long the guest waits for its first driver."""
_PATIENCE = 0.9
"""The part of the time to live that the guest waits for the driver. In the rest, it kills and removes everything."""
_ENDING_S = 2.0
_HELD_ERROR = {"kind": "policy", "code": "driver", "message": "another driver holds this lease"}


class GuestDaemon:
    """Serves one driver at a time over a unix socket, for as long as the sandbox lives."""

    def __init__(self, loop: Loop, listener: socket.socket, state_dir: str) -> None:
        self.loop = loop
        self.site = Site(loop, state_dir)
        self._outlet = self.site.outlet
        self.slots: dict[int, GuestSlot] = {}
        self._requests = RequestTable(self._outlet, loop)
        operations = Operations(self.site, self.slots, self._requests)
        self._requests.operations = {**operations.by_name(), **BackgroundProcesses(operations).by_name()}
        self._heartbeat = Heartbeat(os.path.join(state_dir, "heartbeat"))
        self._listener = listener
        self._driver = ""
        self._session = ""
        self._claim: tuple[DriverConnection, Header] | None = None
        """The connection and hello of another driver, which waits until this one has been silent for long enough."""
        self._last_frame_at = self._last_beat_at = time.monotonic()
        loop.add(listener.fileno(), select.POLLIN, self._accept)
        loop.later(1.0, self._check_driver)

    # --- the channel ------------------------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the peer is gone already, or there are no descriptors left
            return
        _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            sock.close()
            return
        # Until a hello with the right lease arrives, the driver's old connection stays.
        DriverConnection(self.loop, sock, self._frame, self._forget_connection, self._outlet.resume_paused)

    def _frame(self, connection: DriverConnection, header: Header, body: bytes) -> None:
        try:
            if header.get("op") == "hello":
                error = self._hello(connection, header)
                if error is not None:
                    connection.send({"ev": "refused", "error": error})
            elif connection is self._outlet.connection:
                self._last_frame_at = time.monotonic()
                self._refuse_claim()
                self._serve(header, body)
        except (KeyError, TypeError, ValueError) as error:  # no request, so there is nothing to answer
            complain("a frame that is not understood: %s: %s" % (type(error).__name__, error))
            connection.close()

    def _serve(self, header: Header, body: bytes) -> None:
        op = header.get("op")
        if op == "ping":
            self._outlet.send({"ev": "pong"})
        elif op == "end":
            self.end()
        else:
            self._requests.handle(header, body)

    def _forget_connection(self, connection: DriverConnection) -> None:
        if connection is self._outlet.connection:
            self._outlet.connection = None
        if self._claim is not None and connection is self._claim[0]:
            self._claim = None

    def _hello(self, connection: DriverConnection, header: Header) -> Error | None:
        """Accept this connection as the driver's, or let it wait. Return the error if it is refused."""
        driver, session, config = str(header["driver"]), str(header["session"]), header["config"]
        if not self.site.is_configured:
            try:
                self._configure(config)
            except Refusal as refusal:
                return refusal.error
            except OSError as error:
                message = "the workspaces can't be made: %s" % error
                return {"kind": "infra", "code": "workspace", "message": message}
        elif config["creation_id"] != self.site.config["creation_id"]:
            return {"kind": "policy", "code": "lease", "message": "this sandbox is leased to another driver"}
        elif driver != self._driver and header.get("take_over") not in ("silent", self.site.instance):
            return _HELD_ERROR
        elif driver != self._driver and header["take_over"] == "silent" and self._silence_left() > 0:
            self._refuse_claim()
            self._claim = (connection, header)
            self.loop.later(self._silence_left(), self._grant_claim)
            return None
        self._refuse_claim()
        if self._outlet.connection is not None and self._outlet.connection is not connection:
            self._outlet.connection.close()
        if session == self._session:
            self._requests.hold_streams()
        else:
            self._requests.forget()
        self._driver, self._session, self._outlet.connection = driver, session, connection
        self._last_frame_at = time.monotonic()
        self._beat()
        self._outlet.send(self._greeting())
        return None

    def _silence_left(self) -> float:
        """Return the seconds until the driver counts as dead."""
        return self._last_frame_at + wire.silence_s(self.site.config["orphan_ttl_s"]) - time.monotonic()

    def _grant_claim(self) -> None:
        """Let the driver that waits replace the current driver, if the current one has stayed silent."""
        if self._claim is None:
            return
        silence_s = self._silence_left()
        if silence_s > 0:
            self.loop.later(silence_s, self._grant_claim)
            return
        (connection, header), self._claim = self._claim, None
        self._frame(connection, header, b"")

    def _refuse_claim(self) -> None:
        """Refuse the driver that waits, because the current one is alive."""
        if self._claim is not None:
            (connection, _), self._claim = self._claim, None
            connection.send({"ev": "refused", "error": _HELD_ERROR})

    def _greeting(self) -> Header:
        return {
            "ev": "hello",
            "granted": DEDICATED if self.site.is_dedicated else _LEVELS[self.site.mechanism],
            "mechanism": self.site.mechanism,
            "python": "%d.%d.%d" % sys.version_info[:3],
            "processors": len(os.sched_getaffinity(0)),
            "shell": self.site.shell,
            "pid": os.getpid(),
            "instance": self.site.instance,
            "boot": boot_id(),
            "began": processes.start_of(os.getpid()),
            "known": self._requests.ids(),
        }

    def _configure(self, config: dict[str, Any]) -> None:
        self.site.configure(config)
        self.slots[PREPARE] = GuestSlot(self.site, PREPARE)
        self.slots[PREPARE].workspace.make()
        self.site.open_trash()

    # --- the end without a driver -----------------------------------------------------------------------------------

    def _check_driver(self) -> None:
        ttl = self.site.config["orphan_ttl_s"] if self.site.config else _FIRST_DRIVER_S
        patience_s = self._last_frame_at + ttl * _PATIENCE - time.monotonic()
        if patience_s <= 0:
            self.end()
            return
        if self._last_frame_at > self._last_beat_at:
            self._beat()
        self.loop.later(min(1.0, ttl / 5, patience_s), self._check_driver)

    def _beat(self) -> None:
        self._last_beat_at = time.monotonic()
        try:
            self._heartbeat.beat(self.site.config["orphan_ttl_s"])
        except OSError as error:
            complain("no heartbeat: %s" % error)

    def end(self) -> None:
        """Kill all processes of the slots, remove all files, make the watchdog end the sandbox, and stop the loop."""
        self.loop.stop()
        self.site.stop()
        deadline = time.monotonic() + _ENDING_S
        while True:
            for slot in self.slots.values():
                slot.close()
            self.loop.reap()  # the loop itself no longer runs
            if all(slot.dead for slot in self.slots.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for remove in [slot.workspace.remove for slot in self.slots.values()] + [self._remove_rest]:
            _insist(remove)
        self._heartbeat.end()

    def _remove_rest(self) -> None:
        self.site.remove_rest([slot.uid for slot in self.slots.values() if slot.uid is not None])


def _insist(remove: Callable[[], object]) -> None:
    """Call `remove` up to three times: processes that were just killed may still finish a system call."""
    for attempt in (1, 2, 3):
        try:
            remove()
            return
        except OSError as error:
            if attempt == 3:
                complain("not all was removed: %s" % error)
            else:
                time.sleep(0.05)


def serve(listener: socket.socket, state_dir: str) -> NoReturn:
    """Run the guest until the sandbox shall end."""
    log = os.open(os.path.join(state_dir, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    close_all_but({0, 1, 2, listener.fileno()})
    listener.setblocking(False)
    os.chdir("/")
    os.umask(0o022)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    confine.become_subreaper()
    loop = Loop()
    GuestDaemon(loop, listener, state_dir)
    gc.freeze()  # these objects live for ever: collections skip them, and forked parents don't copy their pages
    gc.enable()
    loop.run()
    os._exit(0)
