"""Which processes a command has started, by /proc: its session, its descendants, and orphans that carry its mark."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "HERMES_COMMAND"
"""The environment variable that every command, and so whatever it starts, carries: the command's id."""

ALL_SIGNALS = tuple(
    number
    for number in range(1, signal.SIGRTMIN)
    if number not in (signal.SIGKILL, signal.SIGSTOP) and number < 32  # those above are the C library's own
)
"""The signals that can be handled or ignored, real-time ones left out."""


class Process:
    """What /proc says of one living process: its parent, its session, and when it began (in clock ticks)."""

    __slots__ = ("parent", "session", "start")

    def __init__(self, parent: int, session: int, start: int) -> None:
        self.parent = parent
        self.session = session
        self.start = start


def living() -> dict[int, Process]:
    """Return every visible process that still runs."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = _look_at(name)
            if process is not None:
                table[int(name)] = process
    return table


def start_of(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot; 0 if unknown."""
    fields = _fields(str(pid))
    return int(fields[19]) if fields else 0


def _look_at(name: str) -> Process | None:
    fields = _fields(name)
    if not fields:
        return None
    # A main thread that has ended is shown as a zombie even while other threads run.
    if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
        return None
    return Process(int(fields[1]), int(fields[3]), int(fields[19]))


def _fields(name: str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (the state) on."""
    try:
        file = os.open("/proc/%s/stat" % name, os.O_RDONLY | os.O_CLOEXEC)  # a third less than `open` for all of /proc
        try:
            return os.read(file, 4096).rsplit(b")", 1)[1].split()
        finally:
            os.close(file)
    except (OSError, IndexError):
        return []


def mark_of(pid: int) -> str | None:
    """Return a process's mark; None if it has none, or its environment can't be read."""
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


def family(leader: int, start: int, adopted: Callable[[int, Process], bool]) -> list[int]:
    """Return the living processes of the leader's session, its descendants, and descendants of those in `adopted`.

    The oldest come first, so that a signal reaches a shell before its child; else it would report the child's end.

    Args:
        start: when the leader began; a later process with its pid is another one. 0 if it can't have ended.
        adopted: `adopted(pid, process)` is asked about our own children: as we are subreaper, what has left its
            session and lost its parent is one of them.
    """
    me = os.getpid()
    table = living()
    reused = start and leader in table and table[leader].start != start
    session = None if reused else leader
    found = set()
    for pid, process in table.items():
        if process.session == session or (process.parent == me and adopted(pid, process)):
            found.add(pid)
    if not reused and leader in table:
        found.add(leader)
    grown = found
    while grown:
        grown = {pid for pid, process in table.items() if process.parent in grown and pid not in found}
        found |= grown
    found.discard(me)
    return sorted(found, key=lambda pid: (table[pid].start, pid))


def have_socket(inode: int) -> bool:
    """Return whether a visible process has the socket with this inode open. The newest are looked at first."""
    wanted = "socket:[%d]" % inode
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        folder = "/proc/%d/fd/" % pid
        try:
            names = os.listdir(folder)
        except OSError:  # it has ended, or it is hidden even from us
            continue
        for name in names:
            try:
                if os.readlink(folder + name) == wanted:
                    return True
            except OSError:
                continue
    return False


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone, or not ours, is no error."""
    try:
        os.kill(pid, number)
    except OSError:
        pass
