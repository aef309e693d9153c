"""Processes of this host by identity: a pid and its start time, because a pid alone may soon belong to another process.

Light imports only.
"""
# pathlib is slow to import
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import time

MARKER = "HERMES_SANDBOX_ID"
"""The environment variable of everything that was opened in a sandbox. The processes of a `shared` one are found by
it."""

_ROUNDS, _PAUSE_S, _CLEAN_ROUNDS = 100, 0.01, 2


def start_time(pid: int) -> int:
    """Return when the process began, in clock ticks since boot; 0 if there is none, or only its zombie."""
    fields = _fields(pid)
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def began(pid: int) -> int:
    """Return when the process or its zombie began, in clock ticks since boot; 0 if there is neither."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def _fields(pid: int) -> list[bytes]:
    """Return /proc's fields of a process, beginning with its state; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return []


def alive(pid: int, started: int) -> bool:
    """Return whether this very process runs."""
    return started > 0 and start_time(pid) == started


def stop(process: tuple[int, int], number: int, limit_s: float) -> bool:
    """Send a signal to this very process, or to none, and wait for its end. Return whether it ended in time."""
    pid, started = process
    deadline = time.monotonic() + limit_s
    try:
        _send(pid, started, number)
    except OSError:  # it has just ended, or is not ours to end
        pass
    while alive(pid, started):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    reap(process)
    return True


def _send(pid: int, started: int, number: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old Python or kernel, or it has ended
        if alive(pid, started):
            os.kill(pid, number)
        return
    try:
        if alive(pid, started):  # after opening, so that what is open is that very process
            import signal

            signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def reap(process: tuple[int, int]) -> None:
    """Reap this very process, if it is a child of ours that has ended.

    Its pid alone may be another child's by now, whose status must not be taken here.
    """
    if began(process[0]) == process[1]:
        try:
            os.waitpid(process[0], os.WNOHANG)
        except ChildProcessError:
            pass


def marked(sandbox_id: str) -> list[int]:
    """Return the processes with this sandbox's marker in their environment, as far as we may read it, without
    ourselves.

    The oldest are first, so the guest comes before the commands that it started. If it were killed after one of them,
    it could still say that this command was killed.
    """
    wanted = f"{MARKER}={sandbox_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as stream:
                if wanted in stream.read().split(b"\0"):
                    found.append((start_time(int(name)), int(name)))
        except OSError:  # ended meanwhile, or another user's
            continue
    return [pid for started, pid in sorted(found) if started]


def kill_marked(sandbox_id: str) -> bool:
    """Send SIGKILL to all processes with the marker until none is found. Return False if some are left (best
    effort)."""
    clean = 0
    for _ in range(_ROUNDS):
        pids = marked(sandbox_id)
        clean = 0 if pids else clean + 1
        if clean == _CLEAN_ROUNDS:  # one look may miss what forked behind it
            return True
        for pid in pids:
            try:
                os.kill(pid, 9)
            except OSError:
                pass
        if pids:
            time.sleep(_PAUSE_S)
    return False
