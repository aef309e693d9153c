"""The conformance kit on Modal's sandboxes through the emulator, of both kinds. The whole of it takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hermes_modal_emulator import ModalEmulator

pytestmark = pytest.mark.usefixtures("workable")


def failures(tmp_path: Path, *options: str) -> list[str]:
    argv = [
        sys.executable,
        "-c",
        "from hermes_core.cli.main import main; main()",
        "conformance",
        "modal",
        "--json",
        *options,
    ]
    import os

    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "modal,testing"}
    out = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path).stdout
    checks = json.loads(out)["checks"]
    assert any(each["outcome"] == "passed" for each in checks)
    return [f"{each['name']}: {each['reason']}" for each in checks if each["outcome"] == "failed"]


@pytest.mark.parametrize("version", ["v2", pytest.param("v1", marks=pytest.mark.stress)], indirect=True)
def test_the_contract(emulator: ModalEmulator, version: str, tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", "contract") == []


@pytest.mark.full
def test_background_processes_and_terminals(emulator: ModalEmulator, version: str, tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", "processes") == []


@pytest.mark.parametrize("version", ["v2", pytest.param("v1", marks=pytest.mark.stress)], indirect=True)
@pytest.mark.full
def test_ports_that_lead_to_the_driver(emulator: ModalEmulator, version: str, tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", "forwards") == []


@pytest.mark.stress
def test_the_whole_kit(emulator: ModalEmulator, version: str, tmp_path: Path) -> None:
    assert failures(tmp_path) == []
