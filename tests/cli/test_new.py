"""`hermes-rl new`: each package that it writes passes its own tests as it is; a name that can't be one is refused."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import time
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hermes_core.cli.main import main
from hermes_core.cli.new import KINDS, spellings, template, write_package
from hermes_core.runtime import Runtime
from hermes_core.version import __version__

QUICK = "tool"
"""The kind that stands for the others, which `test_wheels.py` tests, installed from wheels."""


def new(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new", *arguments])


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_has_its_own_name_everywhere(kind: str, tmp_path: Path) -> None:
    done = new(kind, "my-first", "--dir", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert f"cd {tmp_path / 'my-first'}" in done.output
    files = {path.relative_to(tmp_path / "my-first"): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "README.md", "my_first/__init__.py", "my_first/py.typed", "tests/test_my_first.py"} <= {
        str(path) for path in files
    }
    assert not [path for path in files if "example" in str(path).lower()]
    assert not [path for path, file in files.items() if f"example_{kind}" in file.read_text().lower()]
    project = tomllib.loads(files[Path("pyproject.toml")].read_text())["project"]
    assert project["name"] == "hermes-rl-my-first"
    assert project["entry-points"] == {"hermes_core": {"my-first": "my_first"}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_takes_this_version_s_range(kind: str) -> None:
    major, minor, _ = __version__.split(".")
    (project,) = [tomllib.loads(text)["project"] for path, text in template(kind) if path.name == "pyproject.toml"]
    assert project["dependencies"] == [f"hermes-rl>={major}.{minor},<{major}.{int(minor) + 1}"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_packages_differ_only_in_what_they_are(kind: str) -> None:
    def project(of: str) -> Any:
        (text,) = [text for path, text in template(of) if path.name == "pyproject.toml"]
        described = {**tomllib.loads(text.replace(f"example_{of}", "x").replace(f"example-{of}", "x"))}
        described["project"].pop("description")
        # A backend's tests are those of the kit.
        described["tool"]["pytest"]["ini_options"].pop("addopts", None)
        tools = described["project"]["optional-dependencies"]["dev"]
        described["project"]["optional-dependencies"]["dev"] = [each for each in tools if "hermes-rl" not in each]
        return described

    assert project(kind) == project("tool")


@pytest.mark.parametrize("kind", KINDS)
def test_the_plugin_s_name_is_no_identifier_that_others_could_shadow(kind: str) -> None:
    for path, text in template(kind):
        if path.suffix == ".py":
            assert f"example_{kind}" not in _identifiers(ast.parse(text)), path


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_no_class_is_called_like_what_its_module_imports(kind: str) -> None:
    imported = {name for path, text in template(kind) if path.suffix == ".py" for name in _imported(text)}
    names = {re.sub(r"\B(?=[A-Z])", "-", name).lower() for name in imported if name.isalpha()} | {kind}
    for name in names - {f"example-{kind}"}:
        placeholder, made = f"Example{kind.capitalize()}", spellings(kind, name)[f"Example{kind.capitalize()}"]
        for path, text in template(kind):
            if path.suffix == ".py":
                classes = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}
                assert not {each.replace(placeholder, made) for each in classes} & _imported(text), (path, name)


def _identifiers(tree: ast.AST) -> set[str]:
    """Every name that the code binds or reads."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.alias():
                found.add(node.asname or node.name)
    return found


def _imported(text: str) -> set[str]:
    return {node.asname or node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.alias)}


@pytest.mark.parametrize("name", ["word_count", "word-count", "a1"])
def test_words_are_joined_by_either_sign(name: str, tmp_path: Path) -> None:
    assert new("tool", name, "--dir", str(tmp_path)).exit_code == 0


@pytest.mark.full  # so do those of all kinds, installed, in tests/test_wheels.py
def test_the_package_passes_its_tests(tmp_path: Path) -> None:
    assert new(QUICK, "my-first", "--dir", str(tmp_path)).exit_code == 0
    folder = tmp_path / "my-first"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", folder / "pyproject.toml", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("tool", "My-tool", "can't be the name of a plugin"),
        ("tool", "-tool", "no such option"),
        ("tool", "a/b", "can't be the name of a plugin"),
        ("tool", "a" * 41, "40 at most"),
        ("tool", "lambda", "can't be called 'lambda'"),
        ("tool", "json", "a Python module 'json' already"),
        ("tool", "hermes-core", "a Python module 'hermes_core' already"),
        ("tool", "read-file", "tool 'read_file' already exists, provided by plugin 'core' (hermes-rl"),
        ("environment", "tasks", "environment 'tasks' already exists"),
        ("agent", "oracle", "agent 'oracle' already exists"),
        ("tol", "a-tool", "invalid value for 'KIND'"),
    ],
)
def test_a_name_that_can_t_be_one_is_refused(kind: str, name: str, says: str, tmp_path: Path) -> None:
    done = new(kind, name, "--dir", str(tmp_path))
    assert done.exit_code == 2 and says in done.output, done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my-first").mkdir()
    done = new("tool", "my-first", "--dir", str(tmp_path))
    assert done.exit_code == 2 and "exists already" in done.output
    assert list((tmp_path / "my-first").iterdir()) == []


def test_nothing_in_a_backend_is_called_example(tmp_path: Path) -> None:
    folder = write_package(Runtime(), "backend", "acme-cloud", tmp_path)
    sources = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert "class AcmeCloudBackendSandbox(" in sources and "acme-cloud-{spec.creation_id}" in sources
    assert "Example" not in sources and "example-" not in sources


def test_a_backend_s_machine_ends_before_anything_in_it_sees_the_end_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that outlived a command would say that it was killed, which is no failure of the infrastructure."""
    name = f"acme{uuid.uuid4().hex[:8]}"
    monkeypatch.syspath_prepend(str(write_package(Runtime(), "backend", name, tmp_path)))
    provider: Any = importlib.import_module(f"{name}.provider")
    machine, told, children = "test", tmp_path / "told", 8
    guest = f"for _ in $(seq {children}); do (sleep 1000; echo $? >>{told}) & done; wait"
    subprocess.run(
        provider.starter(machine, {}, ["sh", "-c", guest]), env=provider.environment(machine), check=True, timeout=60
    )
    while len(provider._processes(machine)) < 2 + 2 * children:
        time.sleep(0.01)

    def kill(process: int, number: int) -> None:
        kill_now(process, number)
        time.sleep(0.02)  # for the one that started it, if it lives

    kill_now = os.kill
    monkeypatch.setattr(provider.os, "kill", kill)
    provider.destroy(machine)
    assert not told.exists() and machine not in provider.machines() and not provider._processes(machine)
    provider.MACHINES.rmdir()
