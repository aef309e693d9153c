"""The files of the project itself agree with each other: what a change of one of them forgets, fails here."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hermes_core.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
LOCKS = sorted(path.stem for path in ROOT.glob("requirements/*.lock"))


def asked(name: str) -> list[Requirement]:
    """What `requirements/NAME.in` asks for, with what the files that it includes ask for."""
    found: list[Requirement] = []
    for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines():
        if line.startswith("-r "):
            found += asked(line.removeprefix("-r ").removesuffix(".in"))
        elif line and not line.startswith(("#", "-c ")):
            found.append(Requirement(line))
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_what_is_asked_for_with_hashes_and_without_addresses(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    assert "://" not in text and "--index-url" not in text
    _, *entries = re.split(r"^(?=[\w-])", text, flags=re.MULTILINE)
    versions = dict(entry.split(maxsplit=1)[0].split("==") for entry in entries)
    assert all(" \\\n    --hash=sha256:" in entry for entry in entries)
    assert versions.keys().isdisjoint({"torch", "triton"}), "`make lock` leaves out torch and what only torch needs"
    for requirement in asked(name):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), f"make lock NAMES={name}"


def test_every_list_of_requirements_has_its_lock() -> None:
    assert sorted(path.stem for path in ROOT.glob("requirements/*.in")) == sorted([*LOCKS, "torch"])


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_distribution_says_of_itself_what_the_core_says(folder: Path) -> None:
    core, own = (tomllib.loads((each / "pyproject.toml").read_text()) for each in (ROOT, folder))
    for key in ("license", "requires-python", "authors", "classifiers", "urls", "dynamic"):
        assert own["project"][key] == core["project"][key], key
    version = folder / own["tool"]["hatch"]["version"]["path"]
    assert version.resolve() == ROOT / "hermes_core" / "version.py"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / own["project"]["readme"]).is_file()


EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))


@pytest.mark.parametrize("folder", [*PROJECTS[1:], *EXAMPLES], ids=lambda folder: folder.name)
def test_a_distribution_asks_for_those_of_ours_that_it_imports(folder: Path) -> None:
    own = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = own.get("optional-dependencies", {}).values()
    asked_for = {
        Requirement(line).name for line in (*own.get("dependencies", ()), *(line for e in extras for line in e))
    }
    sources = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (hermes_\w+)", sources, re.MULTILINE)) - {folder.name}
    needed = {
        tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
        for project in PROJECTS
        if ("hermes_core" if project == ROOT else project.name) in imported
    }
    assert needed <= asked_for


def test_the_changelog_begins_with_the_version_that_is_built() -> None:
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None and heading[1] == __version__


def workflow(name: str) -> dict[str, Any]:
    """The jobs of a workflow."""
    jobs: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]
    return jobs


def test_the_workflows_run_what_is_there() -> None:
    jobs = workflow("ci") | workflow("agents")
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = {path for command in commands for path in re.findall(r"\.ci/\w+", command)}
    assert scripts == {".ci/run", ".ci/agents"}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_python_that_is_promised_is_tried() -> None:
    """The oldest is that of the Debian in which `.ci/run` runs."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r"Python :: (3\.\d+)$", "\n".join(core["classifiers"]), re.MULTILINE)
    assert core["requires-python"] == f">={promised[0]}"
    assert promised[1:] == workflow("ci")["python"]["strategy"]["matrix"]["version"]
    table = re.findall(r"^\| (3\.\d+) \|", (ROOT / "docs/reference/stability.md").read_text(), re.MULTILINE)
    assert table == promised


def test_the_hooks_of_a_commit_are_those_of_lint() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].split()[:2] for hook in repository["hooks"]]
    assert hooks == [[".venv/bin/ruff", "check"], [".venv/bin/ruff", "format"]]
