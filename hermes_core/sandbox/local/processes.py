"""Processes of this host. They are identified by pid and start time, because pids are reused. Light imports only."""
# pathlib is slow to import
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import time

MARKER = "HERMES_SANDBOX_ID"
"""The environment variable with the sandbox id, which all programs in a sandbox have. At `shared`, they are found by
this variable."""

_ROUNDS, _PAUSE_S, _CLEAN_ROUNDS = 100, 0.01, 2


def start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since the boot; 0 if it has ended, or is a zombie."""
    fields = _fields(pid)
    return 0 if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def began(pid: int) -> int:
    """Return the start time of a process, also of a zombie, in clock ticks since the boot; 0 if there is none."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def _fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (the state) on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()  # the second field, the name, may contain anything
    except OSError:
        return []


def alive(pid: int, started: int) -> bool:
    """Return whether the process with this pid and start time runs."""
    return started > 0 and start_time(pid) == started


def stop(process: tuple[int, int], number: int, limit_s: float) -> bool:
    """Send a signal to a process, given as (pid, start time), and wait for its end. Return whether it ended in time."""
    pid, started = process
    deadline = time.monotonic() + limit_s
    try:
        _send(pid, started, number)
    except OSError:  # it has just ended, or we may not signal it
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
    except (AttributeError, OSError):  # an old Python or kernel, or the process has ended
        if alive(pid, started):
            os.kill(pid, number)
        return
    try:
        if alive(pid, started):  # checked after opening, so the handle is that of this process
            import signal

            signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def reap(process: tuple[int, int]) -> None:
    """Reap a process, given as (pid, start time), if it is our child and has ended.

    Another child may have its pid by now, and that must not be reaped here.
    """
    if began(process[0]) == process[1]:
        try:
            os.waitpid(process[0], os.WNOHANG)
        except ChildProcessError:
            pass


def find_marked(sandbox_id: str) -> list[int]:
    """Return the pids of other processes with this sandbox's marker in their environment, if we may read it.

    The oldest come first, so the guest before its commands. If a command were killed first, the guest could still
    report its end.
    """
    variable = f"{MARKER}={sandbox_id}".encode()
    marked = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as stream:
                if variable in stream.read().split(b"\0"):
                    marked.append((start_time(int(name)), int(name)))
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
    return [pid for started, pid in sorted(marked) if started]


def kill_marked(sandbox_id: str) -> bool:
    """Send SIGKILL to all processes with the marker until none is found. Return False if some are left."""
    clean = 0
    for _ in range(_ROUNDS):
        pids = find_marked(sandbox_id)
        clean = 0 if pids else clean + 1
        if clean == _CLEAN_ROUNDS:  # one look may miss a process that forks meanwhile
            return True
        for pid in pids:
            try:
                os.kill(pid, 9)
            except OSError:
                pass
        if pids:
            time.sleep(_PAUSE_S)
    return False
