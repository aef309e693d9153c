"""The driver's requests: each is carried out once, and answered as often as the driver repeats it."""

from __future__ import annotations

from .wire import Refusal

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .connection import Outlet
    from .execution import Execution
    from .forward import Carrier, ForwardListener
    from .loop import Loop, Timer

    Header = dict[str, Any]
    Error = dict[str, str]
    Operation = Callable[["GuestRequest", Header, bytes], object]

MAX_REQUESTS = 8192


class GuestRequest:
    """One request, by its id. When the driver repeats it, only its answer is repeated."""

    __slots__ = ("execution", "identity", "on_cancel", "reply", "timer")

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.execution: Execution | ForwardListener | Carrier | None = None
        self.timer: Timer | None = None
        self.on_cancel: Callable[[], object] | None = None
        self.reply: tuple[Header, bytes] | None = None


class RequestTable:
    """Keeps every request until the driver has confirmed its answer. `operations` carry them out, by name."""

    def __init__(self, outlet: Outlet, loop: Loop) -> None:
        self.operations: dict[str, Operation] = {}
        self._outlet = outlet
        self._loop = loop
        self._requests: dict[str, GuestRequest] = {}

    def ids(self) -> list[str]:
        """Return the ids of all requests whose answers are not confirmed."""
        return list(self._requests)

    def hold_streams(self) -> None:
        """Hold the streams, because there is a new channel to the same driver."""
        for request in self._requests.values():
            if request.execution is not None and request.execution.stream is not None:
                request.execution.stream.hold()

    def forget(self) -> None:
        """Forget all requests, because their driver is gone for good. Running background processes stay."""
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if request.reply is None:
                self._cancel(request)

    def handle(self, header: Header, body: bytes) -> None:
        """Handle one frame: a new request, a repeated one, or a frame that concerns an earlier request."""
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
            self._repeat(request, header)
        else:
            request = self._requests[identity] = GuestRequest(identity)
            self._begin(request, header, body)

    def reply(self, request: GuestRequest, header: Header, data: bytes = b"") -> None:
        """Answer a request, unless it has an answer. The answer is kept until the driver confirms it."""
        if request.reply is not None:
            return
        if request.timer is not None:
            request.timer.cancel()
        header = dict(header, ev="done", id=request.identity)
        request.reply = (header, data)
        if self._requests.get(request.identity) is request:
            self._outlet.send(header, data)

    def refuse(self, request: GuestRequest, error: Error) -> None:
        """Answer with an error."""
        self.reply(request, {"error": error})

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call `call` once, in `seconds`."""
        return self._loop.later(seconds, call)

    # --- the life of a request --------------------------------------------------------------------------------------

    def _begin(self, request: GuestRequest, header: Header, body: bytes) -> None:
        op = str(header.get("op"))
        operation = self.operations.get(op)
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

    def _fail(self, request: GuestRequest, error: Error) -> None:
        if request.execution is not None:
            request.execution.fail(error)
        self.refuse(request, error)

    def _repeat(self, request: GuestRequest, header: Header) -> None:
        """Send the frames again that the driver may have missed, because it repeats the request on a new channel."""
        execution = request.execution
        if execution is not None and execution.stream is not None:
            execution.stream.resend(header.get("have", 0))
            execution.resume()
        if request.reply is not None:
            self._outlet.send(*request.reply)

    def _steer(self, op: str, request: GuestRequest, header: Header, body: bytes) -> None:
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

    def _cancel(self, request: GuestRequest) -> None:
        """Stop a request's execution, even if the answer is on its way, or end its waiting with an error."""
        if request.execution is not None:
            request.execution.stop(request.execution.cancel_grace)
        elif request.on_cancel is not None and request.reply is None:
            request.on_cancel()
            self.refuse(request, {"kind": "command", "code": "cancelled", "message": "cancelled"})
