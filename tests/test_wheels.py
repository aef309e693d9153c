"""The wheels, installed into empty environments, list and work: an editable install hides a missing file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


OWN = ("hermes_", "hermes-rl", "_editable_impl_hermes", "__editable__")
"""How the names of what is ours begin in this interpreter's site-packages."""

OUT_OF_TREE = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "somebody-elses-plugin"
        version = "3.2"
        dependencies = ["hermes-rl>=0.1,<0.2"]

        [project.entry-points.hermes_core]
        elsewhere = "elsewhere"

        [tool.hatch.build.targets.wheel]
        packages = ["elsewhere"]
    """,
    "elsewhere/__init__.py": """
        from hermes_core.plugins.hookspecs import hookimpl

        HERMES_PLUGIN_API = 1

        @hookimpl
        def hermes_register_backends(registry):
            registry.add("copy-of-local", "hermes_core.sandbox.local.backend:LocalBackend", summary="local again")

        @hookimpl
        def hermes_register_environments(registry):
            registry.add("elsewhere", "elsewhere.env:Elsewhere", aliases=("else",), requires=("nothing",))

        @hookimpl
        def hermes_register_tools(registry):
            from elsewhere.env import SHOUT
            registry.add(SHOUT)
    """,
    "elsewhere/env.py": """
        from pydantic import BaseModel
        from hermes_core.environment import Environment
        from hermes_core.plugins.hookspecs import hookimpl
        from hermes_core.tools.base import Tool

        class Words(BaseModel):
            text: str

        async def shout(context, params):
            return params.text.upper()

        SHOUT = Tool(name="shout", params=Words, handler=shout, description="Shouts.", where="driver")

        class Elsewhere(Environment):
            name = "elsewhere"

            def items(self):
                return [{"id": "first"}, {"id": "second"}]

            def format_prompt(self, item):
                return f"write {item['id']} into answer"

            @hookimpl
            async def solve_trajectory(self, item, *, exec_tool):
                await exec_tool("write_file", {"path": "answer", "content": item["id"]})

            @hookimpl
            async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool):
                answer = await exec_tool("bash", {"command": "cat answer"})
                return float(answer.output == item["id"]), {"answer": answer.output}
    """,
}


@dataclass(frozen=True)
class Installed:
    """A virtual environment with some of our wheels, and nothing of this checkout."""

    folder: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the checkout."""
        return subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.folder,
            env={key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def hermes(self, *arguments: str | Path) -> str:
        """What `hermes-rl` prints, once it has exited with 0 and without complaint."""
        done = self.run("hermes-rl", *arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        assert "problem:" not in done.stderr
        return done.stdout

    def listed(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """A listing's rows by name."""
        return {row["name"]: row for row in json.loads(self.hermes(*arguments, "--json"))}


def build(project: Path, into: Path) -> Path:
    """The wheel of a project."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", into, project], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [wheel] = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("core_wheel"))


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that is installed here, except what is ours: neither packages nor metadata."""
    folder = tmp_path_factory.mktemp("dependencies")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OWN) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def installed(folder: Path, dependencies: Path, *wheels: Path) -> Installed:
    """An empty environment with these wheels, whose dependencies it finds without a network."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, *wheels], check=True, capture_output=True, timeout=120)
    # Only now: pip would take the dependencies' folder for a part of the environment.
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    environment = Installed(folder)
    origin = environment.run(
        "python", "-c", "import hermes_core, sys; print(hermes_core.__file__, *sys.path, sep='\\n')"
    )
    assert origin.stdout.startswith(str(site)), origin.stdout + origin.stderr
    assert str(ROOT) not in origin.stdout.replace(str(dependencies), ""), "the checkout must not be importable"
    return environment


def sources(package: Path) -> set[str]:
    """The files of a package that are under version control, or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", package.name],
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.splitlines() if (package.parent / name).exists()}


def test_the_core_alone(core_wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    core = installed(tmp_path / "venv", dependencies, core_wheel)
    assert core.run("python", "-c", "import hermes_swe_smith").returncode != 0
    assert {name: row["status"] for name, row in core.listed("plugins").items()} == {
        "core": "loaded",
        "tools": "loaded",
    }
    assert list(core.listed("backends")) == ["local"]
    assert list(core.listed("envs")) == ["tasks"]
    assert core.run("hermes-rl", "doctor", "--json").stdout.startswith("{")
    missing = core.run("hermes-rl", "rollout", "swe-smith", "--agent", "nop")
    assert (missing.returncode, "unknown environment 'swe-smith'" in missing.stderr) == (2, True)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "a", "prompt": "touch done", "check": "test -f done", "solution": "touch done"}))
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        assert rollout(core, "tasks", f"--env.dataset_name={tasks}", "--agent", agent) == reward


def test_the_core_and_the_swe_smith_plugin(core_wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    wheel = build(ROOT / "plugins" / "hermes_swe_smith", tmp_path)
    both = installed(tmp_path / "venv", dependencies, core_wheel, wheel)
    plugin = both.listed("plugins")["swe-smith"]
    assert (plugin["status"], plugin["distribution"]) == ("loaded", "hermes-rl-swe-smith")
    environments = both.listed("envs")
    assert set(environments) == {"tasks", "swe-smith"}
    assert environments["swe-smith"]["distribution"].startswith("hermes-rl-swe-smith ")
    code = "from hermes_core.runtime import Runtime; print(Runtime().environments.load('swe_smith').name)"
    loaded = both.run("python", "-c", code)
    assert loaded.stdout.strip() == "swe-smith", loaded.stderr


def test_the_core_and_a_plugin_from_elsewhere(core_wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name, text in OUT_OF_TREE.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(textwrap.dedent(text))
    both = installed(tmp_path / "venv", dependencies, core_wheel, build(project, tmp_path))
    plugin = both.listed("plugins")["elsewhere"]
    assert (plugin["distribution"], plugin["version"], plugin["status"]) == ("somebody-elses-plugin", "3.2", "loaded")
    assert both.listed("envs")["elsewhere"]["aliases"] == ["else"]
    assert both.listed("backends")["copy-of-local"]["plugin"] == "elsewhere"
    tools = {row["name"]: row for row in json.loads(both.hermes("tools", "--json"))["tools"]}
    assert tools["shout"]["where"] == "driver"
    assert rollout(both, "else", "--agent", "oracle", "--backend", "copy-of-local") == 1.0
    assert rollout(both, "elsewhere", "--agent", "nop") == 0.0


def rollout(environment: Installed, *arguments: str) -> float:
    """The mean reward of a run in which every rollout was scored; at whatever level this host allows."""
    summary = json.loads(environment.hermes("rollout", *arguments, "--allow-unisolated", "--json"))
    mean: float = summary["mean_reward"]
    assert summary["scored"] == summary["total"] > 0
    return mean


def test_the_wheels_hold_every_file_of_the_packages(core_wheel: Path, tmp_path: Path) -> None:
    plugin = ROOT / "plugins" / "hermes_swe_smith"
    wheels = {ROOT / "hermes_core": core_wheel, plugin / "hermes_swe_smith": build(plugin, tmp_path)}
    for package, wheel in wheels.items():
        files = zipfile.ZipFile(wheel).namelist()
        assert sources(package) <= set(files), f"{wheel.name} lacks files"
        others = {name.split("/")[0] for name in files} - {package.name}
        assert len(others) == 1 and others.pop().endswith(".dist-info")
        assert not [name for name in files if name.endswith(".pyc")]
