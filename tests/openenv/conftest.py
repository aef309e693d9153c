"""What the tests of the OpenEnv adapter need: OpenEnv, which has an environment of its own."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import pytest

from tests.support.selection import makes_tests_full

HOW = "`make setup EXTRAS=openenv`, then `.venv-openenv/bin/python -m pytest -m full tests/openenv`"


@pytest.fixture(scope="session")
@makes_tests_full
def openenv_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where OpenEnv is not installed; imports it where it is, whatever it warns of."""
    there = importlib.util.find_spec("openenv") is not None
    require("openenv", None if there else f"it is not installed here; {HOW}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import hermes_openenv  # noqa: F401
