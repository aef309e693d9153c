"""The wheels, installed into empty environments, list and work: an editable install hides a missing file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hermes_core.cli.new import KINDS
from hermes_core.version import __version__
from tests.test_import_cost import HEAVY

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {
    "hermes_core": ROOT,
    **{path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))},
}
DIST = os.environ.get("HERMES_TEST_DIST")
"""A folder with the distributions to be released (`make release-check`). Without it, they are built here."""

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


FEWER = """
[mypy]
strict = True
[mypy-torch.*,transformers.*,wandb.*,polars.*]
follow_imports = skip
"""
"""Settings of mypy that skip what most of its time would go to: authors who install the plugins have no torch."""

TYPED = {
    "author/__init__.py": """
        from hermes_core import Registrar, ToolRegistrar, hookimpl

        HERMES_PLUGIN_API = 1

        @hookimpl
        def hermes_register_backends(registry: Registrar) -> None:
            registry.add("author", "author.backend:AuthorBackend", summary="a backend")

        @hookimpl
        def hermes_register_tools(registry: ToolRegistrar) -> None:
            from author.tools import add, shout

            registry.add(shout)
            registry.add(add)

        @hookimpl
        def hermes_register_parsers(registry: Registrar) -> None:
            registry.add("author", "author.parser:AuthorParser")
    """,
    "author/backend.py": """
        import asyncio
        from collections.abc import Mapping, Sequence
        from typing import ClassVar

        from hermes_core import (
            AsyncioStreamChannel,
            Backend,
            Capabilities,
            Channel,
            Diagnosis,
            Isolation,
            Network,
            ProvisionError,
            Sandbox,
            SandboxConfig,
            SandboxInfo,
            SandboxSpec,
            SandboxStatus,
            Settings,
        )

        class AuthorConfig(SandboxConfig):
            root: str = "/tmp"

        class AuthorSandbox(Sandbox):
            def __init__(self, sandbox_id: str) -> None:
                self.id = sandbox_id

            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                return await AsyncioStreamChannel.spawn(list(argv), env=dict(env or {}))

            async def status(self) -> SandboxStatus:
                return SandboxStatus.RUNNING

            async def terminate(self) -> None:
                await asyncio.sleep(0)

        class AuthorBackend(Backend):
            name: ClassVar[str] = "author"
            config_class: ClassVar[type[SandboxConfig]] = AuthorConfig
            capabilities = Capabilities(frozenset({Isolation.SHARED}), network=frozenset({Network.OPEN}))

            def __init__(self, settings: Settings) -> None:
                self.owner = settings.owner

            async def create(self, spec: SandboxSpec) -> Sandbox:
                if not isinstance(spec.config, AuthorConfig):
                    raise ProvisionError("not ours", hint="use AuthorConfig")
                return AuthorSandbox(f"{spec.config.root}/{spec.creation_id}")

            async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
                return [SandboxInfo("a", owner or "", "b", 0.0, SandboxStatus.ENDED)]

            async def terminate_id(self, sandbox_id: str) -> None:
                await AuthorSandbox(sandbox_id).terminate()

            async def check(self) -> Diagnosis:
                return Diagnosis(True, "works", advice=("nothing to do",))
    """,
    "author/environment.py": """
        from collections.abc import Mapping, Sequence
        from typing import Any

        from hermes_core import (
            AgentResult,
            Environment,
            EnvironmentConfig,
            ExecutionResult,
            ExecTool,
            Item,
            RolloutHandle,
            hookimpl,
        )

        class AuthorConfig(EnvironmentConfig):
            count: int = 3

        class AuthorEnvironment(Environment):
            name = "author"
            config_class = AuthorConfig
            config: AuthorConfig

            def items(self) -> Sequence[Item]:
                return [{"id": str(number)} for number in range(self.config.count)]

            def format_prompt(self, item: Item) -> str:
                return f"write {item['id']}"

            @hookimpl
            async def setup_trajectory_workspace(self, item: Item, *, rollout: RolloutHandle) -> Mapping[str, Any]:
                await rollout.commands.write_file("given", str(item["id"]).encode())
                return {"given": item["id"]}

            @hookimpl
            async def solve_trajectory(self, item: Item, exec_tool: ExecTool) -> None:
                await exec_tool("bash", {"command": f"echo {item['id']} >answer"}, timeout=5)

            @hookimpl
            async def verify_and_score_trajectory(
                self, item: Item, result: AgentResult, *, rollout: RolloutHandle
            ) -> tuple[float, dict[str, Any]]:
                done = await rollout.commands.run("cat answer", timeout_s=5)
                return float(done.ok and done.text == item["id"]), {"turns": result.turns_used}

        def said(result: ExecutionResult) -> str:
            return result.output
    """,
    "author/tools.py": """
        from hermes_core import CallContext, Tool, ToolParams, function_tool

        class Words(ToolParams):
            text: str

        async def handle(context: CallContext, params: Words) -> str:
            done = await context.require_commands().run(["echo", params.text])
            return done.text.upper()

        shout = Tool(name="shout", params=Words, handler=handle, description="Shouts.")

        @function_tool
        def add(first: int, second: int) -> int:
            \"\"\"Add two numbers.\"\"\"
            return first + second
    """,
    "author/agent.py": """
        from hermes_core import Agent, AgentResult, AgentSettings, AgentTask, StopReason

        class AuthorSettings(AgentSettings):
            answer: str = "42"

        class AuthorAgent:
            name = "author"
            config_class = AuthorSettings

            def __init__(self, settings: AuthorSettings) -> None:
                self.settings = settings

            async def run(self, task: AgentTask) -> AgentResult:
                arguments = {"command": f"echo {self.settings.answer} >answer"}
                await task.tool_handler("terminal", arguments, task.trajectory_id)
                task.result.stop(StopReason.FINISHED)
                return task.result

            async def aclose(self) -> None:
                pass

        agent: Agent = AuthorAgent(AuthorSettings())
    """,
    "author/parser.py": """
        from collections.abc import Mapping, Sequence
        from typing import Any

        from hermes_core import ParsedCall, ParsedText, Parser

        class AuthorParser:
            name = "author"

            def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedText:
                return ParsedText(content=text, calls=(ParsedCall("terminal", {"command": text}),))

        parser: Parser = AuthorParser()
    """,
    "author/script.py": """
        import asyncio
        import sys

        from hermes_core import Runtime, Settings, run_rollouts, validate
        from hermes_docker.backend import DockerBackend
        from hermes_docker.config import DockerConfig
        from hermes_modal import ModalSandboxConfig, ModalToolBackend, load_profiles
        from hermes_modal_emulator import EmulatorError, ModalEmulator
        from hermes_ssh.backend import SshBackend
        from hermes_ssh.config import SshConfig
        from hermes_swe_smith.config import SweSmithConfig
        from hermes_swe_smith.environment import SweSmithEnvironment

        async def main() -> float | None:
            async with Runtime(Settings.load()) as runtime:
                if not (await validate(runtime, "author")).sound:
                    return None
                summary = await run_rollouts(runtime, "author", agent="oracle")
                return summary.mean_reward

        async def on_modal(config: ModalSandboxConfig) -> str:
            async with ModalToolBackend.with_profiles(profiles={"default": config}) as backend:
                slot = await backend.acquire("a")
                result = await backend.execute(slot, "bash", {"command": "true"}, timeout_s=5)
                await backend.release(slot)
                return result.output

        def profiles() -> dict[str, ModalSandboxConfig]:
            try:
                with ModalEmulator(mode="plain") as emulator:
                    emulator.fault("SandboxCreateV2", "UNAVAILABLE", times=2)
                    return load_profiles(environ=emulator.environment)
            except EmulatorError:
                return {}

        CONFIGS = (DockerConfig(image="python:3.11", pids_limit=64), SshConfig(host="a"))
        BACKENDS = (DockerBackend(), SshBackend())
        ENVIRONMENT = SweSmithEnvironment(SweSmithConfig(dataset_name="tasks.jsonl"))

        if __name__ == "__main__":
            sys.exit(asyncio.run(main()) != 1.0)
    """,
}
"""What authors write, with types: mypy reads it beside the installed packages."""

MISTAKES = """

class Misspelt(Environment):
    async def verify_and_score_trajectory(self, item: Item, *, rollout: RolloutHandle) -> float:
        async with rollout.fresh_slt() as fresh:
            return float(fresh.alone)

class NoReward(Environment):
    async def verify_and_score_trajectory(self, item: Item) -> str:
        return "1"

class NotAwaited(Environment):
    async def setup_trajectory_workspace(self, item: Item, *, rollout: RolloutHandle) -> dict[str, Any]:
        rollout.commands.write_file("given", b"")
        return {}
"""
"""What an author may do wrong in an environment."""

FOUND = (
    '"RolloutHandle" has no attribute "fresh_slt"',
    'Signature of "verify_and_score_trajectory" incompatible with supertype "hermes_core.environment.Environment"',
    'Value of type "Coroutine[Any, Any, None]" must be used',
)
"""What mypy says of each of these mistakes."""


ADAPTERS = {
    "hermes_trl": ("trl", "from hermes_trl.run import TRL; TRL.check()"),
    "hermes_verifiers": ("verifiers", "import hermes_rl"),
    "hermes_tinker": ("tinker", "from hermes_tinker.versions import TINKER; TINKER.check()"),
    "hermes_inspect": ("inspect-ai", "import hermes_inspect.provider"),
    "hermes_agent": ("hermes-agent", "import hermes_agent.environment"),
}
"""The adapters for trainers and for Inspect: what each adapts, and the code with which its use begins."""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with some of our wheels, and nothing of this checkout."""

    folder: Path

    def run(
        self, *command: str | Path, cwd: Path | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the checkout."""
        return subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=cwd or self.folder,
            env={key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR") if key in os.environ},
            capture_output=True,
            text=True,
            timeout=timeout,
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


def build(project: Path, into: Path, target: str = "wheel") -> Path:
    """Build a distribution, by the build backend of all of ours. pip would call the same, in five times the time."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", into]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [found] = find(project, into, target)
    return found


def find(project: Path, folder: Path, target: str) -> Iterator[Path]:
    """Find the distributions of a project in a folder."""
    name = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    return folder.glob(f"{name}-[0-9]*{'.whl' if target == 'wheel' else '.tar.gz'}")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all our distributions. They are built once, for all worker processes."""
    if DIST:
        return Path(DIST).resolve()
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "dist"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor() as several:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = [(project, target) for project in PROJECTS.values() for target in ("sdist", "wheel")]
        missing = [(project, folder, target) for project, target in wanted if not [*find(project, folder, target)]]
        [*several.map(lambda each: build(*each), missing)]
    return folder


@pytest.fixture(scope="module")
def wheels(dist: Path) -> dict[str, Path]:
    """The wheel of each of our distributions, by its package."""
    return {name: next(find(project, dist, "wheel")) for name, project in PROJECTS.items()}


@pytest.fixture(scope="module")
def core_wheel(wheels: dict[str, Path]) -> Path:
    return wheels["hermes_core"]


@pytest.fixture(scope="module")
def plugin_wheels(wheels: dict[str, Path]) -> dict[str, Path]:
    """The wheel of every distribution but the core, by its package."""
    return {name: wheel for name, wheel in wheels.items() if name != "hermes_core"}


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
    subprocess.run([*command, "--no-compile", *wheels], check=True, capture_output=True, timeout=120)
    # Only now: pip would take the dependencies' folder for a part of the environment.
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    environment = Installed(folder)
    origin = environment.run(
        "python", "-c", "import hermes_core, sys; print(hermes_core.__file__, *sys.path, sep='\\n')"
    )
    assert origin.stdout.startswith(str(site)), origin.stdout + origin.stderr
    assert str(ROOT) not in origin.stdout.replace(str(dependencies), ""), "the checkout must not be importable"
    return environment


def files_of(folder: Path) -> set[str]:
    """The files below a folder that are under version control, or would be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (folder / name).exists()}


@pytest.mark.full  # installs wheels
def test_the_core_alone(core_wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    core = installed(tmp_path / "venv", dependencies, core_wheel)
    assert core.run("python", "-c", "import hermes_swe_smith").returncode != 0
    assert {name: row["status"] for name, row in core.listed("plugins").items()} == {
        "core": "loaded",
    }
    assert list(core.listed("backends")) == ["local"]
    assert list(core.listed("envs")) == ["prompts", "tasks"]
    assert core.run("hermes-rl", "doctor", "--json").stdout.startswith("{")
    missing = core.run("hermes-rl", "rollout", "swe-smith", "--agent", "nop")
    assert (missing.returncode, "unknown environment 'swe-smith'" in missing.stderr) == (2, True)
    commands, agents = core.run("hermes-rl", "commands"), core.run("hermes-rl", "agents", "--json")
    assert "not installed: conformance (pip install hermes-rl-testing)\n" in commands.stderr
    assert re.search(r"not installed: .*\bcodex, .*\(pip install hermes-rl-agents\)", agents.stderr)
    for asks in (("hermes-rl", "atropos"), ("python", "-c", "from hermes_core.atropos import HermesAgentBaseEnv")):
        missing = core.run(*asks)
        assert (missing.returncode != 0, "install" in missing.stderr) == (True, True)
        assert "hermes-rl-atropos" in missing.stderr
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "a", "prompt": "touch done", "check": "test -f done", "solution": "touch done"}))
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        assert rollout(core, "tasks", f"--env.dataset_name={tasks}", "--agent", agent) == reward


@pytest.mark.full  # installs wheels once more
def test_the_core_and_the_swe_smith_plugin(
    core_wheel: Path, plugin_wheels: dict[str, Path], dependencies: Path, tmp_path: Path
) -> None:
    both = installed(tmp_path / "venv", dependencies, core_wheel, plugin_wheels["hermes_swe_smith"])
    plugin = both.listed("plugins")["swe-smith"]
    assert (plugin["status"], plugin["distribution"]) == ("loaded", "hermes-rl-swe-smith")
    environments = both.listed("envs")
    assert set(environments) == {"prompts", "tasks", "swe-smith"}
    assert environments["swe-smith"]["distribution"].startswith("hermes-rl-swe-smith ")
    code = "from hermes_core.runtime import Runtime; print(Runtime().environments.load('swe_smith').name)"
    loaded = both.run("python", "-c", code)
    assert loaded.stdout.strip() == "swe-smith", loaded.stderr
    for module, install in (
        ("hermes_swe_smith", "pip install hermes-rl-atropos"),
        ("hermes_swe_smith.demo", "pip install 'hermes-rl-swe-smith[demo]'"),
    ):
        refused = both.run("python", "-m", module)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
        assert install in refused.stderr


@pytest.mark.full  # installs wheels once more
def test_a_plugin_that_extends_another_asks_for_it(
    core_wheel: Path, plugin_wheels: dict[str, Path], dependencies: Path, tmp_path: Path
) -> None:
    own, extended = plugin_wheels["hermes_make_tasks"], plugin_wheels["hermes_swe_smith"]
    assert requirements(own) == {"hermes-rl", "hermes-rl-swe-smith"}
    assert requirements(extended) == {"hermes-rl"}
    both = installed(tmp_path / "venv", dependencies, core_wheel, own, extended)
    assert both.listed("commands")["make-tasks"]["distribution"].startswith("hermes-rl-make-tasks ")
    assert "op-change" in both.hermes("make-tasks", "--list-kinds")


@pytest.mark.full  # installs wheels once more
def test_the_core_and_a_plugin_from_elsewhere(core_wheel: Path, dependencies: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, OUT_OF_TREE)
    both = installed(tmp_path / "venv", dependencies, core_wheel, build(project, tmp_path))
    plugin = both.listed("plugins")["elsewhere"]
    assert (plugin["distribution"], plugin["version"], plugin["status"]) == ("somebody-elses-plugin", "3.2", "loaded")
    assert both.listed("envs")["elsewhere"]["aliases"] == ["else"]
    assert both.listed("backends")["copy-of-local"]["plugin"] == "elsewhere"
    tools = {row["name"]: row for row in json.loads(both.hermes("tools", "--json"))["tools"]}
    assert tools["shout"]["where"] == "driver"
    assert rollout(both, "else", "--agent", "oracle", "--backend", "copy-of-local") == 1.0
    assert rollout(both, "elsewhere", "--agent", "nop") == 0.0


@pytest.mark.full  # installs wheels once for each adapter
@pytest.mark.parametrize("package", ADAPTERS)
def test_an_adapter_alone_is_light_and_says_which_version_it_was_tested_with(
    core_wheel: Path, plugin_wheels: dict[str, Path], dependencies: Path, tmp_path: Path, package: str
) -> None:
    adapted, use = ADAPTERS[package]
    assert requirements(plugin_wheels[package]) == {"hermes-rl"}, "it needs another plugin"
    alone = installed(tmp_path / "venv", dependencies, core_wheel, plugin_wheels[package])
    imported = alone.run("python", "-X", "importtime", "-c", f"import {package}")
    assert imported.returncode == 0, imported.stderr
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.stderr.splitlines()}
    assert modules.isdisjoint({*HEAVY, "trl", "transformers", "accelerate", "tinker"})
    [site] = alone.folder.glob("lib/python*/site-packages")
    another = site / f"{adapted.replace('-', '_')}-99.9.dist-info"
    another.mkdir()
    (another / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {adapted}\nVersion: 99.9\n")
    used = alone.run("python", "-c", f"import logging; logging.basicConfig(); {use}")
    said = rf"hermes-rl-\S+ was tested with {adapted} [0-9.]+, and this is \S*\s?99\.9"
    assert re.search(said, used.stderr), used.stderr


@pytest.mark.long
@pytest.mark.full
@pytest.mark.timeout(900)
def test_authors_code_passes_the_type_checker_unless_it_is_wrong_and_what_new_writes_also_its_tests(
    core_wheel: Path, plugin_wheels: dict[str, Path], dependencies: Path, tmp_path: Path
) -> None:
    core = installed(tmp_path / "core", dependencies, core_wheel)
    folder = tmp_path / "empty"
    folder.mkdir()
    packages = {kind: folder / f"my-{kind}" for kind in KINDS}
    for kind, package in packages.items():
        core.hermes("new", kind, package.name, "--dir", folder)
    wheels = [build(package, tmp_path / kind) for kind, package in packages.items()]
    together = installed(tmp_path / "together", dependencies, core_wheel, *plugin_wheels.values(), *wheels)
    assert {f"my-{kind}" for kind in KINDS} <= {name for name, row in together.listed("plugins").items()}
    for package in packages.values():
        done = together.run("python", "-P", "-m", "pytest", "-q", "-p", "no:asyncio", cwd=package)
        assert done.returncode == 0, f"pytest of {package.name}: {done.stdout}{done.stderr}"
    write(tmp_path / "project", TYPED)
    # All in one run, as most of what mypy reads is our own packages; of the new ones, what their own settings ask for.
    checked = [tmp_path / "project" / "author"]
    for kind, package in packages.items():
        settings = tomllib.loads((package / "pyproject.toml").read_text())["tool"]["mypy"]
        assert settings == {"strict": True, "files": [f"my_{kind}", "tests"]}
        checked += [package / each for each in settings["files"]]
    (tmp_path / "mypy.ini").write_text(FEWER)
    check = ("python", "-P", "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache")
    done = together.run(*check, *checked)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sum(len([*folder.rglob("*.py")]) for folder in checked)
    assert f"in {files} source files" in done.stdout
    script = tmp_path / "project" / "author" / "script.py"
    script.write_text(script.read_text() + "\nDockerConfig(image=1)\nModalEmulator(port='80')\nreveal_type(BACKENDS)\n")
    environment = tmp_path / "project" / "author" / "environment.py"
    environment.write_text(environment.read_text() + MISTAKES)
    wrong = together.run(*check, script, environment)
    assert wrong.stdout.count("error: ") == 2 + len(FOUND), wrong.stdout
    assert [each for each in FOUND if each not in wrong.stdout] == [], wrong.stdout
    assert "hermes_docker.backend.DockerBackend, hermes_ssh.backend.SshBackend" in wrong.stdout


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder, by their paths."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


def requirements(wheel: Path) -> set[str]:
    """The distributions of ours that a wheel depends on, extras aside."""
    with zipfile.ZipFile(wheel) as files:
        [metadata] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = files.read(metadata).decode().splitlines()
    named = [re.match(r"Requires-Dist: ([\w-]+)", line) for line in lines if "extra ==" not in line]
    return {each[1] for each in named if each and each[1].startswith("hermes-rl")}


def rollout(environment: Installed, *arguments: str) -> float:
    """The mean reward of a run in which every rollout was scored; at whatever level this host allows."""
    summary = json.loads(environment.hermes("rollout", *arguments, "--allow-unisolated", "--json"))
    mean: float = summary["mean_reward"]
    assert summary["scored"] == summary["total"] > 0
    return mean


@pytest.mark.full  # builds wheels
def test_the_wheels_hold_every_file_of_the_packages(core_wheel: Path, plugin_wheels: dict[str, Path]) -> None:
    for name, wheel in {"hermes_core": core_wheel, **plugin_wheels}.items():
        project = PROJECTS[name]
        files = set(zipfile.ZipFile(wheel).namelist())
        modules = {path.name for path in project.glob("*.py")}
        sources = {file for file in files_of(project) if file.startswith(f"{name}/")}
        assert {f"{name}/py.typed"} | sources | modules <= files, f"{wheel.name} lacks files"
        others = {file.split("/")[0] for file in files} - {name} - modules
        assert len(others) == 1 and others.pop().endswith(".dist-info")
        assert not [file for file in files if file.endswith(".pyc")]


@pytest.mark.full  # builds distributions
@pytest.mark.parametrize("package", PROJECTS)
def test_an_sdist_holds_nothing_else_and_makes_the_same_wheel(
    dist: Path, wheels: dict[str, Path], tmp_path: Path, package: str
) -> None:
    project = PROJECTS[package]
    with tarfile.open(next(find(project, dist, "sdist"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    assert {"LICENSE", "README.md", "pyproject.toml", f"{package}/py.typed"} <= names
    # The build backend adds the checkout's .gitignore.
    assert names - {"PKG-INFO", ".gitignore"} <= files_of(project)
    [unpacked] = [path for path in tmp_path.iterdir() if path.is_dir()]
    again = build(unpacked, tmp_path)
    assert again.name == wheels[package].name
    assert contents(again) == contents(wheels[package])


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


@pytest.mark.full  # builds distributions
def test_all_distributions_have_the_version_of_the_core(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()} - {"lock"}
    assert len(names) == 2 * len(PROJECTS)
    assert {name.split("-")[1].removesuffix(".tar.gz") for name in names} == {__version__}
