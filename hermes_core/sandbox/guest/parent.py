"""The slot's parent: a process that was forked from the guest, has the slot's user and namespaces, and starts commands.

It talks to the guest over a SEQPACKET socket: requests come with descriptors, starts and exits go back. Commands are
started by `posix_spawn`, in 1.7 ms; forking Python would take 3.7 ms. Only built-in file operations are forked.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time

from ..linux import descriptors, processes
from . import files, terminal

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_PART = 48 << 10
"""A longer message is sent in parts, because the size of a datagram is limited."""
_FIRST, _NEXT, _LAST = b"\0", b"\1", b"\2"
"""The first byte of a part. A datagram that begins otherwise is a whole message, and discards an unfinished one."""
_STREAMS = (0, 1, 2)
SCRIPT_FD = 9
"""The descriptor from which a command reads a script that is too long for an argument."""

_SHOWN = 1000
"""Maximum number of characters of a name in an error message."""
_MESSAGE = 96 << 10
_OWN_FDS = 100
"""Our own descriptors have at least this number, so that they don't collide with those of commands."""
_PORT_CODES = {errno.EADDRINUSE: "in_use", errno.EACCES: "permission"}
_BACKLOG = 128
"""Maximum number of connections to a forward that wait in the kernel."""
_LOOK_AGAIN_S = 0.02
"""The time between two looks at a command that is being ended."""
_KILLING_S, _LOOKS = 1.0, 3
"""Kill a command's processes until so many looks in a row find none, for at most a second."""
_NEVER = 1 << 62
"""A start time in clock ticks that no process has."""


class _NoDirectory(OSError):
    """A command's working directory can't be entered."""


def receive_message(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one message and its descriptors (close-on-exec). (None, []): the other side is gone."""
    data, fds = descriptors.receive(sock, _MESSAGE)
    return (json.loads(data.decode("ascii")) if data else None), fds


def encode_message(message: dict[str, Any]) -> bytes:
    """Encode a message between the guest and a slot's parent."""
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def in_parts(message: bytes) -> list[bytes]:
    """Split a message to a slot's parent into datagrams."""
    parts = [message[start : start + _PART] for start in range(0, len(message), _PART)]
    if len(parts) == 1:
        return parts
    return [_FIRST + parts[0], *(_NEXT + part for part in parts[1:-1]), _LAST + parts[-1]]


class _Command:
    """One command: its id, its mark, and, when it shall end, the monotonic time at which it is killed."""

    __slots__ = ("deadline", "identity", "left", "mark", "start", "status")

    def __init__(self, identity: str, mark: str | None) -> None:
        self.identity = identity
        self.mark = mark
        self.deadline: float | None = None
        self.start = 0
        self.status: int | None = None
        self.left: set[int] | None = None
        """For an ended command: the pids that it left running and that were signalled."""


class Parent:
    """Starts, ends and reaps the commands of one slot, until the guest closes its end of the socket.

    Args:
        owns_all: whether our `kill(-1)` reaches only processes of the slot, because it has a user or a pid namespace.
    """

    def __init__(self, sock: socket.socket, owns_all: bool) -> None:
        self._sock = _move_up(sock)
        self._owns_all = owns_all
        self._running: dict[int, _Command] = {}
        self._ghosts = 0
        self._parts: list[bytes] = []
        self._untaken: dict[str, list[int]] = {}
        """Our ends of commands' pipes, by the id of the command, until the guest has opened them."""
        self._folder = os.getcwd()
        # Occupy the number of the script's descriptor, so that no descriptor that we receive gets it.
        os.dup2(0, SCRIPT_FD, inheritable=False)
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake = fcntl.fcntl(wake_read, fcntl.F_DUPFD_CLOEXEC, _OWN_FDS)
        signal.set_wakeup_fd(fcntl.fcntl(wake_write, fcntl.F_DUPFD_CLOEXEC, _OWN_FDS), warn_on_full_buffer=False)
        os.close(wake_read)
        os.close(wake_write)
        for number in processes.ALL_SIGNALS:
            # A program that sends TERM to every process it can reach must not end the slot's parent.
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def ready(self) -> None:
        """Report that commands can be started."""
        self._tell({"ready": True})

    def serve(self) -> NoReturn:
        """Serve the guest's requests until the process exits."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._timeout_ms()):
                if fd == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                else:
                    self._handle()
            for pid in [pid for pid, command in self._running.items() if command.deadline is not None]:
                self._advance(pid)

    def _timeout_ms(self) -> int | None:
        ending = any(command.deadline is not None for command in self._running.values())
        return int(_LOOK_AGAIN_S * 1000) if ending else None

    def _handle(self) -> None:
        data, fds = descriptors.receive(self._sock, _MESSAGE)
        try:
            if not data:
                self._leave()
            text = self._join(data)
            if not text:
                return
            message = json.loads(text.decode("ascii"))
            if "taken" in message:
                self._close_pipes(message["taken"])
            elif "end" in message:
                self._end(message["end"], message["grace"], message.get("mark"))
            elif "listen" in message:
                self._listen(message["id"], message["listen"])
            elif "socket" in message:
                self._tell({"socket": message["socket"], "held": processes.has_open_socket(message["socket"])})
            else:
                self._start(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _join(self, data: bytes) -> bytes:
        """Return the message that this datagram completes; empty if more parts are to come."""
        kind, part = data[:1], data[1:]
        if kind not in (_NEXT, _LAST):
            self._parts = []
        if kind not in (_FIRST, _NEXT, _LAST):
            return data
        self._parts.append(part)
        return b"".join(self._parts) if kind == _LAST else b""

    def _leave(self) -> NoReturn:
        """Exit because the guest is gone. No process of the slot may outlive the guest."""
        self._kill_everything()
        os._exit(0)

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> bool:
        """Send a message. Return False if the kernel lets this user send no more descriptors."""
        try:
            descriptors.send(self._sock, encode_message(message), fds or ())
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            self._leave()
        return True

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start(self, message: dict[str, Any], fds: list[int]) -> None:
        ends: list[int] = []
        pipes: list[tuple[int, bool]] = []
        try:
            if "pipes" in message:
                wants_input, outputs = message["pipes"]
                pipes = self._pipes(message["id"], wants_input, outputs, fds)
            if "pty" not in message and len(fds) < len(_STREAMS):
                # Opened here and not by the guest, so that it is the device in the slot's own /dev.
                fds.insert(0, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            if "script" in message:
                fds.append(descriptors.memory_file(message["script"].encode("latin-1"), self._folder))
            pid = self._spawn(message, fds, self._terminal(message, ends))
        except OSError as error:
            self._close_pipes(message["id"])
            name = error.filename or message.get("builtin") or message["argv"][0]
            code = "no_pty" if name == terminal.DEVICE else files.CODES.get(error.errno or 0, "spawn")
            if isinstance(error, _NoDirectory) and code != "spawn":
                code = "cwd_" + code
            # The name is cut, because the size of a message is limited.
            text = "%s: %s" % (error.strerror or error, name[:_SHOWN])
            self._tell({"failed": message["id"], "code": code, "message": text})
        except (ValueError, TypeError) as error:
            # For example, a variable's name contains "=", or a word can't be encoded.
            self._close_pipes(message["id"])
            self._tell({"failed": message["id"], "code": "invalid", "message": "not a command: %s" % error})
        else:
            if not self._tell({"started": message["id"], "pid": pid, "pipes": pipes}, ends[:1]):
                processes.send_signal(pid, signal.SIGKILL)
                text = "no terminal: too many descriptors of this user are on their way"
                self._tell({"failed": message["id"], "code": "no_pty", "message": text})
                return
            mark = message["env"][processes.MARK] if "env" in message else None
            self._running[pid] = _Command(message["id"], mark)
        finally:
            for fd in ends:
                os.close(fd)

    def _pipes(self, identity: str, wants_input: bool, outputs: int, fds: list[int]) -> list[tuple[int, bool]]:
        """Create the command's pipes. Append its ends to `fds`, and return ours as (descriptor, writable).

        If slots share the guest's user, the guest may be unable to send us pipes: the kernel limits the descriptors in
        flight per user, and a slot can use up that limit. So the guest opens our ends through /proc, and then sends
        `taken`, after which we close them.
        """
        ours: list[tuple[int, bool]] = []
        untaken = self._untaken.setdefault(identity, [])
        for writable in (*(False for _ in range(outputs)), *(True for _ in range(wants_input))):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            mine, theirs = (writer, reader) if writable else (reader, writer)
            fds.append(theirs)
            untaken.append(mine)
            ours.append((mine, writable))
        if wants_input:
            fds.insert(0, fds.pop())
        if outputs == 1:
            fds.append(os.dup(fds[-1]))
        return ours

    def _close_pipes(self, identity: str) -> None:
        """Close our ends of a command's pipes."""
        for fd in self._untaken.pop(identity, []):
            os.close(fd)

    @staticmethod
    def _terminal(message: dict[str, Any], ends: list[int]) -> str | None:
        """Open a terminal if the command gets one. Append both ends to `ends`, and return the path."""
        if "pty" not in message:
            return None
        try:
            ours, theirs, path = terminal.open_pair(*message["pty"])
        except OSError as error:
            raise OSError(error.errno, "no terminal (%s)" % error.strerror, terminal.DEVICE) from error
        ends += [ours, theirs]
        return path

    def _spawn(self, message: dict[str, Any], fds: list[int], tty: str | None) -> int:
        try:
            os.chdir(message["cwd"])
        except OSError as error:
            text = "cannot change to the working directory (%s)" % error.strerror
            # A file operation always runs in the workspace. So its caller learns that the path does not exist.
            kind = OSError if "builtin" in message else _NoDirectory
            raise kind(error.errno, text, message["cwd"]) from error
        if "builtin" in message:
            return self._fork(fds, None, lambda: files.run(message["builtin"], message["args"]))
        argv, env = message["argv"], message["env"]
        path = _find(argv[0], env.get("PATH", os.defpath))
        if not hasattr(os, "posix_spawn"):
            return self._fork_and_execute(path, argv, env, fds, tty)
        actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, *pair) for pair in _places(fds, tty)]
        if tty is not None:
            # The leader of a new session opens its first terminal. That becomes the session's controlling terminal.
            open_tty = (os.POSIX_SPAWN_OPEN, 0, tty, os.O_RDWR, 0)
            actions += [open_tty, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
        try:
            return os.posix_spawn(
                path, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=processes.ALL_SIGNALS
            )
        except NotImplementedError:  # a C library without POSIX_SPAWN_SETSID
            return self._fork_and_execute(path, argv, env, fds, tty)

    def _fork(self, fds: list[int], tty: str | None, body: Callable[[], int]) -> int:
        # Signals are blocked until the child has default handlers. An ignored TERM would be lost; a blocked one waits.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, processes.ALL_SIGNALS)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if pid:
            return pid
        status = 126
        try:
            signal.set_wakeup_fd(-1)
            for number in processes.ALL_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            self._sock.close()
            for identity in list(self._untaken):
                self._close_pipes(identity)
            for fd, target in _places(fds, tty):
                os.dup2(fd, target)
                os.close(fd)
            if tty is not None:
                fd = os.open(tty, os.O_RDWR)
                for target in (0, 1, 2):
                    os.dup2(fd, target)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            status = body()
        except BaseException as error:
            os.write(2, ("%s: %s" % (type(error).__name__, error)).encode("utf-8", "replace"))
        finally:
            os._exit(status)

    def _fork_and_execute(
        self, path: str, argv: list[str], env: dict[str, str], fds: list[int], tty: str | None
    ) -> int:
        """Do what posix_spawn does, for Python 3.7. A failed exec raises OSError here."""
        reader, writer = os.pipe2(os.O_CLOEXEC)

        def execute() -> int:
            try:
                os.execve(path, argv, env)
            except OSError as error:
                os.write(writer, b"%d" % (error.errno or errno.EINVAL))
            except (ValueError, TypeError):
                os.write(writer, b"%d" % errno.EINVAL)
            return 126

        try:
            pid = self._fork(fds, tty, execute)
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as file:
            number = file.read()
        if number:
            os.waitpid(pid, 0)
            raise OSError(int(number), os.strerror(int(number)), path)
        return pid

    # --- listening --------------------------------------------------------------------------------------------------

    def _listen(self, identity: str, port: int) -> None:
        """Listen on a port of the slot's loopback, and send the socket to the guest."""
        try:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("127.0.0.1", port))
                sock.listen(_BACKLOG)
                if self._tell({"started": identity, "pid": None}, [sock.fileno()]):
                    return
            code, text = "failed", "too many descriptors of this user are on their way"
        except OSError as error:
            code, text = _PORT_CODES.get(error.errno or 0, "failed"), error.strerror or str(error)
        self._tell({"failed": identity, "code": code, "message": "port %d of the loopback: %s" % (port, text)})

    # --- ending -----------------------------------------------------------------------------------------------------

    def _end(self, identity: str, grace: float, mark: str | None) -> None:
        """Send TERM to a command and all processes that it started. `_advance` sends KILL later, and reports the end.

        With `mark`, the command may have ended. Then the signals go to the processes that it left running.
        """
        pid = next((pid for pid, command in self._running.items() if command.identity == identity), None)
        if pid is None and mark is not None:
            pid = self._ghost(identity, mark)
        if pid is None:
            return
        command = self._running[pid]
        deadline = time.monotonic() + grace
        command.deadline = deadline if command.deadline is None else min(command.deadline, deadline)
        if grace > 0:
            for target in self._family(pid):
                processes.send_signal(target, signal.SIGTERM)
                processes.send_signal(target, signal.SIGCONT)

    def _ghost(self, identity: str, mark: str) -> int:
        """Add an ended command to the running ones, under a negative pid, which no process has. Return that pid."""
        self._ghosts -= 1
        command = self._running[self._ghosts] = _Command(identity, mark)
        command.start, command.status, command.left = _NEVER, 0, set()
        return self._ghosts

    def _advance(self, pid: int) -> None:
        """Report the end of a command that shall end if all of its processes have ended. Send KILL at the deadline."""
        command = self._running[pid]
        if command.deadline is not None and time.monotonic() >= command.deadline:
            self._kill_family(pid)
        elif self._family(pid) or self._reap():
            return  # a process that ended while we looked may have forked one that we have not seen
        command.deadline = None
        if command.status is not None:
            self._report_end(pid, command.status)

    def _family(self, leader: int) -> list[int]:
        command = self._running[leader]
        unreaped = command.status is None
        if unreaped and command.start == 0:
            command.start = processes.start_of(leader)
        others = len(self._running) > 1

        def is_orphan(pid: int, process: processes.Process) -> bool:
            if pid in self._running:
                return False
            mark = processes.mark_of(pid)
            if mark is not None:
                return mark == command.mark
            # Without a mark we guess, but only if no other command runs that could have started the process.
            return not others and process.start >= command.start

        pids = processes.family(leader, command.start, is_orphan)
        if unreaped and leader not in pids:
            # Until its exec, the leader is not dumpable, like this process. So a /proc with `hidepid` hides the leader.
            pids.insert(0, leader)
        if command.left is not None:
            command.left.update(pids)
        return pids

    def _kill_family(self, pid: int) -> None:
        """Kill all processes of a command, also those that fork faster than we can list them."""
        if self._kill_listed(pid):
            return
        if self._owns_all:
            # Once all are stopped, nothing forks: those of this command are killed, and the others continue.
            processes.send_signal(-1, signal.SIGSTOP)
            try:
                self._kill_listed(pid)
            finally:
                processes.send_signal(-1, signal.SIGCONT)
        elif len(self._running) == 1:
            self._kill_everything()

    def _kill_listed(self, pid: int) -> bool:
        """Kill the processes of a command that /proc lists. Return whether none is left, within `_KILLING_S`.

        One empty list proves nothing: a process may have forked and ended while we read /proc. So several lists in a
        row must be empty, and no child of ours may end meanwhile.
        """
        until = time.monotonic() + _KILLING_S
        looks = 0
        while looks < _LOOKS and time.monotonic() < until:
            if self._reap():
                looks = 0
            targets = self._family(pid)
            for target in targets:
                processes.send_signal(target, signal.SIGKILL)
            looks = 0 if targets else looks + 1
            time.sleep(0.001)
        return looks == _LOOKS

    def _kill_everything(self) -> None:
        if self._owns_all:
            processes.send_signal(-1, signal.SIGKILL)
            return
        for _ in range(50):
            targets = processes.family(os.getpid(), 0, lambda _pid, _process: True)
            for target in targets:
                processes.send_signal(target, signal.SIGKILL)
            if not self._reap(tell=False) and not targets:
                return

    def _reap(self, tell: bool = True) -> bool:
        """Take the exit statuses of our children; return whether any had ended."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended = True
            command = self._running.get(pid)
            if command is None:
                continue
            command.status = status
            if command.deadline is None and tell:
                self._report_end(pid, status)

    def _report_end(self, pid: int, status: int) -> None:
        command = self._running.pop(pid)
        if command.left is None:
            self._tell({"exit": command.identity, "status": status})
        else:
            self._tell({"swept": command.identity, "count": len(command.left)})


def _places(fds: list[int], tty: str | None) -> list[tuple[int, int]]:
    """Return pairs of a descriptor and its number in the command. With a terminal, 0, 1 and 2 are not among them."""
    return list(zip(fds, (SCRIPT_FD,) if tty is not None else (*_STREAMS, SCRIPT_FD)))


def _move_up(sock: socket.socket) -> socket.socket:
    moved = socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, _OWN_FDS))
    sock.close()
    return moved


def _find(name: str, path: str) -> str:
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "command not found", name)


def close_all_but(keep: set[int]) -> None:
    """Close all descriptors except these: a slot must have none of the guest's."""
    last = max(int(name) for name in os.listdir("/proc/self/fd"))
    start = 0
    for fd in [*sorted(keep), last + 1]:
        if start < fd:  # closerange(0, 0) closes everything, in Python 3.10 and 3.11
            os.closerange(start, fd)
        start = fd + 1


def flush_streams() -> None:
    """Flush the output streams, so that a forked child does not write their buffers again."""
    sys.stdout.flush()
    sys.stderr.flush()
