"""Every command and every program of docs/guides/export.md works as it is written."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from hermes_core.cli.main import main
from tests.export.conftest import MakeRun, rollout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "export.md"

BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def needed(program: str) -> list[str]:
    """The packages that a program imports and that are not here."""
    named = re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    return [name for name in named if find_spec(name) is None]


@pytest.mark.filterwarnings("ignore")
def test_the_page_s_examples_work(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require: Callable[[str, str | None], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    (tmp_path / "runs").mkdir()
    demo = [rollout(index=index, said=f"Answer {index}.", reward=float(index)) for index in range(2)]
    make_run(demo, "runs/demo")
    make_run([rollout("other")], "runs/more")
    missing = set()
    for language, block in BLOCKS:
        if language == "python":
            if absent := needed(block):
                missing.update(absent)
                continue
            (tmp_path / "program.py").write_text(block)
            runpy.run_path("program.py")
            continue
        for command in filter(None, block.splitlines()):
            program, *arguments = shlex.split(command)
            assert program == "hermes-rl"
            done = CliRunner().invoke(main, arguments)
            assert done.exit_code == 0, f"{command}: {done.output}"
    require("readers", f"not installed: {', '.join(sorted(missing))}" if missing else None)


def test_the_page_names_every_format() -> None:
    from hermes_core.export.formats import FORMATS

    page = PAGE.read_text()
    for pattern in (r"^\| `(\w+)` \|", r"^### (\w+)$"):
        shown = re.findall(pattern, page, re.MULTILINE)
        assert [name for name in shown if name in FORMATS] == list(FORMATS)
