"""Background processes of a slot: their exit codes and the ends of their logs outlive them."""

from __future__ import annotations

import time

from .output import Rolling
from .request import Refusal
from .wire import WINDOW

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .execution import Execution
    from .request import Header, Request
    from .requests import Requests

MAX_RUNNING = 64
MAX_ENDED = 64


class Process:
    """What is known of a background process besides its execution."""

    def __init__(self, execution: Execution, command: str, cwd: str) -> None:
        self.execution = execution
        self.waiters: list[Callable[[], object]] = []
        self._command = command
        self._cwd = cwd
        self._started = time.time()

    def describe(self) -> dict[str, Any]:
        """The fields of a ProcessStatus."""
        execution = self.execution
        fields = execution.outcome() if execution.ended else {}
        fields.update(
            id=execution.id,
            command=self._command,
            cwd=self._cwd,
            pid=execution.pid,
            started=self._started,
            running=not execution.ended,
            bytes=execution.sinks[0].total,
            uptime=execution.duration if execution.ended else time.monotonic() - execution.began,
        )
        return fields


class Background:
    """The operations on background processes, each of which answers its request. They raise Refusal."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def start(self, request: Request, header: Header, body: bytes) -> None:
        """Start one; answered once it has its pid."""
        slot = self._requests.slot(header)
        ended = [identity for identity, process in slot.background.items() if process.execution.ended]
        if len(slot.background) - len(ended) >= MAX_RUNNING:
            raise Refusal("command", "too_many", "%d background processes run already" % MAX_RUNNING)
        for identity in ended[: max(0, len(ended) - MAX_ENDED + 1)]:
            del slot.background[identity]

        def on_end(execution: Execution) -> None:
            if execution.error is not None:
                slot.background.pop(execution.id, None)
                self._requests.refuse(request, execution.error)
            else:
                self._requests.reply(request, {"process": process.describe()})
            waiters, process.waiters = process.waiters, []
            for answer in waiters:
                answer()

        execution = self._requests.prepare(request, header, "ring", True, on_end)
        process = Process(execution, header.get("label", ""), self._requests.directory(slot, header))
        execution.on_start = lambda: self._requests.reply(request, {"process": process.describe()})
        slot.background[execution.id] = process
        self._requests.launch(execution, dict(header, input=True), body)

    def processes(self, request: Request, header: Header, _body: bytes) -> None:
        """All of a slot, oldest first."""
        processes = [process.describe() for process in self._requests.slot(header).background.values()]
        self._requests.reply(request, {"processes": processes})

    def poll(self, request: Request, header: Header, _body: bytes) -> None:
        """One of them."""
        self._requests.reply(request, {"process": self._process(header).describe()})

    def log(self, request: Request, header: Header, _body: bytes) -> None:
        """Its output from an offset on."""
        ring = self._process(header).execution.sinks[0]
        assert isinstance(ring, Rolling)
        data, start = ring.read(header["offset"], header["limit"])
        dropped = max(0, start - header["offset"]) if header["offset"] < ring.start else 0
        self._requests.reply(request, {"offset": start, "total": ring.total, "dropped": dropped}, data)

    def wait(self, request: Request, header: Header, _body: bytes) -> None:
        """Answered at its end, or after `timeout` seconds."""
        process = self._process(header)
        self._answer_at_end(request, process)
        if header.get("timeout") is not None and request.reply is None:
            request.timer = self._requests.later(header["timeout"], lambda: self._answer(request, process))

    def write(self, request: Request, header: Header, body: bytes) -> None:
        """Write to its standard input as much as there is room for."""
        execution = self._process(header).execution
        stdin = execution.stdin
        if execution.ended or stdin is None or stdin.closed:
            raise Refusal("command", "ended", "the process has ended, or its standard input is closed")
        taken = body[: max(0, WINDOW - stdin.pending())]
        stdin.add(stdin.received, taken, bool(header.get("eof")) and len(taken) == len(body))
        self._requests.reply(request, {"taken": len(taken)})

    def kill(self, request: Request, header: Header, _body: bytes) -> None:
        """End it; answered at its end."""
        process = self._process(header)
        self._answer_at_end(request, process)
        process.execution.stop(header["grace"])

    def _process(self, header: Header) -> Process:
        process = self._requests.slot(header).background.get(header["process"])
        if process is None:
            raise Refusal("command", "unknown_process", "no process %r in this slot" % header["process"])
        return process

    def _answer(self, request: Request, process: Process) -> None:
        self._requests.reply(request, {"process": process.describe()})
        if request.on_cancel is not None:
            request.on_cancel()

    def _answer_at_end(self, request: Request, process: Process) -> None:
        def answer() -> None:
            self._answer(request, process)

        def give_up() -> None:
            if answer in process.waiters:
                process.waiters.remove(answer)

        if process.execution.ended:
            answer()
        else:
            process.waiters.append(answer)
            request.on_cancel = give_up
