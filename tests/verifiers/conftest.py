"""What the tests of the adapter need: verifiers, which has an environment of its own, and tasks."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.selection import makes_tests_full


@pytest.fixture(scope="session")
@makes_tests_full
def verifiers_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where verifiers is not installed; imports it where it is, whatever it warns of."""
    there = importlib.util.find_spec("verifiers") is not None
    how = "`make setup EXTRAS=verifiers`, then `.venv-verifiers/bin/python -m pytest -m full tests/verifiers`"
    require("verifiers", None if there else f"it is not installed here; {how}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import hermes_rl  # noqa: F401


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration of three tasks: write a number into a file."""
    monkeypatch.setenv("HERMES_STATE_DIR", str(tmp_path / "state"))
    rows = [
        {
            "id": f"task-{n}",
            "prompt": f"Write {n} into out.txt",
            "check": f"grep -qx {n} out.txt",
            "solution": f"echo {n} > out.txt",
        }
        for n in range(3)
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset_name": str(path), "system_prompt": "Be quick."}
