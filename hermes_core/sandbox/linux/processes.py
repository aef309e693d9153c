"""Finds the processes that a command has started, in /proc: its session, its descendants, and orphans with its mark."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "HERMES_COMMAND"
"""The environment variable with a command's id, its mark. Whatever the command starts inherits it."""

ALL_SIGNALS = tuple(
    number
    for number in range(1, signal.SIGRTMIN)
    if number not in (signal.SIGKILL, signal.SIGSTOP) and number < 32  # those above are the C library's own
)
"""The signals that can be handled or ignored, without the real-time signals."""


class Process:
    """One living process: the pid of its parent, its session id, and its start time in clock ticks since the boot."""

    __slots__ = ("parent", "session", "start")

    def __init__(self, parent: int, session: int, start: int) -> None:
        self.parent = parent
        self.session = session
        self.start = start


def list_processes() -> dict[int, Process]:
    """Return the living processes in /proc by pid."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = _read_process(name)
            if process is not None:
                table[int(name)] = process
    return table


def start_of(pid: int) -> int:
    """Return the start time of a process in clock ticks since the boot; 0 if unknown."""
    fields = _fields(str(pid))
    return int(fields[19]) if fields else 0


def _read_process(name: str) -> Process | None:
    fields = _fields(name)
    if not fields:
        return None
    # A process whose main thread has ended is shown as a zombie even if other threads run. Field 17 counts threads.
    if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
        return None
    return Process(int(fields[1]), int(fields[3]), int(fields[19]))


def _fields(name: str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (the state) on."""
    try:
        file = os.open("/proc/%s/stat" % name, os.O_RDONLY | os.O_CLOEXEC)  # for all of /proc, a third faster than open
        try:
            return os.read(file, 4096).rsplit(b")", 1)[1].split()
        finally:
            os.close(file)
    except (OSError, IndexError):
        return []


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None if it has none, or its environment can't be read."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    start = MARK.encode("ascii") + b"="
    for variable in variables:
        if variable.startswith(start):
            return variable[len(start) :].decode("utf-8", "replace")
    return None


def family(leader: int, start: int, is_orphan: Callable[[int, Process], bool]) -> list[int]:
    """Return the living processes that a command has started: its leader, the leader's session, the orphans that
    `is_orphan` accepts, and all descendants of these.

    The oldest come first, so that a signal reaches a shell before its child. Otherwise, the shell would report the
    child's end.

    Args:
        start: the start time of the leader, in clock ticks. A process with the same pid and another start time is not
            the leader. 0 if the leader can't have ended.
        is_orphan: `is_orphan(pid, process)` is called for each child of ours. As we are subreaper, a process that left
            the session and lost its parent is our child.
    """
    me = os.getpid()
    table = list_processes()
    reused = start and leader in table and table[leader].start != start
    session = None if reused else leader
    members = set()
    for pid, process in table.items():
        if process.session == session or (process.parent == me and is_orphan(pid, process)):
            members.add(pid)
    if not reused and leader in table:
        members.add(leader)
    generation = members
    while generation:
        generation = {pid for pid, process in table.items() if process.parent in generation and pid not in members}
        members |= generation
    members.discard(me)
    return sorted(members, key=lambda pid: (table[pid].start, pid))


def has_open_socket(inode: int) -> bool:
    """Return whether a process in /proc has the socket with this inode open. The newest are tried first."""
    link = "socket:[%d]" % inode
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        folder = "/proc/%d/fd/" % pid
        try:
            names = os.listdir(folder)
        except OSError:  # it has ended, or it is hidden even from us
            continue
        for name in names:
            try:
                if os.readlink(folder + name) == link:
                    return True
            except OSError:
                continue
    return False


def send_signal(pid: int, number: int) -> None:
    """Send a signal. A process that is gone, or that we may not signal, is no error."""
    try:
        os.kill(pid, number)
    except OSError:
        pass
