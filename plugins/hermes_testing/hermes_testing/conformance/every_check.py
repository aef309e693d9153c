"""What `hermes-rl conformance` lets pytest run. The command's own plugin gives the session the mark."""

from __future__ import annotations

from collections.abc import Callable


def test_conformance(conformance_check: Callable[[], None]) -> None:
    """Run the check."""
    conformance_check()
