"""What the Harbor tests share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import hermes_docker
import hermes_harbor
import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings


@pytest.fixture
async def host_runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime with this plugin, for tests at level `private-root` on `local`, which only root can run."""
    if os.geteuid() != 0:
        pytest.skip("only root's driver can give slots roots of their own")
    async with Runtime(
        Settings(state_dir=tmp_path / "state"), plugins=[hermes_harbor], load_entry_points=False
    ) as made:
        yield made


@pytest.fixture
async def runtime(tmp_path: Path, docker_images: tuple[str, str]) -> AsyncIterator[Runtime]:
    """A runtime with Docker and this plugin."""
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, plugins=[hermes_docker, hermes_harbor], load_entry_points=False) as made:
        yield made
