"""Programs are fetched once, whole, and by one process at a time. The packages are files of the test."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import hermes_agents
import pytest
from click.testing import CliRunner
from hermes_agents.packages import NpmPackages, PythonPackages, cache
from hermes_agents.program import AgentProgram, ProgramAgent

from hermes_core import Registrar, hookimpl
from hermes_core.cli.doctor import examine
from hermes_core.cli.main import main
from hermes_core.errors import ConfigError, UsageError
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "aider",
    "claude-code",
    "codex",
    "gemini-cli",
    "hermes",
    "kimi-code",
    "mini-swe-agent",
    "opencode",
    "pi",
    "qwen-coder",
    "terminus-2",
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def npm_package(tmp_path: Path) -> str:
    """A package of npm with one program and an install script, which must not run."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    about = {"name": "tiny", "version": "1.0.0", "scripts": {"postinstall": f"touch {tmp_path}/ran"}}
    path = tmp_path / "tiny-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in {"package.json": json.dumps(about), "bin/tiny": "#!/bin/sh\n", "more": "x"}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode = len(text), 0o755
            tar.addfile(member, io.BytesIO(text.encode()))
    return str(tmp_path / "tiny-{version}.tgz")


async def test_an_npm_package_is_fetched_once(tmp_path: Path, npm_package: str) -> None:
    package = NpmPackages((npm_package,), keep={"tiny": "node_modules/tiny/bin/tiny"})
    folders = await asyncio.gather(*(package.fetch("tiny", "1.0.0") for _ in range(3)))
    [folder] = {*folders}
    assert folder.parent == cache() == tmp_path / "cache" / "hermes-rl" / "agents"
    assert [path.name for path in folder.iterdir()] == ["tiny"]
    assert (folder / "tiny").stat().st_mode & 0o111 and not (tmp_path / "ran").exists()
    (tmp_path / "tiny-1.0.0.tgz").unlink()
    assert await package.fetch("tiny", "1.0.0") == folder


async def test_what_can_not_be_fetched_leaves_nothing(npm_package: str) -> None:
    package = NpmPackages((npm_package,))
    with pytest.raises(ConfigError, match="npm failed with"):
        await package.fetch("tiny", "2.0.0")
    assert [path.name for path in cache().iterdir() if not path.name.endswith(".lock")] == []
    with pytest.raises(ConfigError, match="can't be a version"):
        await package.fetch("tiny", "../../1.0.0")


async def test_a_cancelled_fetch_leaves_nothing(npm_package: str) -> None:
    fetching = asyncio.create_task(NpmPackages((npm_package,)).fetch("tiny", "1.0.0"))
    while not any(path.suffix == ".part" for path in cache().glob(".*")):
        await asyncio.sleep(0.001)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert [path.name for path in cache().iterdir() if not path.name.endswith(".lock")] == []


async def test_without_npm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"npm is needed once.*install Node\.js"):
        await NpmPackages(("tiny",)).fetch("tiny", "1.0.0")


async def test_another_declaration_is_fetched_again(npm_package: str) -> None:
    await NpmPackages((npm_package,), keep={"tiny": "node_modules/tiny/bin/tiny"}).fetch("tiny", "1.0.0")
    both = {"tiny": "node_modules/tiny/bin/tiny", "more": "node_modules/tiny/more"}
    folder = await NpmPackages((npm_package,), keep=both).fetch("tiny", "1.0.0")
    assert {path.name for path in folder.iterdir()} == {"tiny", "more"}


async def test_the_check_says_whether_a_program_is_there_or_can_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, npm_package: str
) -> None:
    package = NpmPackages((npm_package,))
    before = package.check("tiny", "1.0.0")
    assert before.usable and "not fetched yet" in before.summary and "agents install tiny" in before.advice[0]
    folder = await package.fetch("tiny", "1.0.0")
    assert str(folder) in package.check("tiny", "1.0.0").summary
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert package.check("tiny", "1.0.0").usable
    lacking = package.check("tiny", "2.0.0")
    assert not lacking.usable and "npm is needed" in lacking.summary and "Node.js" in lacking.advice[0]
    monkeypatch.setenv("PATH", path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    closed = PythonPackages(("tiny",)).check("tiny", "1.0.0")
    assert not closed.usable and "can't be written" in closed.summary and "XDG_CACHE_HOME" in closed.advice[0]


class Wants(ProgramAgent):
    program = AgentProgram(
        "wants", ("wants",), version="1.0", needs=("sh", "a-program-that-is-not-there"), package=NpmPackages(())
    )


class Agents:
    __name__ = "agents_of_a_test"
    HERMES_PLUGIN_API = 1

    @hookimpl
    def hermes_register_agents(self, registry: Registrar) -> None:
        registry.add("wants", Wants, summary="a program that needs much")
        registry.add("codex", "hermes_agents.codex:Codex", summary="a program that needs nothing")


async def test_doctor_looks_into_a_slot_for_what_a_program_needs(tmp_path: Path, isolates: None) -> None:
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, load_entry_points=False, plugins=[Agents()]) as runtime:
        found = await examine(runtime, ["local"], ["wants", "codex"])
        assert found.backends["local"].usable, found.backends["local"]
        assert not found.agents["wants"].usable and not found.healthy
        assert "on local: wants needs a-program-that-is-not-there, which the slot lacks" in found.as_text()
        assert "use an image that has it" in found.agents["wants"].advice[-1]
        assert "on local: a slot has what it needs" in found.agents["codex"].details
        assert "name a backend" in (await examine(runtime, [], ["codex"])).agents["codex"].advice[-1]
        with pytest.raises(UsageError, match="no program"):
            await examine(runtime, ["local"], ["nop"])


async def test_a_python_package_is_fetched(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "tiny-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "answer = 42\n")
        wheel.writestr("tiny-1.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0.0\n")
        wheel.writestr("tiny-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.0.dist-info/RECORD", "")
    package = PythonPackages((str(tmp_path / "tiny-{version}-py3-none-any.whl"),))
    folder = await package.fetch("tiny", "1.0.0")
    assert (folder / "tiny.py").read_text() == "answer = 42\n"
    assert [*folder.glob("__pycache__/tiny.*.pyc")]
    assert package.needs == ("glibc", f"python3.{sys.version_info.minor}")
    more = PythonPackages((*package.specs, "mcp"))  # as when an extra is declared of the same version
    assert str(folder) in package.check("tiny", "1.0.0").summary
    assert "not fetched yet" in more.check("tiny", "1.0.0").summary


async def test_a_driver_whose_python_is_too_old_is_told() -> None:
    package = PythonPackages(("tiny=={version}",), oldest=(9, 9))
    with pytest.raises(ConfigError, match=r"tiny needs Python 9\.9 or newer, and the driver has 3\."):
        await package.fetch("tiny", "1.0.0")
    assert not package.check("tiny", "1.0.0").usable


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_is_a_declaration(name: str) -> None:
    runtime = Runtime(Settings(), load_entry_points=False, plugins=[hermes_agents])
    kind = runtime.agents.entry(name).load()
    assert issubclass(kind, ProgramAgent) and isinstance(kind.program, AgentProgram)
    program = kind.program
    assert program.name == name and program.version and program.package and program.tried.startswith(program.version)
    assert program.dialect in ("chat", "responses", "anthropic", "gemini")
    words = [
        *program.argv,
        *program.again,
        *program.env.values(),
        *program.env_when_answered.values(),
        *program.files.values(),
    ]
    places = {place for word in words for place in re.findall(r"\{(\w+)\}", word)}
    assert places <= {"prompt", "prompt_file", "install", "folder", "model", "url", "key", "args", "mcp"}, places
    assert "{args}" in program.argv


@pytest.mark.entry_points
def test_the_command_line_shows_and_installs_them(npm_package: str) -> None:
    shown = CliRunner().invoke(main, ["agents", "codex"])
    assert shown.exit_code == 0 and "wire_api" in shown.output and "{install}/codex exec" in shown.output
    for words, said in {
        ("install", "model"): "no program that could be installed",
        ("install",): "name one agent",
        ("codex", "pi"): "name one agent",
        ("codex", "--version", "9"): "only for `agents install NAME`",
        ("install", "nobody"): "unknown agent",
    }.items():
        wrong = CliRunner().invoke(main, ["agents", *words])
        assert wrong.exit_code == 2 and said in wrong.output


def test_the_page_has_every_agent_and_its_version() -> None:
    page = (ROOT / "docs" / "guides" / "agent-programs.md").read_text("utf-8")
    runtime = Runtime(Settings(), load_entry_points=False, plugins=[hermes_agents])
    for name in NAMES:
        assert f"| `{name}` | {runtime.agents.entry(name).load().program.version} |" in page
