"""E2B failing in every way that the emulator knows: errors say what to do, and nothing is left."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import ChannelLost, ImageError, InfraError, ProvisionError, SandboxLost
from hermes_core.sandbox.contract import Isolation, SandboxSpec, SandboxStatus
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry
from tests.e2b.conftest import E2bEmulator

Spec = Callable[..., SandboxSpec]


def tool_backend(backend: Any, owner: str, **config: Any) -> ToolBackend:
    from hermes_e2b.config import E2bConfig

    settings = {"slots_per_sandbox": 4, "max_sandboxes": 1, "reserve_slots": 0, "acquire_timeout_s": 40, **config}
    profiles = {"default": E2bConfig(**settings)}
    return ToolBackend(backend, profiles=profiles, tools=ToolRegistry(), isolation=Isolation.USER, owner=owner)


async def refusal(backend: Any, spec: SandboxSpec) -> ProvisionError:
    with pytest.raises(ProvisionError) as caught:
        await backend.create(spec)
    return caught.value


async def test_a_rate_limit_is_waited_for_as_long_as_e2b_says(backend: Any, spec: Spec, emulator: E2bEmulator) -> None:
    emulator.fail("create", status=429, headers={"Retry-After": "1"}, times=2)
    began = time.monotonic()
    await backend.create(spec())
    assert time.monotonic() - began > 2


async def test_what_can_not_be_made_says_why(
    backend: Any, spec: Spec, emulator: E2bEmulator, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.fail("create", status=429, message="too many concurrent sandboxes", times=10)
    error = await refusal(backend, spec(name="training"))
    assert error.retryable and "lower max_sandboxes" in str(error) and "too many concurrent" in str(error)
    emulator.reset()
    emulator.fail("create", status=500)
    error = await refusal(backend, spec(name="training"))
    assert error.retryable and "profile 'training'" in str(error) and "status.e2b.dev" in str(error)
    emulator.fail("create", status=503, headers={"Should-Retry": "false"})
    assert (await refusal(backend, spec())).retryable
    emulator.fail("create", status=400, message="Timeout cannot be greater than 1 hours")
    error = await refusal(backend, spec())
    assert not error.retryable and "greater than 1 hours" in str(error)
    error = await refusal(backend, spec(image="nobodys"))
    assert isinstance(error, ImageError) and "'nobodys'" in str(error) and "e2b template list" in str(error)
    emulator.fail("Start", status=500, times=2)
    assert (await refusal(backend, spec())).retryable
    monkeypatch.setenv("E2B_API_KEY", "of-somebody-else")
    error = await refusal(backend, spec())
    assert not error.retryable and "E2B_API_KEY" in str(error)
    monkeypatch.setenv("E2B_API_KEY", "e2b_emulator")
    assert await backend.list(owner) == []


async def test_a_creation_whose_answer_is_lost_leaves_nothing(
    backend: Any, spec: Spec, emulator: E2bEmulator, owner: str
) -> None:
    emulator.fail("create", lose_answer=True)
    wanted = spec()
    assert (await refusal(backend, wanted)).retryable
    assert await backend.list(owner) == []
    sandbox = await backend.create(wanted)
    assert [info.sandbox_id for info in await backend.list(owner)] == [sandbox.id]


async def test_a_sandbox_whose_creation_was_lost_is_found_and_begun(
    backend: Any, spec: Spec, emulator: E2bEmulator, owner: str
) -> None:
    emulator.fail("create", lose_answer=True)
    emulator.fail("kill", status=500)
    wanted = spec()
    await refusal(backend, wanted)
    [left] = await backend.list(owner)
    sandbox = await backend.create(wanted)
    assert sandbox.id == left.sandbox_id and sandbox.id in backend._keep_alive
    channel = await sandbox.open(["ls", "-d", "/data"])  # made by the main process, which had not begun before
    assert await channel.read(100) == b"/data\n"
    await channel.aclose()


async def test_a_cancelled_creation_ends_what_it_began(
    backend: Any, spec: Spec, emulator: E2bEmulator, owner: str
) -> None:
    emulator.fail("Start", delay_s=5)
    creating = asyncio.create_task(backend.create(spec()))
    while not await backend.list(owner):
        await asyncio.sleep(0.02)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert await backend.list(owner) == []


async def test_a_program_whose_start_was_cancelled_does_not_run(
    backend: Any, spec: Spec, emulator: E2bEmulator
) -> None:
    sandbox = await backend.create(spec())
    emulator.fail("Start", lose_answer=True)
    with pytest.raises(ChannelLost):
        await sandbox.open(["sleep", "4321"])
    channel = await sandbox.open(["sh", "-c", "sleep 0.5; ps ax | grep -c '[s]leep 4321'"])
    assert await channel.read(100) == b"0\n"
    await channel.aclose()


async def test_the_api_is_out_of_reach(backend: Any, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await backend.create(spec())
    url = os.environ["E2B_API_URL"]
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:1")
    with pytest.raises(ChannelLost, match="E2B could not be reached"):
        await sandbox.status()
    with pytest.raises(ChannelLost):
        await backend.list()
    assert (await refusal(backend, spec())).retryable
    assert not (await backend.check()).usable
    monkeypatch.setenv("E2B_API_URL", url)
    assert await sandbox.status() is SandboxStatus.RUNNING


async def test_an_answer_that_is_no_answer(backend: Any, spec: Spec, emulator: E2bEmulator) -> None:
    sandbox = await backend.create(spec())
    emulator.fail("get", status=200, message="what is this?")
    with pytest.raises(ChannelLost):
        await sandbox.status()
    emulator.fail("create", status=201)
    assert (await refusal(backend, spec())).retryable


async def test_a_sandbox_that_has_timed_out(backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec())
    channel = await sandbox.open(["sleep", "1000"])
    await backend._api.extend(sandbox.id, 0)
    with pytest.raises(ChannelLost):
        async with asyncio.timeout(20):
            await channel.wait()
    await channel.aclose()
    with pytest.raises(SandboxLost) as caught:
        await sandbox.open(["true"])
    assert caught.value.sandbox_id == sandbox.id
    assert await sandbox.status() is SandboxStatus.GONE


async def test_the_stream_is_cut_in_100_mb_of_output(backend: Any, emulator: E2bEmulator, owner: str) -> None:
    async with tool_backend(backend, owner) as tools:
        emulator.fail("Start", cut_after=16_000_000, times=12)
        slot = await tools.acquire("a")
        commands = tools.commands(slot)
        said = await commands.run("seq 1 13000000 | head -c 100000000 >numbers; sha256sum <numbers", timeout_s=120)
        digest, size = hashlib.sha256(), 0
        while data := (await commands.read_file("numbers", offset=size, limit=25_000_000)).data:
            digest.update(data)
            size += len(data)
        assert size == 100_000_000
        assert digest.hexdigest() == said.text.split()[0]
        assert len(emulator.calls("Start")) >= 6


TASKS = [
    {
        "id": f"t{number}",
        "prompt": "Make the file `done`.",
        "solution": "sleep 1; echo done >done",
        "check": "test -s done",
    }
    for number in range(8)
]


async def test_sandboxes_end_under_rollouts_and_each_rollout_is_scored_once(
    backend: Any, emulator: E2bEmulator, owner: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    argv = (
        *(sys.executable, "-c", "from hermes_core.cli.main import main; main()", "rollout", "tasks", "--json"),
        *(f"--env.dataset_name={tmp_path}/tasks.jsonl", "--backend", "e2b", "--agent", "oracle"),
        *("--backend.slots_per_sandbox=3", "--backend.max_sandboxes=2", "--out", str(tmp_path / "out")),
    )
    environment = os.environ | {"HERMES_PLUGINS": "e2b", "XDG_STATE_HOME": str(tmp_path), "HERMES_OWNER": owner}
    run = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=environment, cwd=tmp_path)
    ended = 0
    while ended < 2 and run.returncode is None:
        for info in await backend.list(owner):
            await asyncio.sleep(1.2)
            await backend.terminate_id(info.sandbox_id)
            ended += 1
        await asyncio.sleep(0.05)
    out, _ = await run.communicate()
    summary = json.loads(out)
    assert (summary["scored"], summary["total"], summary["mean_reward"]) == (8, 8, 1.0), summary
    assert await backend.list(owner) == []
    assert ended >= 2


def test_every_error_of_ours_is_infra(e2b_sdk: None) -> None:
    from e2b import exceptions
    from hermes_e2b.failures import creation_errors, sandbox_errors

    kinds = [each for each in vars(exceptions).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(kinds) > 10
    for kind in kinds:
        for context in (creation_errors("p", "t"), sandbox_errors("s")):
            with pytest.raises(InfraError), context:
                raise kind("said by E2B")
