"""What the sandbox layer tells whoever watches it: sandboxes that come and go, tools that were called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hermes_core.sandbox.results import ProcessUpdate

log = logging.getLogger(__name__)


class Observers(Protocol):
    """Called on the event loop: return quickly. An observer's error is logged and changes nothing."""

    def sandbox_created(self, *, sandbox_id: str, backend: str, profile: str) -> None:
        """A sandbox is ready for its first lease."""

    def sandbox_lost(self, *, sandbox_id: str, backend: str, profile: str, reason: str) -> None:
        """A sandbox died, could not be reached again, or could not be proved clean."""

    def sandbox_terminated(self, *, sandbox_id: str, backend: str, profile: str) -> None:
        """A sandbox was ended by its pool."""

    def tool_called(self, *, trajectory_id: str, tool_name: str, arguments: Mapping[str, Any], result: Any) -> None:
        """A tool call in a slot came to its end; `result` is the `ExecutionResult`."""

    def process_updated(self, *, update: ProcessUpdate) -> None:
        """There is something new about a background process that is watched."""


class Unobserved:
    """Nobody watches."""

    def sandbox_created(self, *, sandbox_id: str, backend: str, profile: str) -> None:
        """Nothing."""

    def sandbox_lost(self, *, sandbox_id: str, backend: str, profile: str, reason: str) -> None:
        """Nothing."""

    def sandbox_terminated(self, *, sandbox_id: str, backend: str, profile: str) -> None:
        """Nothing."""

    def tool_called(self, *, trajectory_id: str, tool_name: str, arguments: Mapping[str, Any], result: Any) -> None:
        """Nothing."""

    def process_updated(self, *, update: ProcessUpdate) -> None:
        """Nothing."""


def tell(call: Callable[..., None], **event: Any) -> None:
    """Tell an observer; its error is logged, as it must not change what it observes."""
    try:
        call(**event)
    except Exception:
        log.exception("the observer %s failed", getattr(call, "__qualname__", call))
