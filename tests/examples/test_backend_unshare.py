"""The worked example of docs/writing-a-backend.md: installed as a distribution of its own, it passes the kit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "backend_unshare"
LIMIT = 100


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example, as pip installs it."""
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "example")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    return target


def test_it_is_under_a_hundred_lines() -> None:
    assert len((EXAMPLE / "backend_unshare.py").read_text().splitlines()) < LIMIT


def test_the_document_shows_the_very_file() -> None:
    text = (EXAMPLE.parents[1] / "docs" / "writing-a-backend.md").read_text()
    assert f"```python\n{(EXAMPLE / 'backend_unshare.py').read_text()}```" in text


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize(
    "groups",
    [
        ("contract", "slots"),
        ("pools", "failure"),
        pytest.param(("commands", "processes", "files", "leaks", "speed"), marks=pytest.mark.stress),
    ],
)
def test_it_passes_the_kit(
    installed: Path, groups: tuple[str, ...], require: Callable[[str, str | None], None]
) -> None:
    tools = all(map(shutil.which, ("unshare", "nsenter", "setsid")))
    require("unshare", None if os.geteuid() == 0 and tools else "the example takes root and util-linux")
    environment = {**os.environ, "PYTHONPATH": str(installed), "HERMES_PLUGINS": "unshare"}
    words = [word for group in groups for word in ("--group", group)]
    command = [sys.executable, "-m", "hermes_core", "conformance", "unshare", "--json", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert [each for each in checks if each["outcome"] == "failed"] == []
    assert any(each["outcome"] == "passed" for each in checks)
    assert done.returncode == 0
