"""Every program of the gallery does what `examples/README.md` says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS = re.findall(
    r"^\| \[`(\w+\.py)`\]\(\1\) \| .* \| `(.*?)`( …)? \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE
)


def test_every_program_is_in_the_gallery() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize(("name", "shown", "more"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_program_prints_what_the_gallery_says(name: str, shown: str, more: str, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first == shown
    assert bool(others) == bool(more)
    assert not done.stderr and not [*tmp_path.iterdir()]
