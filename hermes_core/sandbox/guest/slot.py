"""A slot in the guest: its directories, its parent process, its commands, and getting it clean again."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time

from . import confine, parent
from .files import remove_tree

PREPARE = -1
"""The index of the preparation user's slot."""
_CLEAN_TIMEOUT = 5.0
_MAX_DRAINING = 256


class Slot:
    """One workspace. All of its commands run below one parent process, made anew at each recycling."""

    def __init__(self, daemon, index):
        self.daemon = daemon
        self.index = index
        config = daemon.config
        base = config["workspace_base"]
        name = "prepare" if index == PREPARE else "slot_%d" % index
        self.workspace = os.path.join(base, "prepared" if index == PREPARE else name)
        self._private = os.path.join(base, ".slots", name)
        self.home = os.path.join(self._private, "home")
        self.tmp = os.path.join(self._private, "tmp")
        self.spool = os.path.join(self._private, "spool")
        self.uid = None
        if daemon.mechanism != "shared" and config["uid_base"] is not None:
            self.uid = config["uid_base"] + (0 if index == PREPARE else 2 + index)
        self.state = "new"
        self.executions = {}
        self.background = {}
        self._draining = []
        self._pid = None
        self._sock = None
        self._outbox = []
        self._waiting = []
        self._wipe = False
        self._replies = []
        self._since = 0.0
        self._closing = False
        self._starting = False

    # --- opening, recycling -----------------------------------------------------------------------------------------

    def open(self, reply):
        """Make the slot ready for its first lease; idempotent."""
        if self.state == "ready":
            reply(None)
        elif self.state == "broken":
            reply({"kind": "infra", "code": "unclean", "message": "the slot is quarantined"})
        else:
            self._replies.append(reply)
            if self.state == "new":
                self.state = "opening"
                self._since = time.monotonic()
                self.make_directories()
                self._start_parent()

    def recycle(self, wipe, reply):
        """Kill everything in the slot, prove it, empty its directories if `wipe`, and have a new parent ready."""
        if self.state == "new":
            reply(None)
            return
        if self.state == "broken":
            reply({"kind": "infra", "code": "unclean", "message": "the slot is quarantined"})
            return
        self._replies.append(reply)
        self._wipe = self._wipe or wipe
        if self.state in ("ready", "opening"):
            self.state = "recycling"
            self._since = time.monotonic()
            self._abandon({"kind": "command", "code": "killed", "message": "the slot was emptied"})
            self._kill_then_restart()

    def close(self):
        """Kill everything for good; used when the sandbox ends."""
        self._closing = True
        self._abandon({"kind": "infra", "code": "ended", "message": "the sandbox ends"})
        self._kill()

    def _abandon(self, error):
        for execution in list(self.executions.values()):
            execution.failed(error)
        for process in list(self.background.values()):
            process.failed(error)
        for fd in self._draining:
            self.daemon.loop.remove(fd)
            os.close(fd)
        self._draining = []
        if self._wipe or self._closing:
            self.background.clear()

    def _kill_then_restart(self):
        self._starting = False
        self._kill()
        if self._pid is None:
            self._emptied()
        # Otherwise the parent's death, seen by the loop, goes on from here.

    def _kill(self):
        mechanism = self.daemon.mechanism
        if mechanism == "user":
            self.daemon.kill_user(self.uid)
        elif mechanism == "shared":
            self._kill_family()
        if self._pid is not None:
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _kill_family(self):
        """Without a user or namespace of its own, walking the descendants is all there is: best effort, no proof."""
        if self._pid is None:
            return
        for _ in range(50):
            family = parent.family(self._pid, everything=False)
            family.discard(self._pid)
            if not family:
                return
            for pid in family:
                parent.signal_process(pid, signal.SIGKILL)
            self.daemon.loop.reap()

    def _emptied(self):
        """The parent is dead, and with it (or by its user's death) all that ran here."""
        self._detach_parent()
        if self._closing or self.state == "broken":
            return
        try:
            if self._wipe:
                self.daemon.discard(self.workspace)
                self.daemon.discard(self._private)
                self.make_directories()
        except OSError as error:
            self._broken("the workspace could not be emptied: %s" % error)
            return
        self._start_parent()

    def _broken(self, message):
        self.state = "broken"
        self._answer({"kind": "infra", "code": "unclean", "message": message})

    def _answer(self, error):
        replies, self._replies = self._replies, []
        for reply in replies:
            reply(error)

    def make_directories(self):
        for path, mode in ((self.workspace, 0o700), (self._private, 0o711), (self.home, 0o700), (self.tmp, 0o700)):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
            if self.uid is not None and path != self._private:
                os.chown(path, self.uid, self.uid)
        os.makedirs(self.spool, mode=0o755, exist_ok=True)
        if self.index == PREPARE:
            os.chmod(self.workspace, 0o755)
            for name, mode in (("shared", 0o755), ("private", 0o700)):
                path = os.path.join(self.workspace, name)
                os.makedirs(path, exist_ok=True)
                os.chmod(path, mode)
                if self.uid is not None:
                    os.chown(path, self.uid, self.uid)

    # --- the parent process -----------------------------------------------------------------------------------------

    def _plan(self):
        config = self.daemon.config
        base = config["workspace_base"]
        single_user = self.daemon.single_user
        binds = [
            (self.workspace, self.workspace, True),
            (self.home, self.home, True),
            (self.spool, self.spool, False),
            (self.tmp, "/tmp", True),
        ]
        if self.index != PREPARE:
            shared = os.path.join(base, "prepared", "shared")
            binds.append((shared, shared, False))
        own_user = self.daemon.mechanism != "shared"
        return {
            "mechanism": self.daemon.mechanism,
            "uid": (1000 if single_user else self.uid) if own_user else None,
            "gid": (1000 if single_user else self.uid) if own_user else None,
            "user_namespace": single_user,
            # The preparation may need the sandbox's network (an installer); slots of this level have loopback only.
            "net_namespace": self.index != PREPARE,
            "umask": 0o077 if self.daemon.mechanism == "user" and self.index != PREPARE else 0o022,
            "max_processes": config["max_processes"] if own_user else 0,
            "workspace": self.workspace,
            "binds": [*binds, (self.tmp, "/var/tmp", True)],
            "visible": [*config["visible_paths"], sys.base_prefix],
            "scratch": self.daemon.scratch,
            "sweep": [] if not self._wipe else self.daemon.world_writable,
        }

    def _start_parent(self):
        if self._wipe and self.daemon.world_writable is None:
            self.daemon.loop.later(0.02, self._start_parent)
            return
        plan = self._plan()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent.flush_streams()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._retry("fork failed: %s" % error)
            return
        if pid == 0:
            confine.parent_main(theirs, plan)
        theirs.close()
        ours.setblocking(False)
        self._sock = ours
        self._pid = pid
        self._starting = True
        self.daemon.loop.add(ours.fileno(), select.EPOLLIN, self._on_socket)
        if self.daemon.mechanism == "namespace":
            self.daemon.loop.watch(pid, lambda status: self._helper_ended(pid, status))
        else:
            self.daemon.loop.watch(pid, lambda _status: self._parent_ended(pid))

    def _helper_ended(self, pid, status):
        """The process that made the namespaces has left; its child is the parent now, unless it failed before."""
        if status != 0 and self._pid == pid:
            self._read_socket()
            self._parent_ended(pid)

    def _parent_ended(self, pid):
        if self._pid != pid:
            return
        self._read_socket()
        self._pid = None
        if self._closing or self.state == "broken":
            self._detach_parent()
        elif self._starting:
            self._retry("something of an earlier lease still runs, or its parent process was killed")
        elif self.state == "recycling":
            self._emptied()
        else:
            # The slot's own processes killed it: their doing, a `command` matter. Others of the slot live on.
            self._adopt_orphans()
            self._detach_parent()
            self.state = "opening"
            self._since = time.monotonic()
            # At `user`, what is left of the old one's commands must go first, or no proof can hold.
            if self.daemon.mechanism == "user":
                self.daemon.kill_user(self.uid)
            self._start_parent()

    def _adopt_orphans(self):
        """We are the subreaper: the exit statuses of the dead parent's commands come to us."""
        for execution in [*self.executions.values(), *self.background.values()]:
            if execution.ended:
                continue
            if execution.pid is None or self.daemon.mechanism == "namespace":
                execution.failed({"kind": "command", "code": "killed", "message": "the slot's processes were killed"})
            else:
                self.daemon.loop.watch(execution.pid, execution.exited)

    def _detach_parent(self):
        if self._sock is not None:
            self.daemon.loop.remove(self._sock.fileno())
            self._sock.close()
            self._sock = None
        self._outbox = []

    def _retry(self, reason):
        """Not clean, or not started, yet: again in a moment, until it must be given up."""
        self._detach_parent()
        self._starting = False
        if time.monotonic() - self._since > _CLEAN_TIMEOUT:
            self._broken("the slot could not be made ready: %s" % reason)
            return
        if self.daemon.mechanism == "user":
            self.daemon.kill_user(self.uid)
        self.daemon.loop.later(0.004, self._emptied)

    def _on_socket(self, events):
        if events & select.EPOLLOUT:
            self._flush()
        if events & (select.EPOLLIN | select.EPOLLHUP):
            self._read_socket()

    def _read_socket(self):
        while self._sock is not None:
            try:
                message, _ = parent.receive_message(self._sock)
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, ValueError):
                message = None
            if message is None:
                self.daemon.loop.remove(self._sock.fileno())
                return
            self._heard(message)

    def _heard(self, message):
        if "ready" in message:
            self._became_ready()
        elif "init" in message:
            self._pid = message["init"]
            self.daemon.loop.watch(self._pid, lambda _status, pid=self._pid: self._parent_ended(pid))
        elif "dirty" in message:
            pass  # It leaves by itself, and its death leads to the next try.
        elif "refused" in message:
            self._broken("the slot could not be confined: %s" % message["refused"])
        else:
            self._heard_of_command(message)

    def _heard_of_command(self, message):
        identity = message.get("started") or message.get("exit") or message.get("failed")
        execution = self.executions.get(identity) or self.background.get(identity)
        if execution is None:
            return
        if "started" in message:
            execution.pid = message["pid"]
            self.daemon.requests.started(execution)
        elif "exit" in message:
            execution.exited(message["status"])
        else:
            code = "not_found" if message["errno"] == errno.ENOENT else "spawn"
            execution.failed({"kind": "command", "code": code, "message": message["message"]})

    def _became_ready(self):
        self.state = "ready"
        self._wipe = False
        self._starting = False
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._post(*request)
        self._answer(None)

    # --- commands ---------------------------------------------------------------------------------------------------

    def environment(self):
        """What every command of the slot finds in its environment."""
        env = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": self.home,
            "TMPDIR": "/tmp" if self.daemon.mechanism == "namespace" else self.tmp,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": self.daemon.shell,
            "LANG": "C.UTF-8",
            # The slot's user has no passwd entry, and what is prepared belongs to another one.
            "GIT_AUTHOR_NAME": "agent",
            "GIT_AUTHOR_EMAIL": "agent@localhost",
            "GIT_COMMITTER_NAME": "agent",
            "GIT_COMMITTER_EMAIL": "agent@localhost",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        if "HERMES_SANDBOX_ID" in os.environ:
            env["HERMES_SANDBOX_ID"] = os.environ["HERMES_SANDBOX_ID"]
        env.update(self.daemon.config["env"])
        return env

    def spawn(self, execution, message, wants_input, script=None):
        """Have the parent start a command; a long script goes in by descriptor, as one argument is bounded."""
        try:
            fds = execution.descriptors(wants_input)
            if script is not None:
                fds.append(self._as_file(script))
            message["id"] = execution.id
            self._post(message, fds, execution)
        except OSError as error:
            execution.failed({"kind": "command", "code": "spawn", "message": str(error)})

    def _as_file(self, data):
        fd, path = tempfile.mkstemp(dir=self.daemon.state_dir)
        os.unlink(path)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def _post(self, message, fds, execution):
        if execution.ended:
            _close(fds[3:])
            return
        if self.state != "ready":
            self._waiting.append((message, fds, execution))
            return
        size = len(json.dumps(message))
        extra = []
        if size > parent.SPILL:
            extra.append(self._as_file(json.dumps(message).encode("ascii")))
            message = {"spilled": True}
        self._outbox.append((message, fds + extra, fds[3:] + extra, execution))
        self._flush()

    def _flush(self):
        while self._outbox:
            message, fds, own, execution = self._outbox[0]
            try:
                if execution is None or not execution.ended:
                    parent.send_message(self._sock, message, fds)
            except BlockingIOError:
                self.daemon.loop.change(self._sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return
            except OSError:
                return
            self._outbox.pop(0)
            _close(own)
            if execution is not None:
                execution.spawned()
        if self._sock is not None:
            self.daemon.loop.change(self._sock.fileno(), select.EPOLLIN)

    def signal(self, execution, number):
        """Signal a command and what it started; all that runs here if nothing else of the slot does."""
        running = [*self.executions.values(), *self.background.values()]
        others = [other for other in running if not other.ended and other is not execution]
        if self._sock is not None and self.state == "ready":
            self._outbox.append(({"kill": execution.id, "signal": int(number), "all": not others}, [], [], None))
            self._flush()

    def last_resort(self, execution):
        """Even KILL brought no exit: the parent does not answer (stopped by the slot, say). Empty the slot."""
        if not execution.ended:
            self.recycle(False, lambda _error: None)

    def keep_draining(self, fd):
        """Read and forget what a left-behind child writes, so that it neither blocks nor gets SIGPIPE."""
        loop = self.daemon.loop

        def forget(_events=0):
            try:
                for _ in range(16):
                    if not os.read(fd, 1 << 16):
                        break
                else:
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            if fd in self._draining:
                self._draining.remove(fd)
                loop.remove(fd)
                os.close(fd)

        self._draining.append(fd)
        loop.add(fd, select.EPOLLIN, forget)
        if len(self._draining) > _MAX_DRAINING:
            oldest = self._draining.pop(0)
            loop.remove(oldest)
            os.close(oldest)

    def remove_directories(self):
        """The end of the sandbox: nothing of the slot stays on the disk."""
        for path in (self.workspace, self._private):
            remove_tree(path)


def _close(fds):
    for fd in fds:
        os.close(fd)
