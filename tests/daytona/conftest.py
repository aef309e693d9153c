"""What the tests of Daytona share: one emulator, and the backend's packages, which have an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_core.sandbox.contract import Isolation, SandboxSpec
from tests.support.selection import makes_tests_full

HOW = "`make setup EXTRAS=cloud`, then `.venv-cloud/bin/python -m pytest -m full tests/daytona`"


@pytest.fixture(scope="session")
@makes_tests_full
def session_emulator(require: Callable[[str, str | None], None]) -> Iterator[Any]:
    """The emulator that tests share; each skips without the backend's packages."""
    there = all(map(importlib.util.find_spec, ("asyncssh", "daytona_api_client_async")))
    require("cloud", None if there else f"the packages of the Daytona backend are not installed here; {HOW}")
    from tests.daytona.emulator import DaytonaEmulator, missing

    require("local", missing())
    with DaytonaEmulator() as emulator:
        yield emulator


@pytest.fixture
def emulator(session_emulator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The shared emulator; the test's environment points at it, and its faults end with the test."""
    for name in os.environ:
        if name.startswith(("DAYTONA_", "TERMINAL_")):
            monkeypatch.delenv(name)
    for name, value in session_emulator.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    session_emulator.reset()
    yield session_emulator
    session_emulator.reset()


@pytest.fixture
async def backend(emulator: Any) -> AsyncIterator[Any]:
    """A backend, whose sandboxes are all gone at the end."""
    from hermes_daytona.backend import DaytonaBackend

    made = DaytonaBackend()
    yield made
    for info in await made.list():
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def make_spec(emulator: Any) -> Callable[..., SandboxSpec]:
    """Makes the spec of a sandbox; options are keys of its profile."""
    from hermes_daytona.config import DaytonaConfig

    def make(creation_id: str | None = None, owner: str = "tests", **config: Any) -> SandboxSpec:
        return SandboxSpec(creation_id or uuid.uuid4().hex, owner, DaytonaConfig(**config), Isolation.USER)

    return make
