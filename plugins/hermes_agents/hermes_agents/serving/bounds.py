"""Limits of what the programs of one slot may use of the model server."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermes_agents.serving.http import HttpLimits


@dataclass(frozen=True)
class Bounds:
    """The limits for the programs of one slot."""

    calls: int = 500
    """Model calls, repeated ones included. Those after them get a refusal that ends each agent."""
    tokens: int | None = None
    """Tokens of all prompts and answers together; None is no limit."""
    concurrent: int = 4
    """Calls that are sampled at the same time. Others wait for their turn."""
    waiting: int = 32
    """Calls that may wait for their turn. Others are refused."""
    connections: int = 64
    """Open connections. Others are closed at once."""
    open_bytes: int = 128 << 20
    """Bytes of the requests that are being answered, all of them together. Others are refused."""
    kept_bytes: int = 256 << 20
    """Bytes of the requests that begin a conversation or leave one before its end, all of them together: they are kept
    until the rollout ends. Those after them are refused."""
    at_once: int = 1000
    """Connections and requests of any kind that are taken at once. Those after them are taken at the rate of
    `a_second`."""
    a_second: float = 200.0
    """Connections and requests per second after those."""
    read_bytes: int = 4 << 30
    """Bytes of all requests together. Those after them are refused unread."""
    http: HttpLimits = field(default_factory=HttpLimits)
    quiet_s: float = 10.0
    """Seconds without an answer after which a stream begins. Until then, a refusal can have a status of its own."""
    keep_alive_s: float = 5.0
    """Seconds between two signs of life in a stream that has begun."""
