"""The command line as a user meets it: what it prints, where, and how it exits."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_core.cli.support import plugin_command
from hermes_core.errors import UnknownNameError
from hermes_core.plugins.registry import BROUGHT_BY
from tests.support.forked_program import run_program

COMMAND = [sys.executable, "-m", "hermes_core"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`plugin(name, source)`: an installed plugin, the only one that is allowed."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(name: str, source: str) -> None:
        info = tmp_path / f"hermes_rl_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hermes-rl-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hermes_core]\n{name} = t_{name}\n")
        (tmp_path / f"t_{name}.py").write_text(
            "from hermes_core.plugins.hookspecs import hookimpl\n" + textwrap.dedent(source)
        )
        names = [name, *filter(None, os.environ["HERMES_PLUGINS"].split(","))]
        monkeypatch.setenv("HERMES_PLUGINS", ",".join(names))

    return install


def hermes(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_program(arguments, {**os.environ, **environment}, Path.cwd())


HOST = """
    from hermes_core.sandbox.contract import Backend, Capabilities, Diagnosis, Isolation

    class Host(Backend):
        name = "host"
        capabilities = Capabilities(isolation=frozenset({Isolation.USER}))
        def __init__(self, settings): pass
        async def create(self, spec): raise AssertionError
        async def list(self, owner=None): return []
        async def terminate_id(self, sandbox_id): pass
        async def check(self): return VERDICT

    @hookimpl
    def hermes_register_backends(registry):
        registry.add("host", Host, summary="A host of the test", requires=("patience", "HOST_KEY"))
"""

USABLE = HOST.replace("VERDICT", "Diagnosis(True, 'all is well', details=('one', 'two'))")
UNUSABLE = HOST.replace("VERDICT", "Diagnosis(False, 'no daemon', advice=('start the daemon',))")


def test_version_and_help() -> None:
    version = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"hermes-rl, version \d+\.\d+\.\d+\n", version.stdout)
    shown = hermes("--help")
    assert shown.returncode == 0
    for command in ("rollout", "validate", "rescore", "plugins", "backends", "tools", "envs", "doctor", "ps", "reap"):
        assert re.search(rf"^  {command} +\w", shown.stdout, re.M), command


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["rollout", "validate", "rescore"])
def test_commands_from_elsewhere_are_there(command: str) -> None:
    done = hermes(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"hermes-rl {command}" in done.stdout or f"cli {command}" in done.stdout


GREETS = """
    import click

    @click.command()
    @click.argument("name")
    def greet(name):
        click.echo(f"Hello {name}")

    @hookimpl
    def hermes_register_commands(registry):
        registry.add("greet", greet, summary="Greet NAME.")
        registry.add("show", greet, summary="Hides nothing.")
        registry.add("broken", "os:getcwd")
"""


def test_a_plugin_adds_a_command(plugin: Any) -> None:
    plugin("greets", GREETS)
    done = hermes("greet", "you")
    assert (done.returncode, done.stdout) == (0, "Hello you\n")
    assert "Usage: " in hermes("greet", "--help").stdout
    assert "greet" not in hermes("--help").stdout.replace("hermes-rl commands", ""), "it is not looked for"
    assert "`hermes-rl commands`" in hermes("--help").stdout
    rows = {row["name"]: row for row in json.loads(hermes("commands", "--json").stdout)}
    assert rows["greet"]["summary"] == "Greet NAME."
    assert rows["greet"]["plugin"] == "greets"
    assert rows["show"]["use"] == "hidden by the program's own command of this name"
    assert "Show a run" in hermes("show", "--help").stdout
    assert "hermes-rl greet --help" in hermes("commands", "greet").stdout


def test_a_command_of_a_plugin_that_can_not_be_used_is_told(plugin: Any) -> None:
    plugin("greets", GREETS)
    broken = hermes("broken")
    assert broken.returncode == 1
    assert "command 'broken' of plugin 'greets' (hermes-rl-greets 1.0) is <built-in function getcwd>" in broken.stderr
    misspelt = hermes("gret", "you")
    assert misspelt.returncode == 2
    assert "unknown command 'gret' (did you mean 'greet'?" in misspelt.stderr
    plugin("nothing", "import no_such_module_here")
    assert "not loaded: plugin 'nothing'" in hermes("grxt").stderr


def test_whoever_lacks_a_command_of_another_distribution_is_told_which_one_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(BROUGHT_BY, "command", {"uproot": "hermes-rl-nowhere", "ship": "hermes-rl-docker"})
    with pytest.raises(UnknownNameError) as missing:
        plugin_command("uproot", ["show"])
    assert str(missing.value) == (
        "unknown command 'uproot': hermes-rl-nowhere is not installed (pip install hermes-rl-nowhere)"
    )
    monkeypatch.setenv("HERMES_PLUGINS", "ssh")
    with pytest.raises(UnknownNameError, match=r"'ship': plugin 'docker' \(hermes-rl-docker .*HERMES_PLUGINS"):
        plugin_command("ship", ["show"])


@pytest.fixture
def timed(plugin: Any, tmp_path: Path) -> None:
    """The command of the guide, installed."""
    guide = (Path(__file__).parents[1] / "docs/guides/writing-a-command.md").read_text()
    command, registration = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    (tmp_path / "timed_command.py").write_text(command)
    plugin("timed", registration)


@pytest.mark.usefixtures("timed", "isolates")
def test_the_guide_to_commands_makes_one_that_works_in_sandboxes() -> None:
    done = hermes("timed", "sleep 0.2", "--times", "3", "--backend.slots_per_sandbox=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert [float(line.removesuffix(" s")) >= 0.2 for line in done.stdout.splitlines()] == [True] * 3
    refused = hermes("timed", "true", "--backend.slots_per_sandbx=3")
    assert refused.returncode == 2
    assert "did you mean 'slots_per_sandbox'?" in refused.stderr
    assert "--allow-unisolated" in hermes("timed", "--help").stdout


@pytest.mark.usefixtures("timed")
def test_ctrl_c_ends_a_command_of_a_plugin_with_its_sandboxes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "timed", f"touch {tmp_path}/begun; sleep 60", "--isolation", "shared"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.splitlines()[-1] == "interrupted"


def test_backends_are_listed_with_origin_and_needs(plugin: Any) -> None:
    plugin("host", USABLE)
    lines = hermes("backends").stdout.splitlines()
    assert lines[0].split() == ["name", "plugin", "distribution", "needs", "summary"]
    [host] = [line for line in lines if line.startswith("host")]
    assert re.split(r"  +", host) == ["host", "host", "hermes-rl-host 1.0", "patience, HOST_KEY", "A host of the test"]
    assert host.index("hermes-rl-host") == lines[0].index("distribution"), "columns are aligned"


def test_json_is_for_programs(plugin: Any) -> None:
    plugin("host", USABLE)
    backends = {row["name"]: row for row in json.loads(hermes("backends", "--json").stdout)}
    assert backends["host"]["needs"] == ["patience", "HOST_KEY"]
    assert backends["local"]["plugin"] == "core"
    plugins = {row["name"]: row for row in json.loads(hermes("plugins", "--json").stdout)}
    assert plugins["host"]["provides"] == {"backend": ["host"]}
    assert plugins["host"]["distribution"] == "hermes-rl-host"
    assert plugins["core"]["hooks"][0] == "hermes_register_agents"
    tools = json.loads(hermes("tools", "--json").stdout)
    assert set(tools) == {"tools", "toolsets", "distributions"}
    assert {"terminal", "read_file"} <= {row["name"] for row in tools["tools"]}
    assert ["terminal", "process"] in [row["tools"] for row in tools["toolsets"]]
    assert "tasks" in [row["name"] for row in json.loads(hermes("envs", "--json").stdout)]


def test_a_broken_plugin_is_told_on_standard_error_and_the_listing_goes_on(plugin: Any) -> None:
    plugin("host", USABLE)
    plugin("broken", "import no_such_module_here")
    done = hermes("plugins")
    assert done.returncode == 0
    assert re.search(r"^broken +failed +hermes-rl-broken +1.0", done.stdout, re.M)
    assert "problem: plugin 'broken' (hermes-rl-broken 1.0) failed to load: ModuleNotFoundError" in done.stderr
    assert re.search(r"^host ", hermes("backends").stdout, re.M)
    assert json.loads(hermes("backends", "--json").stdout), "standard output is JSON whatever is broken"


def test_a_narrow_terminal_gets_paragraphs_and_a_pipe_long_lines() -> None:
    controller, terminal = pty.openpty()
    done = subprocess.Popen(
        [*COMMAND, "backends"], stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(controller)
    assert done.wait() == 0
    lines = shown.decode().splitlines()
    assert lines[0].startswith("local  Process trees on this host")
    assert all(len(line) <= 60 for line in lines)
    assert re.search(r"^ {7}plugin: core; distribution: hermes-rl", shown.decode(), re.M)
    assert hermes("backends").stdout.startswith("name ")
    assert max(map(len, hermes("backends").stdout.splitlines())) > 80


def test_doctor_says_what_is_usable_and_what_to_do(plugin: Any) -> None:
    plugin("host", USABLE)
    done = hermes("doctor", "host")
    assert (done.returncode, done.stdout) == (0, "host: usable: all is well\n    one\n    two\n")


def test_doctor_names_the_profiles_and_their_file(plugin: Any, tmp_path: Path, monkeypatch: Any) -> None:
    plugin("host", USABLE)
    assert "profiles:" not in hermes("doctor", "host").stdout
    (tmp_path / "mine.yaml").write_text("profiles: {small: {}, big: {}}")
    monkeypatch.setenv("HERMES_PROFILES_FILE", str(tmp_path / "mine.yaml"))
    said = hermes("doctor", "host").stdout
    assert f"profiles:\n    small, big, from {tmp_path}/mine.yaml\n    used where none is named: small\n" in said


def test_doctor_fails_when_a_backend_or_a_plugin_does(plugin: Any) -> None:
    plugin("host", UNUSABLE)
    done = hermes("doctor", "host")
    assert (done.returncode, done.stdout) == (1, "host: NOT usable: no daemon\n    -> start the daemon\n")
    report = json.loads(hermes("doctor", "host", "--json").stdout)
    assert report["healthy"] is False
    assert report["backends"]["host"]["advice"] == ["start the daemon"]


def test_doctor_survives_a_backend_that_breaks(plugin: Any) -> None:
    plugin("host", HOST.replace("return VERDICT", "raise KeyError('inside')"))
    plugin(
        "lazy", "@hookimpl\ndef hermes_register_backends(registry):\n    registry.add('lazy', 'no_such_sdk:Backend')\n"
    )
    done = hermes("doctor", "host", "lazy")
    assert done.returncode == 1
    assert "host: NOT usable: Host.check() raised KeyError: 'inside'\n    -> a bug in the plugin: " in done.stdout
    assert "no_such_sdk" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Traceback" in hermes("-vv", "doctor", "host").stderr


FINE = HOST.replace("host", "fine").replace("VERDICT", "Diagnosis(True, 'fine')")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("VERDICT", "True", "Host.check() returned bool, not a Diagnosis"),
        ("VERDICT", "Diagnosis(True, 'ok', details=5)", "or one of another type"),
        ("VERDICT", "__import__('sys').exit(0)", "Host.check() raised RuntimeError: sys.exit(0) was called"),
        ("VERDICT", "None", "Host.check() returned NoneType, not a Diagnosis"),
        ("async def check(self): return VERDICT", "def check(self): return None", "Host.check() raised TypeError"),
        ("settings): pass", "settings): raise KeyError('inside')", "cannot be made: KeyError: 'inside'"),
        ("settings): pass", "settings): raise SystemExit(0)", "cannot be made: RuntimeError: sys.exit(0) was called"),
        ("frozenset({Isolation.USER})", "frozenset({'user'})", "isolation of its capabilities is frozenset({'user'})"),
    ],
)
def test_doctor_names_a_bug_of_one_backend_and_checks_the_others(plugin: Any, old: str, new: str, told: str) -> None:
    assert old in HOST
    plugin("host", HOST.replace(old, new).replace("VERDICT", "Diagnosis(True, 'ok')"))
    plugin("fine", FINE)
    done = hermes("doctor", "host", "fine")
    assert done.returncode == 1, done.stderr
    assert re.search(rf"^host: NOT usable: .*{re.escape(told)}", done.stdout, re.M), done.stdout
    assert "fine: usable: fine\n" in done.stdout


LIMITED = """
    import asyncio, threading
    from hermes_core.cli import doctor
    doctor.CHECK_TIMEOUT_S, doctor.END_S = {limit}, 0.5
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "never",
    [
        "await asyncio.to_thread(threading.Event().wait)",
        "threading.Event().wait()",
        "await asyncio.Event().wait()",
        """
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
        """,
    ],
)
def test_doctor_gives_up_a_check_that_never_ends(plugin: Any, never: str) -> None:
    plugin("host", LIMITED.format(limit=2) + HOST.replace("return VERDICT", never))
    plugin("fine", FINE)
    done = hermes("doctor", "host", "fine")
    assert done.returncode == 1, done.stderr
    assert "host: NOT usable: its check was not done within 2 s\n    -> `check` needs time limits" in done.stdout
    assert "fine: usable: fine\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rolout", "tasks"], "unknown command 'rolout' (did you mean 'rollout'?"),
        (["doctor", "locl"], "unknown backend 'locl' (did you mean 'local'?"),
        (["backends", "--jsn"], "error: no such option '--jsn'"),
        (
            ["backends", "--traceback"],
            "error: --traceback comes before the command's name: `hermes-rl --traceback backends …`",
        ),
        ([], "Commands:"),
    ],
)
def test_wrong_use_exits_with_2_and_no_traceback(arguments: list[str], message: str) -> None:
    done = hermes(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_traceback_is_shown_when_asked_for() -> None:
    done = hermes("--traceback", "doctor", "locl")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "UnknownNameError" in done.stderr


@pytest.mark.parametrize("wait", ["await asyncio.sleep(60)", "threading.Event().wait()"])
def test_ctrl_c_exits_with_130(plugin: Any, tmp_path: Path, wait: str) -> None:
    ready = tmp_path / "ready"
    waiting = f"open({str(ready)!r}, 'w').close(); {wait}"
    plugin("host", LIMITED.format(limit=60) + HOST.replace("return VERDICT", waiting))
    process = subprocess.Popen([*COMMAND, "doctor", "host"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_reader_that_leaves_early_is_no_crash() -> None:
    process = subprocess.Popen([*COMMAND, "plugins", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    process.stderr.close()
    process.wait()
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


LOGGING = """import logging
            logging.getLogger("hermes_core.x").warning("key %s", "sk-abcdefghijkl")
            return Diagnosis(True, "ok")"""


def test_secrets_never_reach_the_log(plugin: Any) -> None:
    plugin(
        "host",
        HOST.replace("return VERDICT", LOGGING).replace("check(self): import", "check(self):\n            import"),
    )
    done = hermes("doctor", "host", OPENAI_API_KEY="sk-abcdefghijkl")
    assert "WARNING: key [redacted: OPENAI_API_KEY]" in done.stderr
    assert "sk-abc" not in done.stderr
