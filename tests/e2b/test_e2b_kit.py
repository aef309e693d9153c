"""The conformance kit on sandboxes of the emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2b.conftest import E2bEmulator


def failures(tmp_path: Path, *options: str) -> list[str]:
    argv = [
        *(sys.executable, "-c", "from hermes_core.cli.main import main; main()", "conformance", "e2b", "--json"),
        *options,
    ]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "e2b,testing"}
    out = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path).stdout
    checks = json.loads(out)["checks"]
    assert any(each["outcome"] == "passed" for each in checks)
    return [f"{each['name']}: {each['reason']}" for each in checks if each["outcome"] == "failed"]


def test_the_contract(emulator: E2bEmulator, tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", "contract") == []


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_the_whole_kit(emulator: E2bEmulator, tmp_path: Path) -> None:
    assert failures(tmp_path) == []
