"""The log of the calls to the model server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class CallLog:
    """The record of one call. Times are seconds since the epoch."""

    number: int
    dialect: str
    path: str
    model: str | None
    """The model that the program requested. The run's model answers in any case."""
    streamed: bool
    started: float
    ended: float | None = None
    waited_s: float = 0.0
    """Seconds that the request waited for its turn at the endpoint."""
    outcome: str = "open"
    """`answered`; `replayed` (got an answer that was lost before, or that another call was waiting for); `refused`;
    `failed` (the endpoint failed); `open` (the call never ended)."""
    place: str = ""
    """The call's place in its conversation: `root`, `continues` or `fork`."""
    own: bool = False
    """Whether the call belongs to the agent's own conversation, as far as this is known when the call arrives."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop_reason: str | None = None
    refusal: str | None = None
    overridden: dict[str, str] = field(default_factory=dict)
    """Sampling settings that the program requested and did not get."""
    dropped_tools: list[str] = field(default_factory=list)
    """Tools that were removed from the request because the provider would have run them."""
    unknown: dict[str, int] = field(default_factory=dict)
    """The number of blocks of each unknown kind."""
    delivered: bool = False
    """Whether the program received the whole answer."""

    def to_json(self) -> dict[str, Any]:
        """Return the call as JSON values."""
        return asdict(self)
