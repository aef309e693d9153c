"""The conformance kit on pods of the emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("cluster")


def failures(tmp_path: Path, *options: str) -> list[str]:
    """Return the checks of the kit that failed."""
    argv = [
        sys.executable,
        "-c",
        "from hermes_core.cli.main import main; main()",
        "conformance",
        "kubernetes",
        "--json",
    ]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "kubernetes,testing"}
    out = subprocess.run([*argv, *options], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path).stdout
    checks = json.loads(out)["checks"]
    assert any(each["outcome"] == "passed" for each in checks)
    return [f"{each['name']}: {each['reason']}" for each in checks if each["outcome"] == "failed"]


@pytest.mark.parametrize(
    "group", ["contract", "commands", "processes", "files", "slots", "forwards", "pools", "failure", "leaks"]
)
def test_the_kit(tmp_path: Path, group: str) -> None:
    assert failures(tmp_path, "--group", group) == []


@pytest.mark.parametrize("group", ["slots", "forwards"])
def test_slots_with_namespaces_of_their_own(tmp_path: Path, group: str) -> None:
    """At `private-root`, one check removes /root. This host's interpreter may be there, and take longer to remove."""
    (tmp_path / "profile.yaml").write_text("cap_add: [SYS_ADMIN]\n")
    failed = failures(tmp_path, "--config", "profile.yaml", "--group", group)
    slow = "a_neighbours_files_can_not_be_changed[private-root]: not done within"
    assert [each for each in failed if not each.startswith(slow)] == []


@pytest.mark.stress
def test_the_figures(tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", "speed") == []
