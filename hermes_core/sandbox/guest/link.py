"""The guest's end of the connection to a slot's parent: forks the parent, talks to it, and sees it die."""

from __future__ import annotations

import collections
import errno
import os
import select
import signal
import socket
import time

from ..linux import descriptors
from . import parent
from .confine import parent_main

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .confine import Plan
    from .execution import Execution
    from .forward import ForwardListener
    from .loop import Loop


class Spawn:
    """One command on its way to a slot's parent: its message in parts, and the descriptors sent with the last part."""

    def __init__(self, execution: Execution | ForwardListener, parts: list[bytes], fds: list[int]) -> None:
        self.execution = execution
        self.parts = parts
        self.fds = fds
        self.sent = 0


def out_of_resources(error: OSError) -> dict[str, str]:
    """Return the error for a command that the guest could not start. It is never the slot's fault."""
    return {"kind": "infra", "code": "resources", "message": "the guest could not start it: %s" % error}


class Link:
    """A slot's parent from its fork to its death.

    With namespaces, the forked process makes them and exits. The parent is then a child of the forked process, and the
    init of the pid namespace: when the parent dies, the kernel kills all processes of the slot.

    Args:
        on_message: called with each message and the list of its descriptors. It removes the descriptors that it keeps
            from the list; the others are closed.
        on_death: called once after the last message, unless `drop` was called.

    Raises:
        OSError: the fork failed.
    """

    def __init__(
        self,
        loop: Loop,
        plan: Plan,
        on_message: Callable[[dict[str, Any], list[int]], object],
        on_death: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_death = on_death
        self._outbox: collections.deque[Spawn | bytes] = collections.deque()
        self._killed = self._dropped = self._blocked = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        since = time.monotonic()
        parent.flush_streams()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            parent_main(theirs, plan)
        theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self._since = since
        self._init: int | None = None
        self.pid: int | None = pid
        loop.add(ours.fileno(), select.POLLIN, self._on_socket)
        loop.watch(pid, self._on_maker_end if plan.has_namespaces else self._on_end, since)

    def kill(self) -> None:
        """Send SIGKILL to the parent. `on_death` is called when it is reaped."""
        self._killed = True
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    def wake(self) -> None:
        """Continue the parent, in case the slot's processes have stopped it."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGCONT)

    def drop(self) -> list[Spawn]:
        """Give up the parent, dead or alive. No callback is called any more. Return the commands that were not sent."""
        self._dropped = True
        self._loop.remove(self._sock.fileno())
        self._sock.close()
        unsent = [entry for entry in self._outbox if isinstance(entry, Spawn)]
        for entry in unsent:
            entry.sent = 0
        self._outbox.clear()
        return unsent

    # --- to the parent ----------------------------------------------------------------------------------------------

    def send(self, entry: Spawn | bytes) -> None:
        """Queue a command, or a message without descriptors."""
        self._outbox.append(entry)
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            entry = self._outbox[0]
            try:
                if isinstance(entry, bytes):
                    descriptors.send(self._sock, entry)
                else:
                    self._send_parts(entry)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionError):  # the parent is dead; `drop` returns what was not sent
                return
            except OSError as error:
                if isinstance(entry, Spawn):
                    entry.execution.fail(out_of_resources(error))
            self._outbox.popleft()
            if isinstance(entry, Spawn):
                entry.execution.close_sent_fds()
        if self._blocked != bool(self._outbox):
            self._blocked = not self._blocked
            self._loop.change(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._blocked else 0))

    def _send_parts(self, spawn: Spawn) -> None:
        """Send the remaining parts of a command, unless it has ended. The parent drops an incomplete message."""
        if spawn.execution.ended:
            return
        while spawn.sent < len(spawn.parts):
            last = spawn.sent == len(spawn.parts) - 1
            descriptors.send(self._sock, spawn.parts[spawn.sent], spawn.fds if last else ())
            spawn.sent += 1
        spawn.execution.handed_over = True

    def take(self, pipes: list[tuple[int, bool]]) -> list[int]:
        """Open pipes that the parent holds, given as (descriptor, writable). Raises OSError."""
        taken: list[int] = []
        try:
            for number, writable in pipes:
                flags = (os.O_WRONLY if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC
                taken.append(os.open("/proc/%d/fd/%d" % (self.pid or 0, number), flags))
        except OSError as error:
            for fd in taken:
                os.close(fd)
            if self.pid is None or error.errno == errno.ENOENT:
                raise ProcessLookupError from error
            raise
        return taken

    # --- from the parent --------------------------------------------------------------------------------------------

    def _on_socket(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
        if events & ~select.POLLOUT:
            self._read()

    def _read(self) -> None:
        while not self._dropped:
            try:
                message, fds = parent.receive_message(self._sock)
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, ValueError):
                message, fds = None, []
            try:
                if message is None:  # the parent is dying, or sent nonsense, and then it shall die
                    self._loop.remove(self._sock.fileno())
                    self.kill()
                    return
                if "init" in message:
                    self._meet_init(message["init"])
                else:
                    self._on_message(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _meet_init(self, pid: int) -> None:
        self._init = pid
        self.pid = None if self._loop.was_reaped(pid, self._since) else pid
        self._loop.watch(pid, self._on_end, self._since)
        if self._killed:
            self.kill()

    def _on_maker_end(self, _status: int) -> None:
        if self._init is None:
            self.pid = None  # it was reaped, so another process may get its pid
        self._read()
        if self._init is None:
            self._on_end(_status)

    def _on_end(self, _status: int) -> None:
        self.pid = None
        self._read()  # messages that it sent before its death
        if not self._dropped:
            self._on_death()
