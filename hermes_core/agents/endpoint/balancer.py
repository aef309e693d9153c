"""Several equal model servers: each rollout stays on one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hermes_core.agents.endpoint.circuit import CircuitBreaker, CircuitState
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.agents.endpoint.request import Endpoint
from hermes_core.errors import ModelError

AVOID_S = 60.0
"""Seconds for which a server that was given up is not chosen if there is another."""


class LoadBalancer:
    """Chooses the least busy server that works."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._users = [0] * len(endpoints)

    @contextmanager
    def choose(self) -> Iterator[int]:
        """Yield the index of the server to use in the block.

        Raises:
            EndpointDown: the block raised this error, and all servers are down.
            ModelError: the block raised `EndpointDown`, but not all servers are down.
        """
        chosen = min(
            range(len(self._users)),
            key=lambda index: (should_avoid(self._endpoints[index].circuit), self._users[index]),
        )
        self._users[chosen] += 1
        try:
            yield chosen
        except EndpointDown as error:
            if all(endpoint.circuit.state is CircuitState.OPEN for endpoint in self._endpoints):
                raise
            failure = ModelError(error.message, hint=error.hint, trajectory_id=error.trajectory_id)
            failure.result = error.result
            raise failure from error
        finally:
            self._users[chosen] -= 1


def should_avoid(circuit: CircuitBreaker) -> bool:
    """Return whether the server fails, so that another should be chosen. `AVOID_S` after the last failure of a server
    that was given up, the server is tried again."""
    return not circuit.closed and (
        circuit.state is CircuitState.HALF_OPEN or time.monotonic() - circuit.last_failure <= AVOID_S
    )
