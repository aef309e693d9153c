"""The operations of the driver's requests on slots: opening and recycling them, running commands, and forwards."""

from __future__ import annotations

import errno
import os

from ..linux.output import HeadTail
from . import terminal
from .execution import Execution, Stdio
from .forward import Carrier, ForwardListener
from .slot import GuestSlot
from .streams import Spool
from .wire import Refusal
from .workspace import PREPARE

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from .request import Error, GuestRequest, Header, Operation, RequestTable
    from .site import Site

_LONGEST_ARGUMENT = 100 << 10
"""Maximum number of bytes of an argument; the kernel's limit is 128 KiB. A longer script is read from descriptor 9,
which is closed before the script's commands run."""
_CANCEL_GRACE_S = 5.0
"""The time for a cancelled file operation to remove its temporary file."""
_LONG_SCRIPT = 'eval "exec 9<&-\n$(cat <&9)"'


class Operations:
    """The operations on slots. Each answers its request, or raises Refusal."""

    def __init__(self, site: Site, slots: dict[int, GuestSlot], requests: RequestTable) -> None:
        self.requests = requests
        self._site = site
        self._slots = slots

    def by_name(self) -> dict[str, Operation]:
        """Return the operations by name."""
        names = ("open_slot", "recycle", "check_disk", "exec", "listen", "carry")
        return {name: getattr(self, "_" + name) for name in names}

    def slot(self, header: Header) -> GuestSlot:
        """Return the slot that a request names. Raises Refusal."""
        slot = self._slots.get(header["slot"])
        if slot is None:
            raise Refusal("infra", "no_slot", "the slot %r was never opened" % header["slot"])
        return slot

    def _open_slot(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        index = header["slot"]
        count = self._site.config["slots"]
        if index != PREPARE and not 0 <= index < count:
            raise Refusal("infra", "no_slot", "the sandbox has %d slots" % count)
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = GuestSlot(self._site, index)
        slot.open(self._replier(request, {"workspace": slot.workspace.path}))

    def _recycle(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        wipe = bool(header["wipe"])
        self.slot(header).recycle(wipe, self._replier(request, {}), forget=wipe or bool(header.get("forget")))

    def _check_disk(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        self.requests.reply(request, {"crowded": self.slot(header).is_crowded})

    def _replier(self, request: GuestRequest, result: Header) -> Callable[[Error | None], None]:
        """Return a function that answers `request` with the error in its argument, or with `result` if that is None."""

        def reply(error: Error | None) -> None:
            self.requests.reply(request, result if error is None else {"error": error})

        return reply

    def _exec(self, request: GuestRequest, header: Header, body: bytes) -> None:
        mode, merge = header.get("mode", "capture"), bool(header.get("merge"))
        slot = self.slot(header)
        execution = self.prepare(slot, request, header, mode, merge, lambda each: self._reply_execution(request, each))
        self.launch(slot, execution, header, body)
        if header.get("timeout") is not None and not execution.ended:
            execution.limit_time(header["timeout"], header.get("grace", 2.0))

    def prepare(
        self,
        slot: GuestSlot,
        request: GuestRequest,
        header: Header,
        mode: str,
        merge: bool,
        on_end: Callable[[Execution], object],
    ) -> Execution:
        """Make a command of the slot, to be launched. `on_end` is called when it has ended. Raises Refusal, OSError."""
        if slot.is_broken:
            raise Refusal(**slot.error)

        def finish(execution: Execution) -> None:
            del slot.executions[execution.id]
            on_end(execution)

        rows_and_columns = header.get("pty")
        stdio = Stdio(
            mode=mode,
            limit=header.get("limit", 1 << 20),
            merge=merge,
            pty=None if rows_and_columns is None else (int(rows_and_columns[0]), int(rows_and_columns[1])),
            # The content of a file is not masked, because the agent may write it back.
            masked=() if "builtin" in header else self._site.masked,
        )
        execution = Execution(self._site, slot, request.identity, stdio, finish)
        slot.executions[execution.id] = request.execution = execution
        return execution

    def launch(self, slot: GuestSlot, execution: Execution, header: Header, body: bytes) -> None:
        """Start a command. `body` holds the script, if there is one, and then the beginning of its input."""
        if "builtin" in header:
            execution.cancel_grace = _CANCEL_GRACE_S
        if header.get("spool"):
            try:
                execution.spool = Spool(slot.workspace.spool_file(), slot.uid)
            except OSError as error:
                code = "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "failed"
                execution.fail({"kind": "command", "code": code, "message": "no file for the output: %s" % error})
                return
        size = header.get("script", 0)
        message, as_file = self._message(slot, header, body[:size])
        slot.spawn(execution, message, bool(header.get("input")), as_file)
        eof = bool(header.get("eof")) or not header.get("input")
        if execution.stdin is not None and (len(body) > size or eof):
            execution.stdin.add(0, body[size:], eof)

    @staticmethod
    def directory(slot: GuestSlot, header: Header) -> str:
        """Return the directory that a command runs in."""
        cwd = header.get("cwd")
        return os.path.join(slot.workspace.path, cwd) if cwd else slot.workspace.path

    def _message(self, slot: GuestSlot, header: Header, script: bytes) -> tuple[Header, bytes]:
        """Return the message for the slot's parent, and the script if it is too long for an argument."""
        message: Header = {"cwd": self.directory(slot, header)}
        if "builtin" in header:
            message.update(builtin=header["builtin"], args=header["args"])
            if header["builtin"] == "clear":
                message["args"] = dict(header["args"], **slot.belongings())
            return message, b""
        env = message["env"] = dict(slot.environment(), **(header.get("env") or {}))
        if "LANG" not in env:
            # Text is UTF-8. With LANG instead of LC_CTYPE, every program would open a dozen files of the locale.
            env.setdefault("LC_CTYPE", "C.UTF-8")
        if header.get("pty") is not None:
            env.setdefault("TERM", terminal.TYPE)
        if "argv" in header:
            message["argv"] = header["argv"]
            return message, b""
        if len(script) <= _LONGEST_ARGUMENT:
            message["argv"] = [self._site.shell, "-c", script.decode("utf-8", "surrogateescape")]
            return message, b""
        message["argv"] = [self._site.shell, "-c", _LONG_SCRIPT]
        return message, script

    # --- forwards ---------------------------------------------------------------------------------------------------

    def _listen(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Open a forward. Its stream carries the port's number. The request is answered when the forward ends."""
        slot = self.slot(header)
        if slot.is_broken:
            raise Refusal(**slot.error)

        def finish(forward: ForwardListener) -> None:
            slot.executions.pop(forward.id, None)
            self.requests.refuse(request, forward.error)

        forward = ForwardListener(self._site.loop, self._site.outlet, request.identity, slot.guard(), finish)
        request.execution = forward
        slot.listen(forward, header["port"])

    def _carry(self, request: GuestRequest, header: Header, _body: bytes) -> None:
        """Carry the next connection to a port. The request is answered when the connection ends."""

        def finish(carrier: Carrier) -> None:
            if carrier.error is not None:
                self.requests.refuse(request, carrier.error)
            else:
                self.requests.reply(request, {"out": [[0, carrier.stream.total, False]]})

        for forward in self.slot(header).executions.values():
            if isinstance(forward, ForwardListener) and forward.port == header["port"]:
                request.execution = forward.carry(request.identity, finish)
                return
        raise Refusal("command", "closed", "the forward is closed")

    # --- answers ----------------------------------------------------------------------------------------------------

    def _reply_execution(self, request: GuestRequest, execution: Execution) -> None:
        if execution.error is not None:
            self.requests.refuse(request, execution.error)
            return
        header = execution.outcome()
        header["out"], body = [], b""
        for sink in execution.sinks:
            data = sink.value() if isinstance(sink, HeadTail) else b""
            truncated = isinstance(sink, HeadTail) and sink.truncated
            header["out"].append([len(data), sink.total, truncated])
            body += data
        self.requests.reply(request, header, body)
