"""The driver's requests, each done once and answered as often as it is asked: commands, processes, slots."""

from __future__ import annotations

import errno
import os

from . import terminal
from .background import Background
from .execution import Execution
from .output import HeadTail
from .request import Refusal, Request
from .slot import Slot
from .streams import Spool
from .workspace import PREPARE

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from .daemon import Daemon
    from .loop import Timer
    from .request import Error, Header

MAX_REQUESTS = 8192
_LONGEST_ARGUMENT = 100 << 10
"""The kernel takes 128 KiB: a longer script comes in by descriptor 9, which is closed before its first line."""
_CANCEL_GRACE_S = 5.0
"""For a cancelled file operation to take its temporary file away."""
_LONG_SCRIPT = 'eval "exec 9<&-\n$(cat <&9)"'


class Requests:
    """Keeps every request until the driver has confirmed its answer."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._requests: dict[str, Request] = {}
        background = Background(self)
        self._operations: dict[str, Callable[[Request, Header, bytes], object]] = {
            "open_slot": self._open_slot,
            "recycle": self._recycle,
            "exec": self._exec,
            "start": background.start,
            "processes": background.processes,
            "poll": background.poll,
            "log": background.log,
            "wait": background.wait,
            "write": background.write,
            "resize": background.resize,
            "kill": background.kill,
        }

    def known(self) -> list[str]:
        """The ids of all requests that are not confirmed yet."""
        return list(self._requests)

    def hold_streams(self) -> None:
        """There is a new channel to the same driver."""
        for request in self._requests.values():
            if request.execution is not None and request.execution.stream is not None:
                request.execution.stream.hold()

    def forget(self) -> None:
        """Whoever asked is gone for good: nobody will hear the answers. Background processes that have begun stay."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if request.reply is None:
                self._cancel(request)

    def handle(self, header: Header, body: bytes) -> None:
        """Do, repeat or steer one request."""
        op = header.get("op")
        if op == "ack":
            for identity in header["ids"]:
                request = self._requests.get(identity)
                if request is not None and request.reply is not None:
                    del self._requests[identity]
            return
        identity = header["id"]
        request = self._requests.get(identity)
        if op in ("in", "credit", "cancel"):
            if request is not None:
                self._steer(str(op), request, header, body)
        elif request is not None:
            self._again(request, header)
        else:
            request = self._requests[identity] = Request(identity)
            self._begin(request, header, body)

    def reply(self, request: Request, header: Header, data: bytes = b"") -> None:
        """Answer, once; said again until the driver confirms it."""
        if request.reply is not None:
            return
        if request.timer is not None:
            request.timer.cancel()
        header = dict(header, ev="done", id=request.identity)
        request.reply = (header, data)
        if self._requests.get(request.identity) is request:
            self._daemon.send(header, data)

    def refuse(self, request: Request, error: Error) -> None:
        """Answer with an error."""
        self.reply(request, {"error": error})

    def slot(self, header: Header) -> Slot:
        """The slot that a request names. Raises Refusal."""
        slot = self._daemon.slots.get(header["slot"])
        if slot is None:
            raise Refusal("infra", "no_slot", "the slot %r was never opened" % header["slot"])
        return slot

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call once, in so many seconds."""
        return self._daemon.loop.later(seconds, call)

    # --- the life of a request --------------------------------------------------------------------------------------

    def _begin(self, request: Request, header: Header, body: bytes) -> None:
        op = str(header.get("op"))
        operation = self._operations.get(op)
        try:
            if len(self._requests) > MAX_REQUESTS:
                raise Refusal("infra", "busy", "too many requests under way")
            if operation is None:
                raise Refusal("infra", "protocol", "unknown operation %r" % op)
            operation(request, header, body)
        except Refusal as refusal:
            self._fail(request, refusal.error)
        except (KeyError, TypeError, ValueError) as error:
            message = "bad request %r: %s: %s" % (op, type(error).__name__, error)
            self._fail(request, {"kind": "infra", "code": "protocol", "message": message})
        except OSError as error:
            self._fail(request, {"kind": "infra", "code": "resources", "message": "%r failed: %s" % (op, error)})

    def _fail(self, request: Request, error: Error) -> None:
        if request.execution is not None:
            request.execution.failed(error)
        self.refuse(request, error)

    def _again(self, request: Request, header: Header) -> None:
        """The driver asks again after a lost channel: repeat what it may have missed."""
        execution = request.execution
        if execution is not None and execution.stream is not None:
            execution.stream.resend(header.get("have", 0))
            execution.resume()
        if request.reply is not None:
            self._daemon.send(*request.reply)

    def _steer(self, op: str, request: Request, header: Header, body: bytes) -> None:
        execution = request.execution
        if op == "cancel":
            self._cancel(request)
        elif execution is None or execution.ended:
            return
        elif op == "in" and execution.stdin is not None:
            execution.stdin.add(header["off"], body, header.get("eof", False))
        elif op == "credit" and execution.stream is not None:
            execution.stream.confirm(header["off"])
            execution.resume()

    def _cancel(self, request: Request) -> None:
        """Nobody wants the answer any more: end what was begun for it, even if the answer is on its way."""
        if request.execution is not None:
            request.execution.stop(request.execution.cancel_grace)
        elif request.on_cancel is not None and request.reply is None:
            request.on_cancel()
            self.refuse(request, {"kind": "command", "code": "cancelled", "message": "cancelled"})

    # --- slots and commands -----------------------------------------------------------------------------------------

    def _open_slot(self, request: Request, header: Header, _body: bytes) -> None:
        index = header["slot"]
        count = self._daemon.config["slots"]
        if index != PREPARE and not 0 <= index < count:
            raise Refusal("infra", "no_slot", "the sandbox has %d slots" % count)
        slot = self._daemon.slots.get(index)
        if slot is None:
            slot = self._daemon.slots[index] = Slot(self._daemon, index)
        slot.open(self._settles(request, {"workspace": slot.workspace.path}))

    def _recycle(self, request: Request, header: Header, _body: bytes) -> None:
        wipe = bool(header["wipe"])
        self.slot(header).recycle(wipe, self._settles(request, {}), forget=wipe or bool(header.get("forget")))

    def _settles(self, request: Request, result: Header) -> Callable[[Error | None], None]:
        def settle(error: Error | None) -> None:
            self.reply(request, result if error is None else {"error": error})

        return settle

    def _exec(self, request: Request, header: Header, body: bytes) -> None:
        mode, merge = header.get("mode", "capture"), bool(header.get("merge"))
        execution = self.prepare(request, header, mode, merge, lambda ended: self._reply_execution(request, ended))
        self.launch(execution, header, body)
        if header.get("timeout") is not None and not execution.ended:
            execution.limit_time(header["timeout"], header.get("grace", 2.0))

    def prepare(
        self, request: Request, header: Header, mode: str, merge: bool, on_end: Callable[[Execution], object]
    ) -> Execution:
        """A command of the request's slot that is still to be launched. Raises Refusal, OSError."""
        slot = self.slot(header)
        if slot.broken:
            raise Refusal(**slot.error)

        def ended(execution: Execution) -> None:
            del slot.executions[execution.id]
            on_end(execution)

        rows_and_columns = header.get("pty")
        pty = None if rows_and_columns is None else (int(rows_and_columns[0]), int(rows_and_columns[1]))
        limit = header.get("limit", 1 << 20)
        masked = () if "builtin" in header else self._daemon.masked  # a file's content is data, to be written back
        execution = Execution(slot, request.identity, mode, limit, merge, ended, pty, masked)
        slot.executions[execution.id] = request.execution = execution
        return execution

    def launch(self, execution: Execution, header: Header, body: bytes) -> None:
        """Start a command; `body` is the script, if there is one, and then the first of the input."""
        slot = execution.slot
        if "builtin" in header:
            execution.cancel_grace = _CANCEL_GRACE_S
        if header.get("spool"):
            try:
                execution.spool = Spool(slot.workspace.spool_file(), slot.uid)
            except OSError as error:
                code = "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "failed"
                execution.failed({"kind": "command", "code": code, "message": "no file for the output: %s" % error})
                return
        size = header.get("script", 0)
        message, as_file = self._message(slot, header, body[:size])
        slot.spawn(execution, message, bool(header.get("input")), as_file)
        eof = bool(header.get("eof")) or not header.get("input")
        if execution.stdin is not None and (len(body) > size or eof):
            execution.stdin.add(0, body[size:], eof)

    @staticmethod
    def directory(slot: Slot, header: Header) -> str:
        """Where a command is to run."""
        cwd = header.get("cwd")
        return os.path.join(slot.workspace.path, cwd) if cwd else slot.workspace.path

    def _message(self, slot: Slot, header: Header, script: bytes) -> tuple[Header, bytes]:
        """What the slot's parent is told, and a script for its descriptor."""
        message: Header = {"cwd": self.directory(slot, header)}
        if "builtin" in header:
            message.update(builtin=header["builtin"], args=header["args"])
            if header["builtin"] == "clear":
                message["args"] = dict(header["args"], **slot.belongings())
            return message, b""
        env = message["env"] = dict(slot.environment(), **(header.get("env") or {}))
        if "LANG" not in env:
            # Text is UTF-8. By LANG every program would open a dozen files, for what C.UTF-8 has in common with C.
            env.setdefault("LC_CTYPE", "C.UTF-8")
        if header.get("pty") is not None:
            env.setdefault("TERM", terminal.TYPE)
        if "argv" in header:
            message["argv"] = header["argv"]
            return message, b""
        if len(script) <= _LONGEST_ARGUMENT:
            message["argv"] = [self._daemon.shell, "-c", script.decode("utf-8", "surrogateescape")]
            return message, b""
        message["argv"] = [self._daemon.shell, "-c", _LONG_SCRIPT]
        return message, script

    def _reply_execution(self, request: Request, execution: Execution) -> None:
        if execution.error is not None:
            self.refuse(request, execution.error)
            return
        header = execution.outcome()
        header["out"], kept = [], b""
        for sink in execution.sinks:
            data = sink.value() if isinstance(sink, HeadTail) else b""
            truncated = isinstance(sink, HeadTail) and sink.truncated
            header["out"].append([len(data), sink.total, truncated])
            kept += data
        self.reply(request, header, kept)
