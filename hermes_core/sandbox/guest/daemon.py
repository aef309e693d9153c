"""The guest's core: the driver's session, the slots, the heartbeat and the dead-man switch."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time

from . import confine, namespaces
from .connection import Connection
from .files import remove_tree
from .requests import Refusal, Requests
from .slot import PREPARE, Slot

_PEER = struct.Struct("3i")
_LEVELS = {"shared": 0, "user": 1, "namespace": 2}


class Daemon:
    """Serves one driver at a time over a unix socket, for as long as the sandbox lives."""

    def __init__(self, loop, listener, state_dir):
        self.loop = loop
        self.state_dir = state_dir
        self.scratch = os.path.join(state_dir, "scratch")
        self.shell = next((p for p in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.access(p, os.X_OK)), "sh")
        self.config = None
        self.mechanism = "shared"
        self.single_user = False
        self.world_writable = []
        self.slots = {}
        self.requests = Requests(self)
        self._driver = None
        self._listener = listener
        self._connection = None
        self._paused = []
        self._heard = time.monotonic()
        self._beats = 0
        self._discarded = 0
        self._remover = None
        self._instance = os.urandom(8).hex()
        loop.add(listener.fileno(), select.EPOLLIN, self._accept)
        loop.later(1.0, self._check_driver)

    # --- the channel ------------------------------------------------------------------------------------------------

    def _accept(self, _events):
        sock, _ = self._listener.accept()
        uid = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
        if uid != os.geteuid():
            sock.close()
            return
        # Only a hello with the lease makes this connection the driver's; until then the old one stays.
        Connection(self.loop, sock, self._frame, self._ended, self._resume_paused)

    def _frame(self, connection, header, body):
        if header.get("op") == "hello":
            error = self._hello(connection, header)
            if error is not None:
                connection.send({"ev": "refused", "error": error})
        elif connection is self._connection:
            self._heard = time.monotonic()
            if header.get("op") == "ping":
                self._beat()
                self.send({"ev": "pong"})
            elif header.get("op") == "end":
                self.end()
            else:
                self.requests.handle(header, body)

    def _ended(self, connection):
        if connection is self._connection:
            self._connection = None

    def _hello(self, connection, header):
        """Take this connection as the driver's, or give the error that refuses it."""
        if self.config is None:
            try:
                self._configure(header["config"])
            except Refusal as refusal:
                return refusal.error
        elif header["config"]["lease_id"] != self.config["lease_id"]:
            return {"kind": "policy", "code": "lease", "message": "this sandbox is leased to another driver"}
        elif header["driver"] != self._driver and not header.get("take_over"):
            return {"kind": "policy", "code": "driver", "message": "another driver holds this lease"}
        if self._connection is not None and self._connection is not connection:
            self._connection.close()
        self._driver = header["driver"]
        self._connection = connection
        self._heard = time.monotonic()
        self._beat()
        dedicated = self.config["slots"] == 1 and self.config["isolation"] == 3
        self.send(
            {
                "ev": "hello",
                "granted": 3 if dedicated else _LEVELS[self.mechanism],
                "mechanism": self.mechanism,
                "python": "%d.%d.%d" % sys.version_info[:3],
                "shell": self.shell,
                "pid": os.getpid(),
                "instance": self._instance,
                "known": self.requests.known(),
            }
        )
        return None

    def send(self, header, data=b""):
        """Send one frame to the driver; without one it is dropped, as a resumed driver asks again."""
        if self._connection is not None:
            self._connection.send(header, data)

    def congested(self):
        """Whether streams have to wait: no driver, or enough under way already."""
        return self._connection is None or self._connection.congested()

    def paused(self, execution):
        """A stream waits for room."""
        if execution not in self._paused:
            self._paused.append(execution)

    def _resume_paused(self):
        waiting, self._paused = self._paused, []
        for execution in waiting:
            execution.resume()

    # --- configuration ----------------------------------------------------------------------------------------------

    def _configure(self, config):
        root = os.geteuid() == 0
        base = config["workspace_base"]
        self.single_user = root and not _maps(config["uid_base"], config["slots"] + 2)
        wanted = config["isolation"]
        probe = namespaces.probe() if wanted >= 1 else {"namespaces": False, "reason": ""}
        can_user = root and not self.single_user
        if wanted == 0:
            self.mechanism = "shared"
        elif wanted == 1 and can_user:
            self.mechanism = "user"
        elif probe["namespaces"] and (can_user or self.single_user):
            self.mechanism = "namespace"
        elif wanted == 3 and config["slots"] == 1:
            self.mechanism = "user" if can_user else "shared"
        else:
            reason = probe.get("reason") or "no namespaces, and no user ids for the slots"
            raise Refusal("policy", "isolation", "the sandbox cannot separate its slots as asked: %s" % reason)
        os.makedirs(base, exist_ok=True)
        os.chmod(base, 0o711)
        slots = os.path.join(base, ".slots")
        os.makedirs(slots, exist_ok=True)
        os.chmod(slots, 0o711)
        for path in (self.scratch, os.path.join(self.state_dir, "trash")):
            os.makedirs(path, exist_ok=True)
        self.config = config
        if self.mechanism == "user":
            self.world_writable = None
            self._find_world_writable(base)
        self.slots[PREPARE] = Slot(self, PREPARE)
        self.slots[PREPARE].make_directories()

    def _find_world_writable(self, base):
        reader, writer = os.pipe2(os.O_CLOEXEC)

        def search():
            skip = {"/proc", "/sys", "/dev/pts", base}
            data = json.dumps(confine.world_writable(skip)).encode("ascii")
            with os.fdopen(writer, "wb") as file:
                file.write(data)

        confine.run_detached(search, keep=writer)
        os.close(writer)
        found = bytearray()

        def read(_events):
            data = os.read(reader, 1 << 16)
            if data:
                found.extend(data)
                return
            self.loop.remove(reader)
            os.close(reader)
            self.world_writable = json.loads(bytes(found).decode("ascii")) if found else ["/tmp", "/var/tmp", "/dev/shm"]

        self.loop.add(reader, select.EPOLLIN, read)

    # --- users, files, the end --------------------------------------------------------------------------------------

    def kill_user(self, uid):
        """Kill every process of a slot's user, in this process: with a full process table a fork would fail.

        The real uid is a reserved one, the effective one the slot's: so the kernel's permission check lets the signal
        reach the slot's processes and nothing else. One call suffices, and "until nobody is left" would never end
        while other users' processes exist.
        """
        os.setresuid(self.config["uid_base"] + 1, uid, 0)
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.setresuid(0, 0, 0)
        self.loop.reap()

    def discard(self, path):
        """Take a directory out of the way at once; its removal takes as long as it takes, in a process of its own."""
        self._discarded += 1
        trash = os.path.join(self.state_dir, "trash", "%d-%d" % (os.getpid(), self._discarded))
        try:
            os.rename(path, trash)
        except FileNotFoundError:
            return
        if self._remover is None:
            reader, self._remover = os.pipe2(os.O_CLOEXEC)
            confine.run_detached(lambda: _remove_named(reader), keep=reader)
            os.close(reader)
        os.write(self._remover, os.fsencode(trash) + b"\0")

    def _beat(self):
        self._beats += 1
        self._write_heartbeat(str(self._beats))

    def _write_heartbeat(self, text):
        path = os.path.join(self.state_dir, "heartbeat")
        with open(path + ".new", "w") as file:
            file.write(text + "\n")
        os.rename(path + ".new", path)

    def _check_driver(self):
        ttl = self.config["orphan_ttl_s"] if self.config else 60.0
        if time.monotonic() - self._heard > ttl:
            self.end()
            return
        self.loop.later(min(1.0, ttl / 5), self._check_driver)

    def end(self):
        """Kill everything, leave no file behind, tell the watchdog, and stop."""
        for slot in self.slots.values():
            slot.close()
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            self.loop.reap()
            try:
                for slot in self.slots.values():
                    slot.remove_directories()
                break
            except OSError:
                time.sleep(0.02)
        try:
            self._write_heartbeat("end")
        finally:
            shutil.rmtree(os.path.join(self.state_dir, "trash"), ignore_errors=True)
            self.loop.stop()


def _remove_named(reader):
    """Remove the trees whose paths come through a pipe, until the guest is gone."""
    rest = b""
    while True:
        data = os.read(reader, 1 << 16)
        if not data:
            return
        *paths, rest = (rest + data).split(b"\0")
        for path in paths:
            remove_tree(os.fsdecode(path))


def _maps(uid_base, count):
    """Whether our user namespace has these user ids."""
    if uid_base is None:
        return False
    with open("/proc/self/uid_map") as file:
        for line in file:
            inside, _, length = map(int, line.split())
            if inside <= uid_base and uid_base + count <= inside + length:
                return True
    return False
