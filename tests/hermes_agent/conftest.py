"""What the tests of the plugin share: hermes-agent itself, which has an environment of its own, and programs of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hermes_modal_emulator import ModalEmulator

from tests.support.accounts import skip_if_slots_need_root

HOW = "`make setup EXTRAS=hermes`, then `.venv-hermes/bin/python -m pytest -m full tests/hermes_agent`"

PLACES = {
    "slots-local": {},
    "slots-docker": {"TERMINAL_DOCKER_IMAGE": "hermes-test-python:bookworm"},
}
"""The variables of our environments, by name."""

CONFIG = {"plugins": {"enabled": ["hermes-rl"]}, "approvals": {"mode": "off"}}

HERE = Path(__file__).parent

_OURS = ("TERMINAL_", "PYTHON", "HERMES_PLUGINS")
"""Variables of this test run that its programs must not have."""


@pytest.fixture(scope="session")
def hermes_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where hermes-agent is not installed beside the tests."""
    missing = [name for name in ("run_agent", "hermes_agent") if importlib.util.find_spec(name) is None]
    require("hermes", f"{' and '.join(missing)} not installed; {HOW}" if missing else None)


class Home:
    """A user's `HERMES_HOME`, and programs that run with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.configure(**CONFIG)

    def configure(self, **config: Any) -> None:
        """Write `config.yaml`."""
        (self.folder / "config.yaml").write_text(json.dumps(config))

    def environ(self, terminal: str, **more: str) -> dict[str, str]:
        """The variables of a program whose tools work in this environment of hermes-agent's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        own = {"TERMINAL_CWD": str(self.work)} if terminal == "local" else PLACES.get(terminal, {})
        state = {"HERMES_HOME": str(self.folder), "HERMES_STATE_DIR": str(self.folder / "state")}
        return {**kept, **state, "TERMINAL_ENV": terminal, **own, **more}

    def run(self, program: str, *arguments: str, terminal: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this folder to its end, whatever that is."""
        return subprocess.run(
            [sys.executable, HERE / program, *arguments],
            cwd=self.work,
            env=self.environ(terminal, **more),
            capture_output=True,
            text=True,
            timeout=240,
        )

    def results(self, program: str, *arguments: str, terminal: str, **more: str) -> Any:
        """What a program prints as JSON on its last line."""
        done = self.run(program, *arguments, terminal=terminal, **more)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def home(tmp_path: Path, hermes_extra: None) -> Home:
    """A user who has turned the plugin on."""
    return Home(tmp_path / "home")


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> str:
    """The name of one of our environments, which can be used here."""
    name: str = request.param
    request.getfixturevalue("docker_images" if name == "slots-docker" else "isolates")
    return name


@pytest.fixture(params=["slots-ssh", "slots-modal"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """One of our environments on another machine, and the variables that lead there."""
    if request.param == "slots-ssh":
        profile = {"host": "hermes-test", "config_file": request.getfixturevalue("ssh_config")}
        (tmp_path / "ssh.yaml").write_text(json.dumps({"profiles": {"default": profile}}))
        yield "slots-ssh", {"TERMINAL_SSH_PROFILES_FILE": str(tmp_path / "ssh.yaml")}
        return
    with ModalEmulator() as emulator:
        skip_if_slots_need_root(emulator.mode)
        yield "slots-modal", emulator.environment
