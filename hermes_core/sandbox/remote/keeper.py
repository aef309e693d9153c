"""Keeps a sandbox on a host where all that a channel has started ends with the channel, such as in a Slurm job.

Programs must outlive the channels to them. So a channel runs only a relay (see `remote/relay`), which passes a request
and its own standard streams on to this program, over a socket. All processes of the sandbox are descendants of this
program. It is sent to the host with `local/host`, and needs only Python >= 3.7 and its standard library.
"""
# pathlib is slow to import
# ruff: noqa: PTH108, PTH208

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time

from hermes_core.errors import HermesError
from hermes_core.sandbox.local import host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NO_DIRECTORY = 6
"""The exit status of the keeper if there can be no directory for sandboxes."""

SOCKET = ".socket"
"""The end of the names of all sockets."""

_ATTEMPTS, _LISTEN_BACKLOG, _REQUEST_BYTES = 10, 64, 64 << 20
_LOOK_S, _DYING_S, _PAUSE_S = 0.2, 600.0, 0.02
_PR_SET_CHILD_SUBREAPER = 36


def main(request: dict[str, Any]) -> None:
    """Carry out requests until the sandbox that one of them made has ended.

    The program also ends after `patience_s` seconds without a request, and when a request has made no sandbox.

    Args:
        request: `directory` and `usual` (see `host.place_of`) and `socket`, in which variables are replaced, and
            `sandbox_id`, `patience_s`.
    """
    os.umask(0o022)
    directory = request["directory"]
    place = host.place_of(directory and os.path.expandvars(directory), request["usual"])
    name = os.path.expandvars(request["socket"])
    try:
        listener = _listen(place, name)
    except (HermesError, OSError) as error:
        os.write(2, str(error).encode("utf-8", "replace"))
        sys.exit(NO_DIRECTORY)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that we can wait for the supervisor
    try:
        _serve(listener, dict(request, directory=place), ending)
    finally:
        _clean_up(place, request["sandbox_id"])
        os.unlink(name)
        os.chdir("/")
        host.remove_if_empty(place)


def _listen(place: str, name: str) -> socket.socket:
    """Make the directory of sandboxes our working directory, and listen at a socket of this name in it."""
    for attempt in range(_ATTEMPTS):
        try:
            host.open_place(place, "directory")
            os.chdir(place)
            _remove_dead_sockets()
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(name)  # a relative name, as the whole path may be too long for a socket
        except FileNotFoundError:  # another keeper has just removed the empty directory
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            listener.listen(_LISTEN_BACKLOG)
            return listener
    raise AssertionError("unreachable")


def _clean_up(place: str, sandbox_id: str) -> None:
    """End the sandbox, if it has not ended by itself, and remove what is left of it."""
    record = host.find(place, sandbox_id)
    if record is not None and _is_child(record.supervisor[0]):  # and not another keeper's, with the same creation id
        host.end(place, record)
    deadline = time.monotonic() + _DYING_S  # the supervisor removes many files, or it was still making the sandbox
    while _reap()[0] and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    host.sweep(place)


def _serve(listener: socket.socket, settings: dict[str, Any], ending: list[int]) -> None:
    deadline = time.monotonic() + settings["patience_s"]
    carried_out: set[int] = set()
    served = False
    while not ending:
        has_children, ended = _reap()
        served = served or any(pid in carried_out and not status for pid, status in ended)
        carried_out.difference_update(pid for pid, _ in ended)
        if not has_children and (served or time.monotonic() > deadline):
            return
        if not select.select([listener], [], [], _LOOK_S)[0]:
            continue
        connection, _ = listener.accept()
        with connection:
            pid = os.fork() if _is_ours(connection) else -1
            if pid == 0:
                listener.close()
                _carry_out(connection, settings)
            carried_out.add(pid)


def _carry_out(connection: socket.socket, settings: dict[str, Any]) -> None:
    """Carry out the request that comes with the streams of a relay, tell the relay the exit status, and exit: with 0
    if there was a request."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _take_streams(connection)
        request = json.loads(_take(int.from_bytes(_take(4), "big")).decode("ascii"))
    except BaseException:  # such as of another keeper, which looks for dead sockets
        os._exit(1)
    status = 1
    try:
        host.main(dict(request, directory=settings["directory"], usual=""))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        os.write(2, repr(error).encode("utf-8", "replace"))
    finally:
        for stream in (0, 1, 2):  # before the relay ends, as the reader then sees all that was written
            os.close(stream)
        with contextlib.suppress(OSError):  # the relay was killed
            connection.sendall(bytes([status]))
        os._exit(0)


def _take_streams(connection: socket.socket) -> None:
    """Replace our standard streams by those of the relay."""
    descriptors = array.array("i")
    _, control, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if len(descriptors) != 3:
        raise EOFError
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)


def _take(count: int) -> bytes:
    """Read from standard input."""
    if count > _REQUEST_BYTES:
        raise EOFError
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to our account, or to root."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid in (0, os.geteuid())


def _reap() -> tuple[bool, list[tuple[int, int]]]:
    """Return whether any child lives, and (pid, status) of those that have ended. The supervisor is among them, whom we
    have adopted, and so is what the shell has forked that became us."""
    ended: list[tuple[int, int]] = []
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return True, ended
            ended.append((pid, status))
    except ChildProcessError:
        return False, ended


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _remove_dead_sockets() -> None:
    """Remove the sockets of keepers that were killed on this host."""
    for name in os.listdir():
        if name.endswith(SOCKET):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(name)
                except ConnectionRefusedError:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
                except OSError:  # it is gone, or not ours
                    pass
