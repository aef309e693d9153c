"""What the documentation shows works as it is written."""

import asyncio
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

import hermes_core
from hermes_core.agents.base import AgentSettings
from hermes_core.errors import ChannelLost
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.soundness.validate import validate
from hermes_core.tools.base import CallContext
from hermes_core.tools.registry import ToolRegistry

ROOT = Path(__file__).resolve().parents[1]
CHECKOUT_URL = "https://github.com/hermes-rl/hermes-rl/blob/main/"


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, in order, without those that show a file of the repository."""
    text = (ROOT / document).read_text()
    return re.findall(rf"(?<!-->\n)^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


async def test_the_guide_to_environments_makes_a_sound_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_env"
    package.mkdir()
    for block in blocks("docs/guides/writing-an-environment.md", "python"):
        name = re.match(r"# my_env/(\S+?\.py)", block)
        assert name is not None, f"a block that says no file: {block[:60]}"
        (package / name[1]).write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = importlib.import_module("my_env")
    try:
        async with Runtime(plugins=[plugin]) as runtime:
            outcome = await validate(runtime, "count-lines", env={"count": 2}, repeat=1)
            programs = importlib.import_module("my_env.programs").Programs
            graded = await validate(runtime, programs(programs.config_class()), repeat=1)
    finally:
        for module in [name for name in sys.modules if name.partition(".")[0] == "my_env"]:
            del sys.modules[module]
    assert outcome.sound, outcome.to_dict()
    assert graded.sound, graded.to_dict()


async def test_the_guide_s_row_is_sound(tmp_path: Path) -> None:
    (row,) = blocks("docs/guides/writing-an-environment.md", "json")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(json.loads(row)))
    async with Runtime(load_entry_points=False) as runtime:
        outcome = await validate(runtime, "tasks", env={"dataset_name": str(tmp_path / "tasks.jsonl")})
    assert outcome.sound, outcome.to_dict()


def test_the_guide_to_environments_makes_a_package_that_installs(tmp_path: Path) -> None:
    guide = "docs/guides/writing-an-environment.md"
    for block in [*blocks(guide, "toml"), *blocks(guide, "python")]:
        name = re.match(r"# ([\w./]+\.(?:toml|py))", block)
        assert name is not None, f"a block that says no file: {block[:60]}"
        path = tmp_path / name[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*build, str(tmp_path / "dist"), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "my_env/environment.py" in archive.namelist()
        (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert b"count-lines = my_env" in archive.read(entry_points)


def test_the_first_run_s_tasks_are_sound(tmp_path: Path) -> None:
    shell = blocks("docs/start/first-run.md", "bash")[0]
    row = re.search(r"^(\{.*\})$", shell, re.MULTILINE)
    assert row is not None
    (tmp_path / "tasks.jsonl").write_text(row[1] + "\n")
    json.loads(row[1])
    command = [sys.executable, "-m", "hermes_core", "validate", "tasks", "--env.dataset_name=tasks.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def of_the_site(name: str) -> Any:
    """A module of docs/site."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_between_the_documents_leads_to_a_file_of_a_checkout() -> None:
    places = ("*.md", ".github/*.md", "docs/**/*.md", "plugins/*/README.md", "benchmarks/*.md", "examples/*.md")
    documents = [document for place in places for document in ROOT.glob(place)]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", document.read_text())
    ]
    assert len(documents) > 40 and len(links) > 200
    assert [
        f"{document.relative_to(ROOT)}: {link}" for document, link in links if not (document.parent / link).exists()
    ] == []
    absolute = [
        link
        for document in documents
        for link in re.findall(rf"\]\({re.escape(CHECKOUT_URL)}([^)#\s]+)", document.read_text())
    ]
    assert absolute and [link for link in absolute if not (ROOT / link).exists()] == []


def test_no_link_of_a_plugin_s_readme_is_dead_on_a_package_index() -> None:
    readmes = [*ROOT.glob("plugins/*/README.md")]
    assert len(readmes) > 10
    for readme in readmes:
        assert re.findall(r"\]\((?!https?://|#)[^)]*\)", readme.read_text()) == [], readme


def test_what_is_installed_from_a_checkout_is_installed_with_our_distributions_that_it_needs() -> None:
    def project(folder: str) -> dict[str, Any]:
        return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]

    found = [
        (page, re.findall(r"\./(?:plugins|examples)/\w+", command))
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")]
        for command in re.findall(r"pip install (.*?\./plugins/[^`#\n]*)", page.read_text())
    ]
    assert len(found) > 10
    for page, folders in found:
        projects = [project(folder) for folder in folders]
        needed = {name for each in projects for name in re.findall(r"hermes-rl-[\w-]+", str(each["dependencies"]))}
        assert needed <= {each["name"] for each in projects}, f"{page}: {folders}"


def test_the_parsers_page_shows_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    example, plugin = blocks("docs/reference/parsers.md", "python")
    exec(example, {})
    assert capsys.readouterr().out == "I look. Hm.\n{'command': 'ls'}\n()\n"
    module = types.ModuleType("lines_plugin")
    exec(plugin, module.__dict__)
    parsed = Runtime(load_entry_points=False, plugins=[module]).parser("lines").parse("a\nCALL ls\nb", ())
    assert ([call.name for call in parsed.calls], parsed.content) == (["ls"], "a\nb")


def test_the_parsers_page_names_every_parser() -> None:
    rows = re.findall(r"^\| (`\S+`(?:, `\S+`)*) \|", (ROOT / "docs/reference/parsers.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    aliases = {"deepseek_v31", "deepseek_v32", "openai", "hy_v3", "qwen3_xml", "nemotron_v3", "step3p5", "step5"}
    aliases |= {"cohere_command3", "cohere_command4", "jamba", "trinity", "poolside_v1", "spark25", "ling3"}
    aliases |= {"nemotron_json", "internlm"}
    assert named == {*Runtime(load_entry_points=False).parsers.names(), *aliases}


def test_the_guide_to_tools_defines_tools_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks("docs/guides/writing-a-tool.md", "python"):
        exec(block, names)
    calls = {"search": ({"query": "q", "limit": 1}, "q 0"), "forecast": ({"city": "Rome"}, "Rome: rain")}
    for name, (arguments, says) in calls.items():
        result = asyncio.run(ToolRegistry().call(names[name], CallContext(), arguments))
        assert result.success and says in result.output
    assert capsys.readouterr().out == "Rome: rain for 1 days\n1.0\n"


async def test_the_guide_to_agents_asks_a_model(tmp_path: Path) -> None:
    (code,) = blocks("docs/guides/writing-an-agent.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)

    def solver(prompt: str) -> Generator[ScriptedCall, Any, str]:
        yield call("terminal", command="echo hello > out.txt")
        return "Done."

    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "a", "prompt": "p", "check": "grep -q hello out.txt"}))
    seen: list[Any] = []
    async with Runtime(load_entry_points=False) as runtime, ScriptedServer(ToolScript(solver)) as server:
        agent = names["AskOnce"](AgentSettings(model="scripted", base_url=server.base_url))
        await run_rollouts(
            runtime, "tasks", agent, env={"dataset_name": str(tmp_path / "tasks.jsonl")}, on_record=seen.append
        )
        await agent.aclose()
    assert (seen[0]["reward"], seen[0]["model"], seen[0]["stop_reason"]) == (1.0, "scripted", "finished")
    assert [called["name"] for called in seen[0]["calls"]] == ["terminal"]


async def test_the_guide_to_backends_has_a_channel_over_frames(tmp_path: Path) -> None:
    (code,) = [
        block for block in blocks("docs/guides/writing-a-backend.md", "python") if "AcmeChannel(SocketChannel)" in block
    ]
    names: dict[str, Any] = {}
    exec(code, names)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())["argv"]
        given = await reader.readexactly(5)
        frames = [
            b"o" + bytes([0, 0, 0, 5]) + given,
            b"e" + bytes([0, 0, 0, 3]) + b"oh!",
            b"x" + bytes([0, 0, 0, 1]) + b"3",
        ]
        for byte in b"".join(frames[: len(asked)]):
            writer.write(bytes([byte]))
            await writer.drain()
        writer.close()

    address = str(tmp_path / "socket")
    async with await asyncio.start_unix_server(serve, address):
        for argv, status in ((["cat", "-", "x"], 3), (["cat", "-"], None)):
            channel = await names["start"](address, argv)
            await channel.write(b"hello")
            assert await channel.read(100) == b"hello"
            if status is None:
                with pytest.raises(ChannelLost, match="too early"):
                    await channel.read(100)
            else:
                assert (await channel.read(100), await channel.wait(), channel.stderr_tail) == (b"", status, "oh!")
            await channel.aclose()
    with pytest.raises(ChannelLost, match="does not answer"):
        await names["start"](str(tmp_path / "nowhere"), ["true"])


async def test_the_guide_to_sinks_sends_records_again(tmp_path: Path) -> None:
    kept: list[Any] = []

    class Keeping:
        async def write(self, record: Any) -> None:
            kept.append(record["trajectory_id"])

        async def aclose(self) -> None:
            kept.append("closed")

    class Plugin:
        @hermes_core.hookimpl
        def hermes_register_sinks(self, registry: Any) -> None:
            registry.add("rewards", lambda target: Keeping())

    failures = {"good": None, "failed": {"kind": "setup"}, "cancelled": {"kind": "cancelled"}}
    lines = [json.dumps({"trajectory_id": name, "failure": failure}) + "\n" for name, failure in failures.items()]
    (tmp_path / "trajectories.jsonl").write_text("".join(lines))
    (code,) = blocks("docs/guides/writing-a-sink.md", "python")
    names: dict[str, Any] = {}
    exec(code.partition("asyncio.run(")[0], names)
    names["Runtime"] = lambda: Runtime(plugins=[Plugin()], load_entry_points=False)
    await names["send"](tmp_path, "rewards", "x")
    assert kept == ["good", "failed", "closed"]


def test_the_guides_show_files_as_they_are() -> None:
    included = of_the_site("included")
    guides = sorted(ROOT.glob("docs/*/*.md"))
    assert sum(len(included.SHOWN.findall(guide.read_text())) for guide in guides) >= 7
    stale = [guide.name for guide in guides if guide.read_text() != included.written(guide)]
    assert not stale, "`python docs/site/included.py` writes them again"
    assert [guide.name for guide in guides if "--8<--" in guide.read_text()] == []


def test_the_reference_explains_every_setting_and_option() -> None:
    pages = of_the_site("reference").pages()
    silent = [line for text in pages.values() for line in text.splitlines() if re.search(r"\|\s+\|$", line)]
    assert not silent
    named = set(re.findall(r"^::: hermes_core\S*\.(\w+)$", "\n".join(pages.values()), re.MULTILINE))
    assert named >= {name for name in hermes_core.__all__ if not name.startswith("__")}


def test_every_page_that_code_and_settings_name_is_there() -> None:
    named = subprocess.run(
        [
            "git",
            "grep",
            "-hoE",
            r"\bdocs/[a-z/-]+\.md",
            "--",
            "*.py",
            "*.toml",
            "*.yml",
            "Makefile",
            ":!tests/swe_smith",
            ":!tests/make_tasks",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(named) > 40
    assert [page for page in named if not (ROOT / page).exists()] == []


def test_the_code_to_read_in_an_hour_is_there() -> None:
    page = (ROOT / "docs/how-it-works/read-the-code.md").read_text()
    rows = re.findall(r"^\| \d+ \| \[`(\S+)`\]\(\.\./\.\./\1\) \| (.*?) \|", page, re.MULTILINE)
    assert len(rows) == 10
    for path, names in rows:
        code = (ROOT / path).read_text()
        missing = [name for name in re.findall(r"`(\w+)`", names) if not re.search(rf"(class|def) {name}\b", code)]
        assert not missing, path


def test_all_pages_are_listed_in_the_index_and_on_the_site() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/*/*.md")}
    index, site = ((ROOT / name).read_text() for name in ("docs/README.md", "mkdocs.yml"))
    assert [page for page in sorted(pages) if f"({page})" not in index or f": {page}\n" not in site] == []


def test_the_readme_has_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 90
