"""The terminal tool on Modal: the mission page's settings, and its lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hermes_modal_emulator import ModalEmulator

pytestmark = pytest.mark.usefixtures("workable")

LINES = """
import os
from hermes_core import terminal_tool

# Simple command
output = terminal_tool("echo hello", task_id="my-task")
print(output)

print(terminal_tool("echo 'print(6 * 7)' >train.py; alias python=python3; cd /tmp", task_id="training", profile="gpu"))
# With profile selection
output = terminal_tool("cd - >/dev/null; python3 /data/slot_0/train.py", task_id="training", profile="gpu")
print(output)

# Cleanup when done
from hermes_core import cleanup_vm
cleanup_vm("my-task")
"""


@pytest.mark.parametrize("by_file", [False, True])
def test_the_pages_lines(
    own_emulator: ModalEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool, page_profiles: str
) -> None:
    import json
    import os
    import subprocess
    import sys

    variables = {"TERMINAL_ENV": "modal", "XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "modal"}
    lines = LINES
    if not by_file:
        variables |= {"TERMINAL_MODAL_IMAGE": "python:3.11", "TERMINAL_MODAL_APP_NAME": "hermes-sandbox"}
        lines = lines.replace(', profile="gpu"', "")
    else:
        (tmp_path / "modal_profiles.yaml").write_text(page_profiles)
    done = subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | variables,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[0] == {"output": "hello\n", "exit_code": 0, "error": None}
    assert answers[2] == {"output": "42\n", "exit_code": 0, "error": None}
    assert not own_emulator.sandboxes()
    apps = {each["request"]["app_name"] for each in own_emulator.requests("AppGetOrCreate")}
    assert apps == {"hermes-sandbox"}
    with_gpu = own_emulator.requests("SandboxCreate")
    assert len(with_gpu) == int(by_file)
    assert len(own_emulator.sandboxes(running=False)) >= 2
