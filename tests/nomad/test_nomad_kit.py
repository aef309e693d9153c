"""The conformance kit on sandboxes of an emulated Nomad cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nomad.conftest import Cluster


def failures(tmp_path: Path, *options: str) -> list[str]:
    """Run the kit as a user does. Return the checks that failed."""
    program = "from hermes_core.cli.main import main; main()"
    argv = [sys.executable, "-c", program, "conformance", "nomad", "--json", *options]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "nomad,testing"}
    out = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path).stdout
    checks = json.loads(out)["checks"]
    assert any(each["outcome"] == "passed" for each in checks)
    return [f"{each['name']}: {each['reason']}" for each in checks if each["outcome"] == "failed"]


@pytest.mark.parametrize(
    "group", ["contract", "commands", "processes", "files", "forwards", "pools", "failure", "leaks"]
)
def test_the_kit(cluster: Cluster, group: str, tmp_path: Path) -> None:
    assert failures(tmp_path, "--group", group) == []


def test_the_kit_on_slots(cluster: Cluster, tmp_path: Path) -> None:
    """Without a network, because an emulated sandbox that has one shares this host's, as no container does."""
    (tmp_path / "profile.yaml").write_text("network: none\ncap_add: [SYS_ADMIN]\n")
    assert failures(tmp_path, "--group", "slots", "--config", "profile.yaml") == []
