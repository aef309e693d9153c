"""Fifty drivers killed at random moments, each with twenty background processes that the next one takes over."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

pytestmark = pytest.mark.stress

_PATH = Path(__file__).parents[1] / "sandbox" / "test_recovery.py"
_spec = importlib.util.spec_from_file_location("recovery_tests", _PATH)
assert _spec is not None and _spec.loader is not None
recovery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(recovery)


@pytest.mark.parametrize("seed", range(50))
async def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    await recovery.killed_at_a_moment(tmp_path, random.Random(1000 + seed).uniform(0.0, 3.0))
