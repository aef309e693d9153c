"""The provider beyond Inspect's own checks: errors, limits, users, the tools that Inspect brings, the end."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_core import ConfigError, InfraError, Runtime, UsageError

pytestmark = [
    pytest.mark.full,
    pytest.mark.entry_points,
    pytest.mark.usefixtures("inspect_extra"),
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),  # Inspect of tenacity
]

EVERYWHERE = pytest.mark.parametrize("place", ["local namespace", "docker root", "ssh namespace"])
LOCAL = pytest.mark.parametrize("place", ["local namespace"])


@EVERYWHERE
async def test_what_can_t_be_started_is_an_ordinary_result(sandbox: Any) -> None:
    missing = await sandbox.exec(["no-such-program", "x"])
    assert (missing.success, missing.returncode, missing.stdout) == (False, 127, "")
    assert missing.stderr
    nowhere = await sandbox.exec(["true"], cwd="no/such/directory")
    assert not nowhere.success
    assert "no/such/directory" in nowhere.stderr


@EVERYWHERE
async def test_a_time_limit_carries_the_output_so_far(sandbox: Any) -> None:
    with pytest.raises(TimeoutError) as late:
        await sandbox.exec(["sh", "-c", "echo begun; sleep 30"], timeout=1)
    assert late.value.truncated_output == "begun\n"  # type: ignore[attr-defined]


@LOCAL
async def test_output_beyond_the_limit_is_an_error_and_standard_error_is_cut(sandbox: Any) -> None:
    from inspect_ai.util import OutputLimitExceededError, override_sandbox_output_limit

    with override_sandbox_output_limit(1000, "exec"), pytest.raises(OutputLimitExceededError) as cut:
        await sandbox.exec(["sh", "-c", "seq 1000"])
    assert "bytes omitted" in (cut.value.truncated_output or "")
    noisy = await sandbox.exec(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x >&2"])
    assert noisy.success
    assert "bytes omitted" in noisy.stderr


@LOCAL
async def test_a_file_without_a_size_is_read(sandbox: Any) -> None:
    assert "Uid:" in await sandbox.read_file("/proc/self/status")
    with pytest.raises(UnicodeDecodeError):
        await sandbox.write_file("raw", b"\xc3\x28")
        await sandbox.read_file("raw")


@LOCAL
async def test_a_slot_that_is_not_root_runs_commands_as_itself_alone(place: str, sandbox: Any) -> None:
    from inspect_ai.util import SandboxUserUnsupportedError

    own = (await sandbox.exec(["id", "-u"])).stdout.strip()
    assert own != "0"
    assert (await sandbox.exec(["id", "-u"], user=own)).stdout.strip() == own
    with pytest.raises(SandboxUserUnsupportedError, match="slot_user: root"):
        await sandbox.exec(["id"], user="root")


@pytest.mark.parametrize("place", ["docker root"])
async def test_root_runs_commands_as_others_with_their_home_and_the_images_path(place: str, sandbox: Any) -> None:
    said = await sandbox.exec(
        ["sh", "-c", "id -un; echo $HOME; echo $PATH; echo $MORE"], user="65534", env={"MORE": "1"}
    )
    ours = await sandbox.exec(["sh", "-c", "echo $PATH"])
    assert said.stdout.split() == ["nobody", "/nonexistent", ours.stdout.strip(), "1"]


@pytest.mark.parametrize("place", ["local namespace", "docker user", "docker root", "ssh namespace"])
async def test_the_tools_that_inspect_puts_into_a_sandbox_work(place: str, sandbox: Any) -> None:
    from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy

    sandbox = SandboxEnvironmentProxy(sandbox)
    done = await sandbox.exec_remote(["sh", "-c", "echo out; echo err >&2; exit 3"], stream=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    running = await sandbox.exec_remote(["sh", "-c", "echo begun; sleep 60"])
    first = await anext(aiter(running))
    assert first.data == "begun\n"
    await running.kill()


@LOCAL
async def test_two_samples_of_one_sandbox_have_tools_of_their_own(place: str, sandbox: Any, settings: Any) -> None:
    from hermes_inspect import HermesSandbox, HermesSandboxConfig
    from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy

    config = HermesSandboxConfig(**settings)
    others = await HermesSandbox.sample_init("task", config, {})
    try:
        assert others["default"]._slot.sandbox_id == sandbox._slot.sandbox_id
        for each in (sandbox, others["default"]):
            done = await SandboxEnvironmentProxy(each).exec_remote(["true"], stream=False)
            assert done.success
    finally:
        await HermesSandbox.sample_cleanup("task", config, others, True)


@LOCAL
async def test_a_lost_sandbox_is_none_of_the_errors_that_a_model_is_told(place: str, sandbox: Any) -> None:
    from inspect_ai.model._call_tools import tool_call_error

    async with Runtime() as runtime:
        await runtime.backend("local").terminate_id(sandbox._slot.sandbox_id)
    with pytest.raises(InfraError) as lost:
        await sandbox.exec(["true"])
    assert tool_call_error(lost.value, "bash") is None


async def test_a_task_that_can_t_begin_leaves_nothing(inspect_extra: None, leak_check: None) -> None:
    from hermes_inspect import HermesSandbox, HermesSandboxConfig, sandbox

    with pytest.raises(UsageError, match="unknown backend 'locall'"):
        await HermesSandbox.task_init("startup", HermesSandboxConfig(backend="locall"))
    with pytest.raises(ConfigError, match="max_sandbox"):
        await HermesSandbox.task_init("startup", HermesSandboxConfig(backend_config={"max_sandboxes": 0}))
    assert sandbox._eval_runtime is not None
    assert sandbox._eval_runtime.over


async def test_tasks_with_the_same_settings_share_their_sandboxes(inspect_extra: None, leak_check: None) -> None:
    from hermes_inspect import HermesSandbox, HermesSandboxConfig

    configs = [HermesSandboxConfig(), HermesSandboxConfig(cwd="/tmp")]
    assert len({hash(config) for config in configs}) == 2
    for config in configs:
        await HermesSandbox.task_init("startup", config)
    made = [await HermesSandbox.sample_init("task", config, {}) for config in configs]
    slots = [environments["default"]._slot for environments in made]  # type: ignore[attr-defined]
    assert slots[0].sandbox_id == slots[1].sandbox_id
    assert (await made[1]["default"].exec(["pwd"])).stdout == "/tmp\n"
    await HermesSandbox.task_cleanup("shutdown", configs[0], True)
    assert (await made[1]["default"].exec(["true"])).success
    await HermesSandbox.task_cleanup("shutdown", configs[1], True)


async def test_cleanup_by_id_ends_that_sandbox(inspect_extra: None, tmp_path: Path) -> None:
    from hermes_inspect import HermesSandbox, HermesSandboxConfig

    config = HermesSandboxConfig()
    await HermesSandbox.task_init("startup", config)
    environments = await HermesSandbox.sample_init("task", config, {})
    sandbox_id = environments["default"]._slot.sandbox_id  # type: ignore[attr-defined]
    await HermesSandbox.cli_cleanup(sandbox_id)
    async with Runtime() as runtime:
        assert sandbox_id not in {info.sandbox_id for info in await runtime.backend("local").list()}
    await HermesSandbox.task_cleanup("shutdown", config, True)


def test_another_version_of_inspect_is_named(
    inspect_extra: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hermes_inspect.version import INSPECT

    for name in [name for name in sys.modules if name.startswith("hermes_inspect")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setitem(sys.modules, "hermes_inspect.sandbox", None)
    with pytest.raises(ImportError, match=rf"tested with inspect-ai {INSPECT.tested}, and this is inspect-ai 9\.9"):
        import hermes_inspect.provider  # noqa: F401
    assert "and this is inspect-ai 9.9" in caplog.text


COMPOSE = """
services:
  default:
    image: python:3.11
    command: tail -f /dev/null
    init: true
    mem_limit: 0.5gb
    cpus: 1.0
    network_mode: none
    working_dir: /work
    environment: [A=1]
"""


def test_what_was_written_for_docker_is_read(inspect_extra: None, tmp_path: Path) -> None:
    from hermes_inspect.config import read_config

    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)
    config = read_config(str(file))
    assert (config.backend, config.isolation, config.cwd) == ("docker", "dedicated", "/work")
    assert config.backend_config == {
        "slot_user": "root",
        "image": "python:3.11",
        "memory": 512,
        "cpu": 1.0,
        "network": "none",
        "env_vars": {"A": "1"},
    }
    file.write_text("services: {default: {build: {context: image}}}")
    assert read_config(str(file)).backend_config["dockerfile"] == str(tmp_path / "image")
    assert read_config(str(tmp_path / "Dockerfile")).backend_config["dockerfile"] == str(tmp_path)
    for text, said in (
        ("services: {a: {image: x}, b: {image: y}}", "services a, b"),
        ("services: {default: {image: x, privileged: true}}", "privileged"),
        ("services: {default: {image: 'x:${SAMPLE_METADATA_TAG}'}}", "SAMPLE_METADATA_TAG"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_config(str(file))
    ours = tmp_path / "hermes.yaml"
    ours.write_text("isolatio: user")
    with pytest.raises(UsageError, match="isolation"):
        read_config(str(ours))


async def test_no_sample_waits_for_a_loop_that_is_gone(inspect_extra: None) -> None:
    from hermes_inspect import sandbox

    def elsewhere() -> Any:
        async def take() -> Any:
            return sandbox.eval_runtime()

        with asyncio.Runner() as runner:  # Inspect's own `asyncio.run` closes no loop
            return runner.run(take())

    first = await asyncio.to_thread(elsewhere)
    assert sandbox.eval_runtime() is not first
    sandbox._eval_runtime = None
