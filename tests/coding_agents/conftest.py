"""What tests of real coding agents need: the agents."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from hermes_agents import packages


@pytest.fixture
def indexes(require: Callable[[str, str | None], None]) -> None:
    """The indexes that the agents are fetched from can be reached, or the agents were fetched before."""
    require("agents", None if packages.cache().is_dir() else unreachable())


def unreachable() -> str | None:
    if shutil.which("npm") is None:
        return "npm is not installed"
    asked = subprocess.run(["npm", "view", "@openai/codex", "version"], capture_output=True, timeout=60, check=False)
    return "the npm index can't be reached" if asked.returncode else None
