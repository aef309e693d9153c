"""The log of the calls to the model server."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class CallLog:
    """One call, as it is recorded. Times are seconds since the epoch."""

    number: int
    dialect: str
    path: str
    model: str | None
    """The model that the program asked for. The run's model answers in any case."""
    streamed: bool
    started: float
    ended: float | None = None
    waited_s: float = 0.0
    """Seconds that the request waited for its turn at the endpoint."""
    outcome: str = "open"
    """`answered`, `replayed` (an answer that was lost, or is shared with a call that was under way), `refused`,
    `failed` (the endpoint), `open` (it never ended)."""
    place: str = ""
    """Its place in its conversation: `root`, `continues` or `fork`."""
    own: bool = False
    """Whether it belongs to the agent's own conversation, as far as it can be seen when it comes."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop_reason: str | None = None
    refusal: str | None = None
    overridden: dict[str, str] = field(default_factory=dict)
    """Sampling settings that the program asked for and did not get."""
    dropped_tools: list[str] = field(default_factory=list)
    """Tools that its provider would have run."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Blocks of unknown kinds."""
    delivered: bool = False
    """Whether the program took the whole answer."""

    def to_json(self) -> dict[str, Any]:
        """Return the call as JSON values."""
        return asdict(self)
