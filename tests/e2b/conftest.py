"""What the tests of the E2B backend share: E2B's SDK, which is in an environment of its own, and the emulator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hermes_core.sandbox.contract import Isolation, SandboxSpec
from tests.support.requirements import ROOT
from tests.support.selection import makes_tests_full

HOW = "`make setup EXTRAS=cloud`, then `.venv-cloud/bin/python -m pytest -m 'full or not full' tests/e2b`"


class E2bEmulator:
    """A running emulator, in a process of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="e2b-emulator-", ignore_cleanup_errors=True)
        argv = [sys.executable, "-m", "tests.e2b.emulator", f"{self._folder.name}/machines"]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.environment = {"E2B_API_KEY": "e2b_emulator", "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}

    def close(self) -> None:
        """End it, and with it its sandboxes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._folder.cleanup()

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url + path, data, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def fail(self, call: str, **fault: Any) -> None:
        """Set a fault for the next calls of one kind: see `emulator.CallFault`."""
        self._ask("/_faults", {"call": call, **fault})

    def set(self, **settings: Any) -> None:
        """Change settings: `page` is the maximum number of sandboxes in a page of a list."""
        self._ask("/_settings", settings)

    def reset(self) -> None:
        """Forget faults and settings."""
        self._ask("/_reset", {})

    def pause(self, sandbox_id: str) -> None:
        """Pause a sandbox, as its account's owner may."""
        self._ask("/_pause", {"sandbox_id": sandbox_id})

    def calls(self, kind: str) -> list[dict[str, Any]]:
        """Return the last calls of one kind, the latest at the end."""
        found: list[dict[str, Any]] = self._ask(f"/_calls/{kind}")
        return found


@pytest.fixture(scope="session")
@makes_tests_full
def e2b_sdk(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where E2B's SDK is not installed."""
    there = importlib.util.find_spec("e2b") is not None
    require("cloud", None if there else f"E2B's SDK is not installed here; {HOW}")


@pytest.fixture(scope="session")
def session_emulator(e2b_sdk: None) -> Iterator[E2bEmulator]:
    """The emulator that all tests share."""
    made = E2bEmulator()
    yield made
    made.close()


@pytest.fixture
def emulator(session_emulator: E2bEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[E2bEmulator]:
    """The shared emulator; the test's environment points at it, and its faults end with the test."""
    for name in [each for each in os.environ if each.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in session_emulator.environment.items():
        monkeypatch.setenv(name, value)
    yield session_emulator
    session_emulator.reset()


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def backend(emulator: E2bEmulator, owner: str) -> AsyncIterator[Any]:
    """The backend; what a test left ends with the test."""
    from hermes_e2b.backend import E2bBackend

    made = E2bBackend()
    yield made
    emulator.reset()
    for info in await made.list(owner):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def spec(owner: str) -> Callable[..., SandboxSpec]:
    from hermes_e2b.config import E2bConfig

    def make(isolation: Isolation = Isolation.USER, *, creation_id: str | None = None, **config: Any) -> SandboxSpec:
        return SandboxSpec(
            creation_id=creation_id or uuid.uuid4().hex,
            owner=owner,
            config=E2bConfig(**{"orphan_ttl_s": 60, **config}),
            isolation=isolation,
            environment={"OF_THE_SPEC": "yes"},
        )

    return make
