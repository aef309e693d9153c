"""What tests of real coding agents need: the agents."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from hermes_agents import packages


@pytest.fixture
def indexes(request: pytest.FixtureRequest, require: Callable[[str, str | None], None]) -> None:
    """The agent was fetched before, or the index that it is fetched from can be reached."""
    agent = request.node.callspec.params.get("agent", "") if hasattr(request.node, "callspec") else ""
    require("agents", None if any(packages.cache().glob(f"{agent or '*'}-*")) else unreachable())


def unreachable() -> str | None:
    if shutil.which("npm") is None:
        return "npm is not installed"
    asked = subprocess.run(["npm", "view", "@openai/codex", "version"], capture_output=True, timeout=60, check=False)
    return "the npm index can't be reached" if asked.returncode else None
