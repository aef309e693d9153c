"""The guest's core: the driver's session, the slots, and the dead-man switch."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import sys
import time

from . import masking, namespaces, processes, trees, wire, workspace
from .connection import Connection
from .housekeeping import Heartbeat, Search, Trash, complain
from .probe import what_works
from .request import Refusal
from .requests import Requests
from .slot import Slot
from .workspace import PREPARE

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .execution import Execution
    from .loop import Loop
    from .request import Error, Header

_PEER = struct.Struct("3i")
_SHARED, _USER, _NAMESPACE, _DEDICATED = range(4)
_LEVELS = {"shared": _SHARED, "user": _USER, "namespace": _NAMESPACE}
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh")
_FIRST_WORD_S = 60.0
"""How long the guest waits for its first driver."""
_PATIENCE = 0.9
"""The part of the sandbox's time to live that the guest waits: the rest is for killing and removing everything."""
_ENDING_S = 2.0
_HELD = {"kind": "policy", "code": "driver", "message": "another driver holds this lease"}


class Daemon:
    """Serves one driver at a time over a unix socket, for as long as the sandbox lives."""

    def __init__(self, loop: Loop, listener: socket.socket, state_dir: str) -> None:
        self.loop = loop
        self.state_dir = state_dir
        self.scratch = os.path.join(state_dir, "scratch")
        self.shell = next((path for path in _SHELLS if os.access(path, os.X_OK)), "sh")
        self.soft_files = _raise_file_limit()
        self.instance = os.urandom(8).hex()
        self.config: dict[str, Any] = {}
        self.masked: tuple[bytes, ...] = ()
        """What commands' output must not show."""
        self.base = ""
        self.mechanism = "shared"
        self.single_user = False
        self.takes_pipes = False
        """Whether slots' parents make the pipes of commands: slots of our own user can keep us from sending any."""
        self.slots: dict[int, Slot] = {}
        self._requests = Requests(self)
        self._search = Search(loop)
        self._trash: Trash | None = None
        self._heartbeat = Heartbeat(os.path.join(state_dir, "heartbeat"))
        self._listener = listener
        self._driver = ""
        self._session = ""
        self._connection: Connection | None = None
        self._claim: tuple[Connection, Header] | None = None
        """Another driver, which waits for the end of this one."""
        self._paused: list[Execution] = []
        self._heard = self._beaten = time.monotonic()
        loop.add(listener.fileno(), select.POLLIN, self._accept)
        loop.later(1.0, self._check_driver)

    # --- the channel ------------------------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it is gone already, or there is no descriptor for it now
            return
        _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.geteuid():
            sock.close()
            return
        # Only a hello with the lease makes this connection the driver's; until then the old one stays.
        Connection(self.loop, sock, self._frame, self._ended, self._resume_paused)

    def _frame(self, connection: Connection, header: Header, body: bytes) -> None:
        try:
            if header.get("op") == "hello":
                error = self._hello(connection, header)
                if error is not None:
                    connection.send({"ev": "refused", "error": error})
            elif connection is self._connection:
                self._heard = time.monotonic()
                self._refuse_claim()
                self._serve(header, body)
        except (KeyError, TypeError, ValueError) as error:  # of no request that could be answered
            complain("a frame that is not understood: %s: %s" % (type(error).__name__, error))
            connection.close()

    def _serve(self, header: Header, body: bytes) -> None:
        op = header.get("op")
        if op == "ping":
            self.send({"ev": "pong"})
        elif op == "end":
            self.end()
        else:
            self._requests.handle(header, body)

    def _ended(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
        if self._claim is not None and connection is self._claim[0]:
            self._claim = None

    def _hello(self, connection: Connection, header: Header) -> Error | None:
        """Take this connection as the driver's, or give the error that refuses it."""
        driver, session, config = str(header["driver"]), str(header["session"]), header["config"]
        if self._trash is None:
            try:
                self._configure(config)
            except Refusal as refusal:
                return refusal.error
            except OSError as error:
                message = "the workspaces can't be made: %s" % error
                return {"kind": "infra", "code": "workspace", "message": message}
        elif config["lease_id"] != self.config["lease_id"]:
            return {"kind": "policy", "code": "lease", "message": "this sandbox is leased to another driver"}
        elif driver != self._driver and header.get("take_over") not in ("silent", self.instance):
            return _HELD
        elif driver != self._driver and header["take_over"] == "silent" and self._silence_left() > 0:
            self._refuse_claim()
            self._claim = (connection, header)
            self.loop.later(self._silence_left(), self._grant_claim)
            return None
        self._refuse_claim()
        if self._connection is not None and self._connection is not connection:
            self._connection.close()
        if session == self._session:
            self._requests.hold_streams()
        else:
            self._requests.forget()
        self._driver, self._session, self._connection = driver, session, connection
        self._heard = time.monotonic()
        self._beat()
        self.send(self._greeting())
        return None

    def _silence_left(self) -> float:
        """Seconds until it can be said that the driver lives no more."""
        return self._heard + wire.silence_s(self.config["orphan_ttl_s"]) - time.monotonic()

    def _grant_claim(self) -> None:
        """The one that waits takes the driver's place, if nothing was heard of that until now."""
        if self._claim is None:
            return
        left = self._silence_left()
        if left > 0:
            self.loop.later(left, self._grant_claim)
            return
        (connection, header), self._claim = self._claim, None
        self._frame(connection, header, b"")

    def _refuse_claim(self) -> None:
        """The driver lives."""
        if self._claim is not None:
            (connection, _), self._claim = self._claim, None
            connection.send({"ev": "refused", "error": _HELD})

    def _greeting(self) -> Header:
        dedicated = self.config["slots"] == 1 and self.config["isolation"] == _DEDICATED
        return {
            "ev": "hello",
            "granted": _DEDICATED if dedicated else _LEVELS[self.mechanism],
            "mechanism": self.mechanism,
            "python": "%d.%d.%d" % sys.version_info[:3],
            "processors": len(os.sched_getaffinity(0)),
            "shell": self.shell,
            "pid": os.getpid(),
            "instance": self.instance,
            "boot": _boot_id(),
            "began": processes.start_of(os.getpid()),
            "known": self._requests.known(),
        }

    def send(self, header: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame to the driver; without one it is dropped, as a resumed driver asks again."""
        if self._connection is not None:
            self._connection.send(header, data)

    def congested(self) -> bool:
        """Whether streams have to wait: no driver, or enough under way already."""
        return self._connection is None or self._connection.congested()

    def paused(self, execution: Execution) -> None:
        """A stream waits for room."""
        if execution not in self._paused:
            self._paused.append(execution)

    def _resume_paused(self) -> None:
        waiting, self._paused = self._paused, []
        for execution in waiting:
            execution.resume()

    # --- configuration ----------------------------------------------------------------------------------------------

    def _configure(self, config: dict[str, Any]) -> None:
        self.mechanism, self.single_user = _choose(config)
        self.takes_pipes = self.single_user and namespaces.has_capability(namespaces.SYS_PTRACE)
        self.config = config
        self.masked = masking.values_of(config.get("secrets", ()), os.environb)
        self.base = config["workspace_base"]
        if config.get("restored"):
            workspace.adopt(self.base, self.uid_of(PREPARE))
        workspace.prepare_base(self.base)
        os.makedirs(self.scratch, exist_ok=True)
        if self.mechanism == "user":
            self._search.begin({"/proc", "/sys", "/dev/pts", self.base})
        self.slots[PREPARE] = Slot(self, PREPARE)
        self.slots[PREPARE].workspace.make()
        self._trash = Trash(workspace.trash(self.base), lambda: workspace.stock(self.base))

    def uid_of(self, index: int) -> int | None:
        """The user of a slot; None where slots have none of their own."""
        first = self.config["uid_base"]
        if self.mechanism == "shared" or self.single_user or first is None:
            return None
        # The second of the block is never anyone's: what signals a slot's user has it as its real one.
        return int(first) + (0 if index == PREPARE else 2 + index)

    @property
    def world_writable(self) -> list[str]:
        """Where slots' users can leave files besides their own directories; nowhere where they have their own root."""
        return self._search.found

    def when_searched(self, call: Callable[[], object]) -> None:
        """Call once `world_writable` is known: at once if it is."""
        self._search.when_done(call)

    def kill_user(self, uid: int) -> None:
        """Kill every process of a slot's user, in this process: with a full process table a fork would fail.

        The real uid is a reserved one, the effective one the slot's: so the kernel's permission check lets the signal
        reach the slot's processes and nothing else. One call suffices, and "until nobody is left" would never end
        while other users' processes exist.
        """
        os.setresuid(self.config["uid_base"] + 1, uid, 0)
        try:
            os.kill(-1, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        finally:
            os.setresuid(0, 0, 0)

    def empty_trash(self) -> None:
        """Slots have discarded directories."""
        try:
            if self._trash is not None:
                self._trash.empty()
        except OSError as error:  # no process to be had now; the next one does it
            complain("the trash was not emptied: %s" % error)

    # --- the dead-man switch ----------------------------------------------------------------------------------------

    def _check_driver(self) -> None:
        ttl = self.config["orphan_ttl_s"] if self.config else _FIRST_WORD_S
        left = self._heard + ttl * _PATIENCE - time.monotonic()
        if left <= 0:
            self.end()
            return
        if self._heard > self._beaten:
            self._beat()
        self.loop.later(min(1.0, ttl / 5, left), self._check_driver)

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        try:
            self._heartbeat.beat(self.config["orphan_ttl_s"])
        except OSError as error:
            complain("no heartbeat: %s" % error)

    def end(self) -> None:
        """Kill everything, leave no file behind, tell the watchdog, and stop."""
        self.loop.stop()
        self._search.stop()
        deadline = time.monotonic() + _ENDING_S
        while True:
            for slot in self.slots.values():
                slot.close()
            self.loop.reap()
            if all(slot.dead for slot in self.slots.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for remove in [slot.workspace.remove for slot in self.slots.values()] + [self._remove_rest]:
            _insist(remove)
        self._heartbeat.end()

    def _remove_rest(self) -> None:
        uids = [slot.uid for slot in self.slots.values() if slot.uid is not None]
        trees.sweep(self.world_writable, uids)
        if self._trash is not None:
            self._trash.close()
            workspace.remove_base(self.base)


def _boot_id() -> str:
    """The kernel's name for the time since its last start; empty where it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _choose(config: Mapping[str, Any]) -> tuple[str, bool]:
    """How slots are kept apart, and whether by user namespaces in which they are all ourselves. Raises Refusal."""
    wanted, slots, first = config["isolation"], config["slots"], config["uid_base"]
    users = os.geteuid() == 0 and first is not None and _has_users(first, slots + 2)
    if wanted == _SHARED:
        return "shared", False
    if wanted == _USER and users:
        return "user", False
    probe = what_works()
    # A user namespace of one user makes the slot ourselves: never where we are the system's own root.
    ordinary = os.geteuid() != 0 or not _has_users(0, 1 << 31)
    if users and probe["namespaces"]:
        return "namespace", False
    if ordinary and (probe["namespaces"] or probe["user_namespaces"]):
        return "namespace", True
    if wanted == _DEDICATED and slots == 1:
        return ("user" if users else "shared"), False
    reason = probe["reason"] or "its backend has reserved no user ids for the slots"
    raise Refusal("policy", "isolation", "the sandbox can't keep its slots apart: %s" % reason)


def _has_users(first: int, count: int) -> bool:
    """Whether our user namespace has these user ids."""
    with open("/proc/self/uid_map") as file:
        for line in file:
            inside, _, length = map(int, line.split())
            if inside <= first and first + count <= inside + length:
                return True
    return False


def _insist(remove: Callable[[], object]) -> None:
    """Remove, and again: what has just been killed may still finish what it was doing."""
    for attempt in (1, 2, 3):
        try:
            remove()
            return
        except OSError as error:
            if attempt == 3:
                complain("not all was removed: %s" % error)
            else:
                time.sleep(0.05)


def _raise_file_limit() -> int:
    """Allow ourselves as many descriptors as may be: every command takes some. The limit for commands, as it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass
    return soft
