"""Limits on how much the programs of one slot may use the model server."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermes_agents.serving.http import HttpLimits


@dataclass(frozen=True)
class Bounds:
    """The limits for the programs of one slot."""

    calls: int = 500
    """Maximum number of model calls, repeated ones included. Each further call gets a refusal that ends any agent."""
    tokens: int | None = None
    """Maximum number of tokens of all prompts and answers together; None is no limit."""
    concurrent: int = 4
    """Maximum number of calls that are sampled at the same time. Further calls wait for their turn."""
    waiting: int = 32
    """Maximum number of calls that wait for their turn. Further calls are refused."""
    connections: int = 64
    """Maximum number of open connections. Further connections are closed at once."""
    open_bytes: int = 128 << 20
    """Maximum total of bytes of the requests that are being answered. Further requests are refused."""
    kept_bytes: int = 256 << 20
    """Maximum total of bytes of the requests that begin a conversation, or fork one before its end. These requests are
    kept until the rollout ends. Further ones are refused."""
    at_once: int = 1000
    """Number of connections and requests of any kind that are accepted without a delay. Further ones are accepted at
    the rate `a_second`."""
    a_second: float = 200.0
    """Connections and requests per second that are accepted after the first `at_once`."""
    read_bytes: int = 4 << 30
    """Maximum total of bytes of all requests. Further requests are refused unread."""
    http: HttpLimits = field(default_factory=HttpLimits)
    quiet_s: float = 10.0
    """Seconds without an answer after which a stream begins. Before, a refusal can still have an HTTP status of its
    own."""
    keep_alive_s: float = 5.0
    """Seconds between two signs of life in a stream that has begun."""
