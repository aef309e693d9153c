"""The conformance kit on the `local` backend, a test id for each check, at every level that runs commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest_plugins = ["hermes_core.testing.conformance.plugin"]
pytestmark = pytest.mark.slow

AGAIN = ("commands", "limits", "files")
"""What depends on the level without being about levels."""


@pytest.mark.conformance("local")
def test_local(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.conformance("local", isolation="namespace", groups=AGAIN)
def test_local_at_namespace(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.conformance("local", isolation="shared", groups=AGAIN)
def test_local_at_shared(conformance_check: Callable[[], None]) -> None:
    conformance_check()
