"""The circuit breaker: which outcomes of requests change its state."""

import asyncio

from hermes_core.agents.endpoint.circuit import CircuitBreaker, CircuitState
from hermes_core.agents.endpoint.errors import EndpointDown


def breaker():
    return CircuitBreaker("http://here", asyncio.Event())


def test_failures_in_a_row_make_it_half_open_once_and_a_success_closes_it():
    circuit = breaker()
    assert [circuit.record_failure() for _ in range(4)] == [False, False, True, False]
    assert (circuit.state, circuit.generation) == (CircuitState.HALF_OPEN, 1)
    circuit.record_success(proves=True)
    assert (circuit.state, circuit.failures, circuit.proven) == (CircuitState.CLOSED, 0, True)


def test_a_success_between_failures_keeps_it_closed():
    circuit = breaker()
    for _ in range(5):
        circuit.record_failure()
        circuit.record_failure()
        circuit.record_success(proves=False)
    assert (circuit.state, circuit.generation, circuit.proven) == (CircuitState.CLOSED, 0, False)


def test_as_many_requests_have_to_fail_as_are_in_flight():
    circuit = breaker()
    assert [circuit.record_failure(in_flight=5) for _ in range(5)] == [False] * 4 + [True]


def test_silence_makes_it_half_open_at_once():
    circuit = breaker()
    circuit.record_silence()
    circuit.record_silence()
    assert (circuit.state, circuit.generation, circuit.failures) == (CircuitState.HALF_OPEN, 1, 1)


def test_it_opens_from_any_state_and_has_an_error_only_while_it_is_open():
    for failures in (1, 3):
        circuit, error = breaker(), EndpointDown("gone")
        for _ in range(failures):
            circuit.record_failure()
        circuit.open(error)
        assert (circuit.state, circuit.generation, circuit.error) == (CircuitState.OPEN, 1, error)
        circuit.record_silence()
        assert circuit.state is CircuitState.OPEN
        circuit.record_success(proves=True)
        assert (circuit.state, circuit.error) == (CircuitState.CLOSED, None)
