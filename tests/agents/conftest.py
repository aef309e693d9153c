"""What the agents' tests need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as one:
        yield one
