"""One request of the driver, and the refusal of one."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .execution import Execution
    from .loop import Timer

    Header = dict[str, Any]
    Error = dict[str, str]


class Refusal(Exception):
    """A request that cannot be done; `kind` is an ErrorKind's word."""

    def __init__(self, kind: str, code: str, message: str) -> None:
        super().__init__(message)
        self.error = {"kind": kind, "code": code, "message": message}


class Request:
    """One request by its id: asked again, it is answered again, never done twice."""

    __slots__ = ("execution", "identity", "on_cancel", "reply", "timer")

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.execution: Execution | None = None
        self.timer: Timer | None = None
        self.on_cancel: Callable[[], object] | None = None
        self.reply: tuple[Header, bytes] | None = None
