"""The test file that `hermes-rl conformance` lets pytest run. It has no mark, because the command marks the session."""

from __future__ import annotations

from collections.abc import Callable


def test_conformance(conformance_check: Callable[[], None]) -> None:
    """Run the check."""
    conformance_check()
