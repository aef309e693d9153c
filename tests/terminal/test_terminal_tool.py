"""The terminal tool for programs without a runtime, on this host."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hermes_docker.config import DockerConfig
from hermes_modal.config import ModalSandboxConfig
from hermes_ssh.config import SshConfig

from hermes_core import cleanup_vm, terminal, terminal_tool
from hermes_core.errors import (
    ChannelLost,
    ConfigError,
    HermesError,
    InfraError,
    PolicyError,
    SandboxLost,
    SlotLost,
    StaleSlotError,
    UnknownNameError,
    UsageError,
)
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.sandbox.local.backend import LocalConfig
from hermes_core.terminal.settings import ConfigClasses, TerminalSettings, explain
from hermes_core.tool_backend import ToolBackend


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import os

    for name in os.environ:
        if name.startswith("TERMINAL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    terminal.cleanup_all()


def said(command: str, **given: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(terminal_tool(command, **given))
    return answer


def test_a_task_keeps_its_directory_and_files() -> None:
    assert said("echo hello", task_id="my-task") == {"output": "hello\n", "exit_code": 0, "error": None}
    assert said("mkdir -p a/b; cd a/b; echo x >file; exit 3", task_id="my-task")["exit_code"] == 3
    assert said("pwd; cat file", task_id="my-task")["output"].endswith("/a/b\nx\n")
    assert said("pwd", task_id="my-task", workdir="/")["output"] == "/\n"
    assert said("pwd", task_id="my-task")["output"].endswith("/a/b\n")
    assert said("ls", task_id="other")["output"] == ""
    assert cleanup_vm("my-task") and not cleanup_vm("my-task")
    assert said("ls", task_id="my-task")["output"] == ""


def test_limits_and_what_went_wrong() -> None:
    assert said("sleep 30", timeout=0.5)["exit_code"] == 124
    assert said("echo still there")["output"] == "still there\n"
    answer = said("kill -9 $$")
    assert answer["exit_code"] == 137 and "SIGKILL" in answer["error"]
    assert said("cd /nowhere")["exit_code"] != 0
    assert said("true", workdir="/nowhere")["exit_code"] == -1
    nothing = said("")
    assert (nothing["exit_code"], nothing["status"]) == (-1, "error") and "command" in nothing["error"]


def test_in_the_background() -> None:
    answer = said("sleep 60", background=True)
    assert answer["exit_code"] == 0 and answer["session_id"].startswith("proc_")
    with pytest.raises(UsageError, match=answer["session_id"]):
        cleanup_vm()
    poll = json.loads(terminal.process_tool("poll", answer["session_id"]))
    assert poll["status"] == "running"
    assert cleanup_vm(force=True)
    assert "no sandbox" in json.loads(terminal.process_tool("list"))["error"]


@pytest.mark.few(2)
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_wrong_time_limit_leaves_the_task_as_it_was(timeout: float) -> None:
    assert "a positive number of seconds" in said("true", task_id="new", timeout=timeout)["error"]
    assert not cleanup_vm("new"), "no sandbox is made for what can't be run"
    said("mkdir sub; cd sub; echo x >file")
    session = said("sleep 60", background=True)["session_id"]
    answer = said("true", timeout=timeout)
    assert (answer["exit_code"], answer["status"]) == (-1, "error")
    assert "a positive number of seconds" in answer["error"]
    assert said("cat file")["output"] == "x\n"
    assert json.loads(terminal.process_tool("poll", session))["status"] == "running"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (PolicyError("no"), True),
        (ChannelLost("its sandbox may well live"), True),
        (InfraError("too many requests under way"), True),
        (SandboxLost("gone"), False),
        (SlotLost("gone"), False),
        (StaleSlotError("released"), False),
    ],
)
def test_only_a_slot_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch, error: HermesError, kept: bool) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise error

    said("echo x >file")
    with monkeypatch.context() as patch:
        patch.setattr(ToolBackend, "execute", fails)
        assert error.message in said("true")["error"]
    assert said("cat file")["output"] == ("x\n" if kept else "cat: file: No such file or directory\n")


def test_what_ends_in_the_background_moves_nothing() -> None:
    said("mkdir -p a/build; cd a")
    session = said("cd build && pwd", background=True)["session_id"]
    ended = json.loads(terminal.process_tool("wait", session, timeout=20))
    assert ended["exit_code"] == 0 and ended["output"].endswith("/a/build\n"), "it began where the last command ended"
    assert said("pwd")["output"].endswith("/a\n")


def test_a_background_process_is_listed_by_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_CWD", "begin/here")
    session = said("sleep 60 # mine", background=True)["session_id"]
    (listed,) = json.loads(terminal.process_tool("list"))["processes"]
    assert (listed["command"], listed["cwd"].endswith("/begin/here")) == ("sleep 60 # mine", True)
    assert json.loads(terminal.process_tool("poll", session))["command"] == "sleep 60 # mine"
    cleanup_vm(force=True)
    terminal.cleanup_all()
    monkeypatch.setenv("TERMINAL_CWD", "/proc/nowhere")
    answer = said("sleep 60", background=True)
    assert (answer["exit_code"], answer["status"]) == (-1, "error") and "TERMINAL_CWD" in answer["error"]
    assert json.loads(terminal.process_tool("list"))["processes"] == []


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a sandbox is waited for, which nobody ever gets."""
    waiting = threading.Event()

    async def acquire(*_: object, **__: object) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ToolBackend, "acquire", acquire)
    return waiting


async def test_a_task_that_is_ended_while_its_first_commands_wait(stuck: threading.Event) -> None:
    blocking = asyncio.create_task(asyncio.to_thread(said, "true"))
    await asyncio.to_thread(stuck.wait, 20)
    beside = asyncio.create_task(terminal.terminal_tool_async("true"))
    process = asyncio.create_task(asyncio.to_thread(terminal.process_tool, "list"))
    while terminal._tasks()._tasks["default"].running < 3:
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(cleanup_vm)
    for answer in (await blocking, json.loads(await beside), json.loads(await process)):
        assert answer["status"] == "error" and "was ended" in answer["error"]


async def test_a_caller_that_is_cancelled_while_it_waits(stuck: threading.Event) -> None:
    waiting = asyncio.create_task(terminal.terminal_tool_async("true"))
    await asyncio.to_thread(stuck.wait, 20)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(cleanup_vm), "the task is another matter"


@pytest.mark.few(1)
@pytest.mark.parametrize("deaths", [1, 2])
def test_the_next_process_goes_on_with_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, isolates: None
) -> None:
    monkeypatch.setenv("TERMINAL_STATE_DIR", str(tmp_path / "state"))
    script = """
import json, os, sys
from hermes_core import terminal_tool
from hermes_core.terminal import process_tool
if sys.argv[1] == "first":
    terminal_tool("mkdir sub; cd sub; echo kept >file", task_id="mine")
    started = json.loads(terminal_tool("cat; exit 6", background=True, pty=True, task_id="mine"))
    print(started["session_id"], flush=True)
else:
    print(json.loads(process_tool("list", task_id="mine"))["processes"][0]["session_id"], flush=True)
os.kill(os.getpid(), 9)
"""
    for death in range(deaths):
        turn = "first" if death == 0 else "next"
        done = subprocess.run([sys.executable, "-c", script, turn], stdout=subprocess.PIPE, text=True, check=False)
        session = done.stdout.strip()
        assert done.returncode == -9 and session.startswith("proc_")
    said_then = json.loads(terminal.process_tool("submit", session, data="typed", task_id="mine"))
    assert said_then["status"] == "ok"
    assert json.loads(terminal.process_tool("write", session, data="\x04", task_id="mine"))["status"] == "ok"
    ended = json.loads(terminal.process_tool("wait", session, timeout=20, task_id="mine"))
    assert (ended["status"], ended["exit_code"]) == ("exited", 6) and "typed" in ended["output"]
    assert said("cat file", task_id="mine")["output"] == "kept\n"
    assert cleanup_vm("mine")
    terminal.cleanup_all()
    assert not (tmp_path / "state" / "processes.json").exists()


async def test_inside_a_running_event_loop() -> None:
    assert said("echo blocking")["output"] == "blocking\n"
    answers = await asyncio.gather(
        *(terminal.terminal_tool_async("sleep 0.2; echo on", task_id=f"t{n % 2}") for n in range(4))
    )
    assert [json.loads(answer)["output"] for answer in answers] == ["on\n"] * 4


def test_an_unknown_backend_is_never_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_ENV", "modla")
    answer = said("echo leaked")
    assert (answer["output"], answer["exit_code"], answer["status"]) == ("", -1, "error")
    assert "modla" in answer["error"]


def test_idle_tasks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_LIFETIME_SECONDS", "1")
    said("echo x >file", task_id="idle")
    said("sleep 60", task_id="busy", background=True)
    deadline = time.monotonic() + 15
    while cleanup_vm("no-such-task") or "idle" in terminal._tasks()._tasks:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "busy" in terminal._tasks()._tasks, "it left something running on purpose"
    assert said("ls", task_id="idle")["output"] == ""


def test_where_a_task_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINAL_CWD", "begin/here")
    assert said("pwd", task_id="t")["output"].endswith("/begin/here\n")
    assert said("cd ..; pwd", task_id="t")["output"].endswith("/begin\n")
    assert said("pwd", task_id="t")["output"].endswith("/begin\n"), "where the last one ended"
    terminal.cleanup_all()
    monkeypatch.setenv("TERMINAL_CWD", "/proc/nowhere")
    answer = said("echo not run", task_id="t")
    assert answer["exit_code"] != 0
    assert "TERMINAL_CWD" in answer["output"] and "not run" not in answer["output"]


CLASSES: ConfigClasses = {
    "local": lambda: LocalConfig,
    "docker": lambda: DockerConfig,
    "ssh": lambda: SshConfig,
    "modal": lambda: ModalSandboxConfig,
}


def test_what_is_not_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "HERMES_ENV_FILE": "",
        "TERMINAL_TIMOUT": "9",
        "TERMINAL_ENV": "modal",
        "TERMINAL_MODAL_SLOTS": "4",
        "TERMINAL_CONTAINER_PERSISTENT": "false",
        "TERMINAL_SSH_HOST": "h",
    }
    TerminalSettings.load(CLASSES, environ)
    said_of = {record.getMessage().split()[0]: record.getMessage() for record in caplog.records}
    assert set(said_of) == {"TERMINAL_TIMOUT", "TERMINAL_MODAL_SLOTS"}
    assert "did you mean 'TERMINAL_TIMEOUT'" in said_of["TERMINAL_TIMOUT"]
    assert "a task has a sandbox to itself" in said_of["TERMINAL_MODAL_SLOTS"]


def test_a_file_of_another_backends_profiles_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "modal_profiles.yaml").write_text("profiles: {default: {gpu: T4}}")
    found = TerminalSettings.load(CLASSES, {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "docker"})
    assert found.profiles == {"default": {}}
    assert caplog.messages == ["modal_profiles.yaml is not read: TERMINAL_ENV is 'docker', not 'modal'"]


def test_settings_of_other_backends() -> None:
    load = partial(TerminalSettings.load, CLASSES)
    environ = {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "ssh", "TERMINAL_SSH_HOST": "h", "TERMINAL_SSH_USER": "u"}
    environ |= {"TERMINAL_SSH_PORT": "2222", "TERMINAL_SSH_KEY": "/k"}
    assert load(environ).profiles == {"default": {"host": "h", "user": "u", "port": "2222", "identity": "/k"}}
    environ = {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "docker", "TERMINAL_DOCKER_IMAGE": "i"}
    found = load({**environ, "TERMINAL_DOCKER_VOLUMES": '["/a:/b:ro"]'})
    assert found.profiles == {"default": {"image": "i", "volumes": ["/a:/b:ro"]}}
    with pytest.raises(ConfigError, match="write a JSON list"):
        load({**environ, "TERMINAL_DOCKER_VOLUMES": "/a:/b"})
    with pytest.raises(ConfigError, match="the only value is `pool`"):
        load({"HERMES_ENV_FILE": "", "TERMINAL_ENV": "modal", "TERMINAL_MODAL_MODE": "direct"})


def test_profiles_of_variables() -> None:
    found = TerminalSettings.load(
        CLASSES,
        {
            "HERMES_ENV_FILE": "",
            "TERMINAL_ENV": "modal",
            "TERMINAL_MODAL_IMAGE": "python:3.12",
            "TERMINAL_MODAL_PROFILE_PYTORCH_GPU_GPU": "T4",
            "TERMINAL_MODAL_PROFILE_PYTORCH_GPU_MAX_POOL": "2",
            "TERMINAL_MODAL_PROFILE_node_IMAGE": "node:20",
            "TERMINAL_MODAL_PROFILE_node_WORKDIR": "/workspace",
        },
    )
    assert set(found.profiles) == {"default", "pytorch-gpu", "node"}
    common = {"app_name": "hermes-sandbox", "image": "python:3.12"}
    assert found.profiles["pytorch-gpu"] == {**common, "gpu": "T4", "max_pool": "2"}
    assert found.profiles["node"] == {**common, "image": "node:20"}
    assert (found.cwd_of("node"), found.cwd_of("pytorch-gpu")) == ("/workspace", None)


def test_secrets_that_commands_see() -> None:
    found = TerminalSettings.load(
        CLASSES,
        {
            "HERMES_ENV_FILE": "",
            "TERMINAL_ENV": "modal",
            "TERMINAL_MODAL_SECRETS": "mine,other",
            "TERMINAL_MODAL_SLOT_SECRETS": "API_KEY,OTHER_KEY",
            "TERMINAL_MODAL_PROFILE_MY_GPU_SECRETS": "gpus",
            "TERMINAL_MODAL_PROFILE_MY_GPU_SLOT_SECRETS": "GPU_KEY",
        },
    )
    common = {"app_name": "hermes-sandbox", "secrets": "mine,other", "slot_secrets": "API_KEY,OTHER_KEY"}
    assert found.profiles["default"] == common
    assert found.profiles["my-gpu"] == {**common, "secrets": "gpus", "slot_secrets": "GPU_KEY"}


@pytest.mark.parametrize(
    "env_vars",
    [
        "TOKEN=hunter2; PIN = 4711;4711hunter2;",
        {"TOKEN": "hunter2", "PIN": 4711},
        ["TOKEN=hunter2", {"PIN": 4711}, 4711],
    ],
)
def test_of_env_vars_the_names_are_shown(tmp_path: Path, env_vars: Any) -> None:
    environ = {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "modal"}
    (tmp_path / "modal_profiles.yaml").write_text(
        json.dumps({"profiles": {"x": {"image": "i", "env_vars": env_vars, "env_var": env_vars}}})
    )
    _, lines = explain(CLASSES, environ)
    assert lines[-1].count("={TOKEN, PIN} (modal_profiles.yaml)") == 2
    assert "hunter2" not in str(lines) and "4711" not in str(lines)
    if isinstance(env_vars, str):
        (tmp_path / "modal_profiles.yaml").unlink()
        _, lines = explain(CLASSES, {**environ, "TERMINAL_MODAL_PROFILE_X_ENV_VARS": env_vars})
        (line,) = (line for line in lines if "env_vars=" in line)
        assert line.endswith("env_vars={TOKEN, PIN} (TERMINAL_MODAL_PROFILE_X_ENV_VARS)")


@pytest.mark.parametrize("env_vars", ["PIN=4711", {"PIN": 4711}, {"PIN": ["4711"]}, [4711], 4711])
def test_errors_show_no_values_of_env_vars(env_vars: Any) -> None:
    with pytest.raises(ConfigError, match="env_vars") as caught:
        SandboxConfig.from_dict("x", {"env_vars": env_vars})
    assert "4711" not in str(caught.value)


def test_a_profile_that_is_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "modal_profiles.yaml").write_text("profiles: {default: torch}")
    with pytest.raises(ConfigError, match=r"'default' of .* is not a mapping"):
        TerminalSettings.load(CLASSES, {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "modal"})


def test_settings_are_read_from_the_variables_of_the_page(tmp_path: Path) -> None:
    load = partial(TerminalSettings.load, CLASSES)
    plain = load({"HERMES_ENV_FILE": ""})
    assert (plain.backend, plain.timeout_s, plain.lifetime_s) == ("local", 180, 300)
    environ = {
        "HERMES_ENV_FILE": "",
        "TERMINAL_ENV": "modal",
        "TERMINAL_MODAL_IMAGE": "python:3.12",
        "TERMINAL_TIMEOUT": "9",
        "TERMINAL_LIFETIME_SECONDS": "8",
    }
    found = load(environ)
    assert (found.backend, found.timeout_s, found.lifetime_s) == ("modal", 9, 8)
    assert found.profiles == {"default": {"app_name": "hermes-sandbox", "image": "python:3.12"}}
    (tmp_path / "modal_profiles.yaml").write_text(
        "default_profile: gpu\nprofiles: {gpu: {gpu: T4, image: torch}, cpu: }\n"
    )
    found = load({**environ, "TERMINAL_MODAL_APP_NAME": "mine"})
    assert found.default_profile == "gpu"
    assert found.profiles["gpu"] == {"app_name": "mine", "gpu": "T4", "image": "torch"}
    assert found.profiles["cpu"] == {"app_name": "mine", "image": "python:3.12"}
    with pytest.raises(UnknownNameError, match="nothing"):
        load({**environ, "TERMINAL_MODAL_DEFAULT_PROFILE": "nothing"})
    with pytest.raises(ConfigError, match="the terminal tool: TERMINAL_TIMEOUT must be more than 0"):
        load({**environ, "TERMINAL_TIMEOUT": "0"})
