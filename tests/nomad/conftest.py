"""What the tests of the Nomad backend need: aiohttp, which an environment of its own has, and an emulated cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.accounts import skip_if_slots_need_root
from tests.support.selection import makes_tests_full

HOW = "`make setup EXTRAS=cloud`, then `.venv-cloud/bin/python -m pytest -m full tests/nomad`"


class Cluster:
    """A process of the emulator."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "tests.nomad.emulator"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.address = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def ask(self, what: str, **values: Any) -> Any:
        """Call one of the emulator's own functions: set, fail, reset, state, drain, cut."""
        data = json.dumps(values).encode()
        request = urllib.request.Request(f"{self.address}/emulator/{what}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def left(self) -> tuple[list[Any], list[Any], int]:
        """Return the allocations, the jobs and the execs that are left, after at most 15 seconds for them to end."""
        end = time.monotonic() + 15
        while True:
            state = self.ask("state")
            left = state["alive"], state["jobs"], state["execs"]
            if left == ([], [], 0) or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def close(self) -> None:
        """End it, with all its sandboxes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="session")
@makes_tests_full
def cloud_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where aiohttp is not installed."""
    there = importlib.util.find_spec("aiohttp") is not None
    require("cloud", None if there else f"aiohttp is not installed here; {HOW}")


@pytest.fixture(scope="session")
def session_cluster(cloud_extra: None) -> Iterator[Cluster]:
    """The emulated cluster that the tests of a process share."""
    skip_if_slots_need_root("namespaces")
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(session_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The shared cluster; NOMAD_ADDR names it, and its faults end with the test."""
    for name in os.environ:
        if name.startswith(("NOMAD_", "TERMINAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NOMAD_ADDR", session_cluster.address)
    yield session_cluster
    session_cluster.ask("reset", purge=True)
