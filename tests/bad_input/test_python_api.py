"""The same from Python: each error is of a kind that can be caught, says what to do, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import (
    ConfigError,
    DatasetError,
    ErrorKind,
    HermesError,
    PluginError,
    PolicyError,
    StaleSlotError,
    UnknownNameError,
    UsageError,
)
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.settings import Settings
from hermes_core.soundness.rescore import rescore
from hermes_core.soundness.validate import validate


@pytest.fixture
async def runtime(tmp_path):
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as made:
        yield made


@pytest.fixture
def env(tmp_path) -> dict[str, Any]:
    row = {"id": "a", "prompt": "p", "check": "true", "solution": "true"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    return {"dataset_name": str(tmp_path / "tasks.jsonl")}


@pytest.fixture
def level(level) -> str:
    return level[1]


@pytest.fixture
def no_sandbox(monkeypatch):
    """None may be made."""

    async def create(self, spec):
        raise AssertionError("a sandbox was asked for")

    monkeypatch.setattr(LocalBackend, "create", create)


RUNS = {
    "environment": (["tsks"], {}, UnknownNameError, "did you mean 'tasks'"),
    "agent": (["tasks", "orcale"], {}, UnknownNameError, "did you mean 'oracle'"),
    "backend": (["tasks", "oracle"], {"backend": "locl"}, UnknownNameError, "did you mean 'local'"),
    "isolation": (["tasks", "oracle"], {"isolation": "namespaces"}, UnknownNameError, "did you mean 'namespace'"),
    "option": (["tasks", "oracle"], {"groupsize": 2}, UnknownNameError, "did you mean 'group_size'"),
    "type": (["tasks", "oracle"], {"concurrency": "many"}, ConfigError, "concurrency must be a whole number"),
    "fraction": (["tasks", "oracle"], {"concurrency": 1.5}, ConfigError, "concurrency must be a whole number"),
    "negative": (["tasks", "oracle"], {"infra_retries": -1}, ConfigError, "infra_retries must be at least 0"),
    "backend config": (["tasks", "oracle"], {"backend_config": {"cpus": 1}}, UnknownNameError, "did you mean 'cpu'"),
    "resume": (["tasks", "oracle"], {"resume": True}, UsageError, "no run to resume was named"),
    "settings": (["tasks", "oracle"], {"settings": {"modle": "m"}}, UnknownNameError, "did you mean 'model'"),
    "model": (["tasks", "model"], {}, ConfigError, "no model is named"),
    "url": (
        ["tasks", "model"],
        {"settings": {"model": "m", "base_url": "x"}},
        ConfigError,
        "is not the URL of a server",
    ),
    "folder": (["tasks", "oracle"], {"out_dir": "/proc/nowhere"}, UsageError, "can't use /proc/nowhere"),
    "dataset": (["tasks", "oracle"], {"env": {"dataset_name": "/nowhere"}}, DatasetError, "can't read /nowhere"),
    "key": (["tasks", "oracle"], {"env": {"dataset": "x"}}, UnknownNameError, "did you mean 'dataset_name'"),
    "toolset": (["tasks", "oracle"], {"env": {"enabled_toolsets": ["fle"]}}, UnknownNameError, "did you mean 'file'"),
    "distribution": (["tasks", "oracle"], {"env": {"distribution": "balancd"}}, UnknownNameError, "mean 'balanced'"),
    "both": (
        ["tasks", "oracle"],
        {"env": {"distribution": "balanced", "enabled_toolsets": ["file"]}},
        UsageError,
        "exclude each other",
    ),
    "slots": (
        ["tasks", "oracle"],
        {"backend_config": {"slots_per_sandbox": 2, "max_sandboxes": 1}},
        UsageError,
        "leave no slot for agents",
    ),
    "unisolated": (
        ["tasks", "oracle"],
        {"isolation": "shared", "allow_unisolated": False},
        UsageError,
        "accepts no isolation below 'user'",
    ),
}


@pytest.mark.usefixtures("no_sandbox", "loop_lag")
@pytest.mark.loop_stall(1.0)  # the first import of pydantic models, of the openai SDK
@pytest.mark.parametrize(("what", "options", "error", "message"), RUNS.values(), ids=RUNS)
async def test_a_run_that_can_not_be_is_refused(runtime, env, level, what, options, error, message):
    given = {"isolation": level, "allow_unisolated": True, **options, "env": {**env, **options.get("env", {})}}
    with pytest.raises(error, match=message) as caught:
        await run_rollouts(runtime, *what, **given)
    assert isinstance(caught.value, HermesError)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_sandbox")
async def test_validation_and_rescoring_refuse_the_same(runtime, env, tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'tasks'"):
        await validate(runtime, "tsks", env=env)
    with pytest.raises(ConfigError, match="group_size must be at least 1"):
        await validate(runtime, "tasks", env=env, repeat=0)
    with pytest.raises(UnknownNameError, match="did you mean 'local'"):
        await validate(runtime, "tasks", env=env, backend="locl")
    with pytest.raises(UsageError, match=r"no usable run\.json"):
        await rescore(runtime, tmp_path)


async def test_a_tool_backend_that_can_not_be_is_refused(runtime):
    for arguments, error, message in [
        ({"name": "locl"}, UnknownNameError, "did you mean 'local'"),
        ({"name": "local", "isolation": "usr"}, UnknownNameError, "did you mean 'user'"),
        ({"name": "local", "isolation": Isolation.DEDICATED}, PolicyError, "can't grant isolation 'dedicated'"),
        ({"name": "local", "isolation": "shared", "config": {"cpus": 1}}, UnknownNameError, "did you mean 'cpu'"),
        (
            {"name": "local", "isolation": "shared", "profiles": {"a": {"memory": "much"}}},
            ConfigError,
            "profile 'a': memory must be a whole number, not 'much'",
        ),
    ]:
        with pytest.raises(error, match=message):
            runtime.tool_backend(**arguments)


async def test_a_closed_runtime_says_so(runtime):
    await runtime.aclose()
    with pytest.raises(UsageError, match="this runtime is closed"):
        runtime.tool_backend("local", isolation="shared")


async def test_names_and_limits_of_calls(runtime, level):
    async with runtime.tool_backend("local", isolation=level) as backend:
        with pytest.raises(UnknownNameError, match="unknown profile 'gpu'"):
            await backend.acquire(profile="gpu")
        with pytest.raises(UsageError, match="a positive number of seconds, not -1"):
            await backend.acquire(timeout_s=-1)
        slot = await backend.acquire("t")
        unknown = await backend.execute(slot, "bsh", {"command": "true"})
        assert (unknown.success, unknown.error_kind) == (False, ErrorKind.COMMAND)
        assert "unknown tool of the slot 'bsh' (did you mean 'bash'?" in unknown.error
        for limit in (0, -1, float("nan"), float("inf"), True, "3"):
            with pytest.raises(UsageError, match="a positive number of seconds"):
                await backend.execute(slot, "bash", {"command": "true"}, timeout_s=limit)
        for arguments, word in [
            ({}, "command"),
            ({"command": "true", "cmd": "x"}, "cmd"),
            ({"command": "a\0b"}, "NUL"),
            ({"command": "true", "cwd": "a\0b"}, "NUL"),
            ({"command": "true", "env": {"A=B": "1"}}, "environment variable name"),
            ({"command": "true", "cwd": "/nowhere"}, "/nowhere"),
            ({"command": 7}, "command"),
        ]:
            refused = await backend.execute(slot, "bash", arguments)
            assert (refused.success, refused.error_kind) == (False, ErrorKind.COMMAND), arguments
            assert word in refused.error, refused.error
        await backend.release(slot, reset_workspace=True)
        with pytest.raises(StaleSlotError, match="released"):
            await backend.execute(slot, "bash", {"command": "true"})


async def test_output_that_is_no_text_is_told_with_what_can_be_read(runtime, level):
    async with runtime.tool_backend("local", isolation=level) as backend, backend.lease() as slot:
        result = await backend.execute(slot, "bash", {"command": "printf 'a\\377b\\000c\\303'"})
        assert (result.success, result.output) == (True, "a\ufffdb\0c\ufffd")
        assert result.metadata["stdout_bytes"] == 6
        raw = await backend.commands(slot).run("printf 'a\\377b\\000c'")
        assert raw.stdout == b"a\xffb\0c"


async def test_a_full_disk_of_ours_is_no_score(runtime, env, tmp_path):
    """A pool whose sandbox has no room even for the guest says so, and nothing of it is left."""
    given = {"env": env, "isolation": "user", "backend_config": {"tmpfs_size": 0}}
    with pytest.raises(ConfigError, match="tmpfs_size must be more than 0"):
        await run_rollouts(runtime, "tasks", "oracle", out_dir=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_two_broken_plugins_are_told_apart():
    class Nothing:
        pass

    with pytest.raises(PluginError, match=r"plugin 'Nothing' \(given to the runtime\): it implements no hook"):
        Runtime(Settings(), plugins=[Nothing()], load_entry_points=False)


def test_settings_that_are_wrong_are_refused(tmp_path: Path):
    with pytest.raises(UnknownNameError, match="did you mean 'owner'"):
        Settings.load({"HERMES_ENV_FILE": ""}, ownr="me")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml, named by HERMES_CONFIG, can't be read"):
        Settings.load({"HERMES_ENV_FILE": "", "HERMES_CONFIG": str(tmp_path / "nowhere.yaml")})
