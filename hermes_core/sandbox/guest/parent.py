"""The slot's resident parent: forked off the guest, inside the slot's user and namespaces, it spawns every command.

It talks to the guest over a SEQPACKET socket: spawn requests come with descriptors, starts and exits go back. Spawning
is `posix_spawn`, as forking Python is what costs (3.7 ms against 1.7); built-in file operations are forked.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import signal
import socket
import sys
import time

from . import files

SPILL = 48 << 10
"""A spawn request above this many bytes comes in a file, as a datagram of the socket is bounded."""
MESSAGE = 96 << 10
_RESET_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP]
_SCRIPT_FD = 9
_CLOEXEC = 0x40000000
"""MSG_CMSG_CLOEXEC, which the socket module does not name."""


def send_message(sock, message, fds=()):
    """One message with descriptors; raises BlockingIOError when the other side is not reading."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message, separators=(",", ":")).encode("ascii")], ancillary)


def receive_message(sock):
    """One message and its descriptors (close-on-exec); (None, []) when the other side is gone."""
    data, ancillary, _, _ = sock.recvmsg(MESSAGE, socket.CMSG_SPACE(8 * 4), _CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return (json.loads(data.decode("ascii")) if data else None), list(fds)


class Parent:
    """Spawns, signals and reaps the commands of one slot, until the guest's end of the socket closes."""

    def __init__(self, sock, pid_one):
        self._sock = sock
        self._pid_one = pid_one
        self._by_pid = {}
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake = wake_read
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self):
        """Answer the guest's requests; never returns normally."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                else:
                    self._handle()

    def _handle(self):
        message, fds = receive_message(self._sock)
        if message is None:
            os._exit(0)
        if message.get("spilled"):
            with os.fdopen(fds.pop(), "rb") as spill:
                message = json.loads(spill.read().decode("ascii"))
        if "kill" in message:
            self._kill(message)
            return
        try:
            pid = self._spawn(message, fds)
        except OSError as error:
            text = "%s: %s" % (error.strerror or error, error.filename or message["argv"][0])
            self._tell({"failed": message["id"], "errno": error.errno or 0, "message": text})
        else:
            self._by_pid[pid] = message["id"]
            self._tell({"started": message["id"], "pid": pid})
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, message, fds):
        try:
            os.chdir(message["cwd"])
        except OSError as error:
            text = "cannot change to the working directory (%s)" % error.strerror
            raise OSError(error.errno, text, message["cwd"]) from error
        if "builtin" in message:
            return self._fork(fds, lambda: files.run(message["builtin"], message["args"]))
        argv, env = message["argv"], message["env"]
        path = _find(argv[0], env.get("PATH", os.defpath))
        if not hasattr(os, "posix_spawn"):
            return self._fork(fds, lambda: os.execve(path, argv, env))
        targets = [0, 1, 2, _SCRIPT_FD][: len(fds)]
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(fds, targets)]
        return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=_RESET_SIGNALS)

    def _fork(self, fds, body):
        pid = os.fork()
        if pid:
            return pid
        status = 126
        try:
            signal.set_wakeup_fd(-1)
            for number in _RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            self._sock.close()
            # The originals are all above the targets, so that no copy overwrites one that is still to be copied.
            for fd, target in zip(fds, [0, 1, 2, _SCRIPT_FD]):
                os.dup2(fd, target)
            status = body() or 0
        except BaseException as error:
            os.write(2, ("%s: %s" % (type(error).__name__, error)).encode("utf-8", "replace"))
        finally:
            os._exit(status)

    def _kill(self, message):
        """Signal a command and what it started; the last resort repeats until nothing of it is left."""
        pid = next((pid for pid, execution in self._by_pid.items() if execution == message["kill"]), None)
        if pid is None:
            return
        number = message["signal"]
        if message.get("all") and self._pid_one and number == signal.SIGKILL:
            os.kill(-1, number)
            return
        deadline = time.monotonic() + 1.0
        while True:
            targets = family(pid, everything=bool(message.get("all")))
            for target in targets:
                signal_process(target, number)
            self._reap()
            if number != signal.SIGKILL or not targets or time.monotonic() > deadline:
                return

    def _reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            execution = self._by_pid.pop(pid, None)
            if execution is not None:
                self._tell({"exit": execution, "status": status})

    def _tell(self, message):
        try:
            send_message(self._sock, message)
        except OSError:
            os._exit(0)


def _find(name, path):
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "command not found", name)


def signal_process(pid, number):
    """Send a signal; a process that is gone, or not ours, is no error."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def family(leader, everything):
    """The living processes of the leader's session and its descendants; with `everything`, all that are ours."""
    me = os.getpid()
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if fields[0] not in (b"Z", b"X"):
            table[int(name)] = (int(fields[1]), int(fields[3]))
    family = {pid for pid, (_, session) in table.items() if session == leader or pid == leader}
    grown = True
    while grown:
        found = {pid for pid, (ppid, _) in table.items() if ppid in family and pid not in family}
        if everything:
            # We are the subreaper: what has escaped its session and lost its father is our own child now.
            found |= {pid for pid, (ppid, _) in table.items() if ppid == me and pid not in family}
        family |= found
        grown = bool(found)
    family.discard(me)
    return family


def close_all_but(keep):
    """Close every descriptor of the guest's that a slot must never hold."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass


def flush_streams():
    """Nothing buffered by the guest may be written twice by a fork."""
    sys.stdout.flush()
    sys.stderr.flush()
