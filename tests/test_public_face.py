"""What `from hermes_core import …` promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import hermes_core

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", hermes_core.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(hermes_core, name) is not None
    assert name in dir(hermes_core)


def test_the_stub_is_the_one_list_of_names() -> None:
    stub = ast.parse((ROOT / "hermes_core/__init__.pyi").read_text())
    imported = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert sorted(name.asname or "" for node in imported for name in node.names) == hermes_core.__all__
    assert len(hermes_core.__all__) > 150
    assert len({node.module for node in imported}) == len(imported), "one import for each module"


def test_a_name_that_is_none_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runtimes'"):
        hermes_core.Runtimes  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_is_loaded_before_it_is_used() -> None:
    program = "import sys, hermes_core; print(sorted(name for name in sys.modules if name.startswith('hermes_core.')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def internal(sources: Iterable[str]) -> set[str]:
    """The modules of the core, beside `hermes_core` itself, that these sources import from."""
    found = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hermes_core."):
            package = ROOT / node.module.replace(".", "/")
            modules = {name.name for name in node.names if (package / f"{name.name}.py").exists()}
            found |= {f"{node.module}.{name}" for name in modules} or {node.module}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("hermes_core.")}
    return found


MORE = {"hermes_agents": 5, "hermes_atropos": 18, "hermes_singularity": 6, "hermes_testing": 6}
"""The plugins that need more of the core's modules than two, and how many. The first two were parts of the core, and
the model server in the first reads messages and answers as the core's own loop does; containers of the third have the
supervisor of local sandboxes; the kit in the last tests how the core itself works."""


@pytest.mark.parametrize("project", sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")))
def test_a_plugin_needs_the_face_and_at_most_two_modules(project: str) -> None:
    sources = [path.read_text() for path in (ROOT / "plugins" / project / project).rglob("*.py")]
    assert len(internal(sources)) <= MORE.get(project, 2), internal(sources)


@pytest.mark.parametrize("guide", ["reference/parsers", "guides/writing-a-backend", "guides/writing-an-environment"])
def test_a_guide_needs_the_face_and_at_most_two_modules(guide: str) -> None:
    sources = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert sources
    assert len(internal(sources)) <= 2, internal(sources)
