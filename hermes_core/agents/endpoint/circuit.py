"""A circuit breaker: stops sending requests to a model server that fails, and tests whether it works again."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum

from hermes_core.agents.endpoint.errors import EndpointDown

logger = logging.getLogger(__name__)

MIN_FAILURES = 3
"""Minimum number of failures in a row, of any requests, that end the state CLOSED."""


class CircuitState(Enum):
    """Which requests are sent to a server."""

    CLOSED = "closed"
    """All requests, because the server works."""
    HALF_OPEN = "half-open"
    """One request at a time, as a test, because the server fails. The others wait."""
    OPEN = "open"
    """The server was given up. Requests that were waiting fail. Later requests test it, one at a time."""


class CircuitBreaker:
    """The state of a server, derived from the outcomes of its requests. Any success closes the circuit.

    Args:
        name: the server's name, for messages.
        changed: set when waiting requests have to look at the state again.
    """

    def __init__(self, name: str, changed: asyncio.Event) -> None:
        self.state = CircuitState.CLOSED
        self.error: EndpointDown | None = None
        """Why the server was given up; None if the state is not OPEN."""
        self.generation = 0
        """How often the state CLOSED has ended. Requests that were sent in an earlier generation may hang."""
        self.proven = False
        """Whether the server ever accepted the key and the model. Such a server will accept them again."""
        self.failures = 0
        """Failures since the last success."""
        self.failing_since = 0.0
        self.last_failure = 0.0
        self._name = name
        self._changed = changed

    @property
    def closed(self) -> bool:
        """Return whether the server works, so that all requests are sent."""
        return self.state is CircuitState.CLOSED

    def record_success(self, *, proves: bool) -> None:
        """Close the circuit.

        Args:
            proves: whether the answer shows that the server accepts the key and the model.
        """
        if not self.closed:
            logger.warning("the model endpoint %s answers again", self._name)
        self.state, self.error, self.failures = CircuitState.CLOSED, None, 0
        self.proven = self.proven or proves
        self._changed.set()

    def record_failure(self, in_flight: int = 0) -> bool:
        """Count a failure. Return whether it made the circuit half-open.

        Args:
            in_flight: number of requests in flight. The circuit becomes half-open after this number of failures in a
                row, and at least `MIN_FAILURES`.
        """
        self.last_failure = time.monotonic()
        if not self.failures:
            self.failing_since = self.last_failure
        self.failures += 1
        trips = self.closed and self.failures >= max(MIN_FAILURES, in_flight)
        if trips:
            self._trip(CircuitState.HALF_OPEN)
        return trips

    def record_silence(self) -> None:
        """Make the circuit half-open, because the server gives no sign of life."""
        if not self.failures:
            self.record_failure()
        if self.closed:
            self._trip(CircuitState.HALF_OPEN)

    def open(self, error: EndpointDown) -> None:
        """Give the server up. All waiting requests fail with a copy of the error."""
        self.error = error
        self._trip(CircuitState.OPEN)

    def _trip(self, state: CircuitState) -> None:
        self.generation += self.closed
        self.state = state
        self._changed.set()
