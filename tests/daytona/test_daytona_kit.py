"""The conformance kit on Daytona's sandboxes through the emulator. The whole of it takes minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def failures(folder: Path, *options: str) -> list[str]:
    """The checks of the kit that fail."""
    argv = [sys.executable, "-c", "from hermes_core.cli.main import main; main()", "conformance", "daytona", "--json"]
    environment = os.environ | {"HERMES_PLUGINS": "daytona,testing"}
    out = subprocess.run([*argv, *options], stdout=subprocess.PIPE, text=True, env=environment, cwd=folder).stdout
    checks = json.loads(out)["checks"]
    assert any(each["outcome"] == "passed" for each in checks)
    return [f"{each['name']}: {each['reason']}" for each in checks if each["outcome"] == "failed"]


def test_the_contract(emulator: Any, tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", "contract") == []


@pytest.mark.full
def test_the_contract_if_the_gateway_loses_exit_statuses(emulator: Any, tmp_path: Path) -> None:
    emulator.call("set", lose_status=True)
    assert failures(tmp_path, "--group", "contract") == []


@pytest.mark.full
def test_the_whole_kit(emulator: Any, tmp_path: Path) -> None:
    assert failures(tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("group", ["slots", "forwards"])
def test_slots_with_namespaces_of_their_own(emulator: Any, tmp_path: Path, group: str) -> None:
    (tmp_path / "profile.yaml").write_text("namespaces: true\n")
    options = ["--config", "profile.yaml", "--isolation", "namespace", "--group", group]
    assert failures(tmp_path, *options) == []
