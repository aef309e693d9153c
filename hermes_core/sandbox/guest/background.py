"""Background processes of a slot. Their exit codes and the last parts of their logs can be read after their ends."""

from __future__ import annotations

import os
import time

from ..linux.output import Rolling
from .wire import WINDOW, Refusal

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .execution import Execution
    from .operations import Operations
    from .request import GuestRequest, Header, Operation
    from .slot import GuestSlot

    Answer = Callable[[], object]

MOST = 64
"""Maximum number of processes of a slot that are listed, running or ended."""
KEEP_S = 1800.0
"""For how long after its end a process is listed."""


class BackgroundProcess:
    """A background process: its execution, and the requests that wait for its output or its end."""

    def __init__(self, slot: GuestSlot, execution: Execution, command: str, cwd: str) -> None:
        self.slot = slot
        self.execution = execution
        self.id = "proc_" + os.urandom(6).hex()
        self.at_end: list[Answer] = []
        self.at_output: list[Answer] = []
        self.ended = 0.0
        self.left = 0
        self._command = command
        self._cwd = cwd
        self._started = time.time()

    @property
    def log(self) -> Rolling:
        """Return the last part of the process's output."""
        ring = self.execution.sinks[0]
        assert isinstance(ring, Rolling)
        return ring

    def wake(self, waiting: list[Answer]) -> None:
        """Call all functions in `waiting`, and empty the list."""
        answers, waiting[:] = list(waiting), []
        for answer in answers:
            answer()

    def describe(self) -> dict[str, Any]:
        """Return the fields of a ProcessStatus."""
        execution = self.execution
        fields = execution.outcome() if execution.ended else {}
        fields.update(
            id=self.id,
            command=self._command,
            cwd=self._cwd,
            pid=execution.pid,
            started=self._started,
            running=not execution.ended,
            bytes=self.log.total,
            uptime=execution.duration if execution.ended else time.monotonic() - execution.began,
            left=self.left,
            pty=execution.pty,
            spool=None if execution.spool is None else execution.spool.path,
        )
        return fields


class BackgroundProcesses:
    """The operations on background processes. Each answers its request, or raises Refusal."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._requests = operations.requests
        self._of_slots: dict[int, dict[str, BackgroundProcess]] = {}

    def by_name(self) -> dict[str, Operation]:
        """Return the operations by name."""
        names = ("start", "processes", "poll", "log", "wait", "write", "resize", "kill")
        return {name: getattr(self, name) for name in names}

    def start(self, request: GuestRequest, header: Header, body: bytes) -> None:
        """Start a process. Answer when it has a pid."""
        slot = self._operations.slot(header)
        processes = self._processes_of(slot)
        _make_room(processes)

        def on_end(execution: Execution) -> None:
            process.ended = time.monotonic()
            if execution.error is not None:
                processes.pop(process.id, None)
                self._requests.refuse(request, execution.error)
            else:
                self._requests.reply(request, {"process": process.describe()})
            process.wake(process.at_output)
            process.wake(process.at_end)

        execution = self._operations.prepare(slot, request, header, "ring", True, on_end)
        process = BackgroundProcess(slot, execution, header.get("label", ""), self._operations.directory(slot, header))
        execution.on_start = lambda: self._requests.reply(request, {"process": process.describe()})
        execution.on_output = lambda: process.wake(process.at_output)
        processes[process.id] = process
        self._operations.launch(slot, execution, dict(header, input=True), body)

    def processes(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Answer with all processes of a slot, oldest first."""
        processes = self._processes_of(self._operations.slot(header))
        _forget_old(processes)
        self._requests.reply(request, {"processes": [process.describe() for process in processes.values()]})

    def poll(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Answer with the status of one process."""
        self._requests.reply(request, {"process": self._process(header).describe()})

    def log(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Answer with the log from an offset on. With `wait`, wait up to so many seconds for output or the end."""
        process = self._process(header)
        offset, limit, wait = header["offset"], header["limit"], header.get("wait")

        def answer() -> None:
            data, start = process.log.read(offset, limit)
            dropped = max(0, process.log.start - offset)
            running = not process.execution.ended
            reply = {"offset": start, "total": process.log.total, "dropped": dropped, "running": running}
            self._requests.reply(request, reply, data)

        if wait and process.log.total <= offset and not process.execution.ended:
            self._answer_later(request, process.at_output, answer, wait)
        else:
            answer()

    def wait(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Answer when the process ends, or after `timeout` seconds."""
        self._answer_at_end(request, self._process(header), header.get("timeout"))

    def write(self, request: GuestRequest, header: Header, body: bytes) -> None:
        """Write to the standard input of a process, as much as there is room for. Answer with the number of bytes."""
        execution = self._process(header).execution
        stdin = execution.stdin
        if execution.ended or stdin is None or stdin.is_closed:
            raise Refusal("command", "ended", "the process has ended, or its standard input is closed")
        data = body[: max(0, WINDOW - stdin.pending())]
        stdin.add(stdin.received, data, bool(header.get("eof")) and len(data) == len(body))
        self._requests.reply(request, {"taken": len(data)})

    def resize(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Resize the terminal of a process."""
        process = self._process(header)
        if process.execution.pty is None:
            raise Refusal("command", "no_pty", "the process has no terminal")
        if process.execution.ended:
            raise Refusal("command", "ended", "the process has ended, and its terminal with it")
        process.execution.resize(*header["pty"])
        self._requests.reply(request, {"process": process.describe()})

    def kill(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """End a process, or, if it has ended, the processes that it left running. Answer when they have ended."""
        process = self._process(header)
        if process.execution.ended:
            self._sweep(request, process, header["grace"])
        else:
            self._answer_at_end(request, process, None)
            process.execution.stop(header["grace"])

    def _sweep(self, request: GuestRequest, process: BackgroundProcess, grace: float) -> None:
        def answer(count: int) -> None:
            process.left += count
            self._requests.reply(request, {"process": process.describe()})

        process.slot.sweep(process.execution.id, grace, answer)

    def _processes_of(self, slot: GuestSlot) -> dict[str, BackgroundProcess]:
        """Return the listed processes of a slot by id. Recycling the slot empties the dictionary."""
        if slot.index not in self._of_slots:
            processes = self._of_slots[slot.index] = {}
            slot.on_forget = processes.clear
        return self._of_slots[slot.index]

    def _process(self, header: Header) -> BackgroundProcess:
        processes = self._processes_of(self._operations.slot(header))
        _forget_old(processes)
        process = processes.get(header["process"])
        if process is None:
            raise Refusal("command", "unknown_process", "no process %r in this slot" % header["process"])
        return process

    def _answer_at_end(self, request: GuestRequest, process: BackgroundProcess, limit: float | None) -> None:
        def answer() -> None:
            self._requests.reply(request, {"process": process.describe()})

        if process.execution.ended:
            answer()
        else:
            self._answer_later(request, process.at_end, answer, limit)

    def _answer_later(self, request: GuestRequest, waiting: list[Answer], answer: Answer, limit: float | None) -> None:
        """Answer when the list `waiting` is woken, or after `limit` seconds."""

        def give_up() -> None:
            if answer in waiting:
                waiting.remove(answer)

        def too_late() -> None:
            give_up()
            answer()

        waiting.append(answer)
        request.on_cancel = give_up
        if limit is not None:
            request.timer = self._requests.later(limit, too_late)


def _forget_old(processes: dict[str, BackgroundProcess]) -> None:
    """Remove the processes that ended long ago."""
    now = time.monotonic()
    for process in list(processes.values()):
        if process.execution.ended and now - process.ended > KEEP_S:
            del processes[process.id]


def _make_room(processes: dict[str, BackgroundProcess]) -> None:
    """Make room for another process by removing those that ended first. Raises Refusal if too many are running."""
    _forget_old(processes)
    ended = [process for process in processes.values() if process.execution.ended]
    for process in sorted(ended, key=lambda each: each.ended)[: max(0, len(processes) - MOST + 1)]:
        del processes[process.id]
    if len(processes) >= MOST:
        raise Refusal("command", "too_many", "%d background processes run already" % MOST)
