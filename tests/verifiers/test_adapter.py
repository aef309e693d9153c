"""What verifiers gets of a rollout, however it ends: with its own Env, interception server and client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call
from hermes_verifiers import worker

from hermes_core import Environment, Runtime, SetupFailed, hookimpl
from hermes_core.errors import UnknownNameError
from hermes_core.runs import trainer

pytestmark = [
    pytest.mark.usefixtures("verifiers_extra"),
    pytest.mark.filterwarnings("ignore"),  # those of verifiers and of what it needs
]

LEVEL = {} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}

Play = Callable[[str], Generator[ScriptedCall, Any, str]]


def writes_1(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """A model that solves one of the tasks."""
    yield call("terminal", command="echo 1 > out.txt")
    return "Done."


def sleeps(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """A model that does what is asked for, and does not come to an end."""
    yield call("terminal", command="echo 1 > out.txt; sleep 60")
    return "Done."


@asynccontextmanager
async def serving(
    env: dict[str, Any], play: Play = writes_1, environment: str = "tasks", agent: Any = None, **run: Any
) -> AsyncIterator[Any]:
    """An Env that serves, with the scripted model: `await served(rollouts)` gives the traces of each task."""
    import verifiers.v1 as vf
    from hermes_rl import HermesEnv
    from hermes_verifiers.adapter import HermesEnvConfig
    from verifiers.v1.clients import ModelContext

    taskset = {"id": "hermes_rl", "environment": environment, "env": env, "run": {**LEVEL, **run}}
    settings = {"endpoint_patience_s": 1.0}
    given = {"harness": {"id": "hermes_rl", "settings": settings}, "runtime": {"type": "subprocess"}, **(agent or {})}
    made = HermesEnv(HermesEnvConfig.model_validate({"taskset": taskset, "agent": given}))
    async with ScriptedServer(ToolScript(play)) as server, made.serving():
        client = vf.EvalClientConfig(base_url=server.base_url, api_key_var="NONE")

        async def traces(rollouts: int = 1) -> dict[str, list[Any]]:
            ctx = ModelContext(model="scripted", client=client)
            slots = [slot for task in made.taskset for slot in made.slots(task, rollouts)]
            episodes = await asyncio.gather(*(made.run_slot(slot, ctx) for slot in slots))
            found: dict[str, list[Any]] = {}
            for episode in episodes:
                (trace,) = episode.traces
                found.setdefault(trace.task.key, []).append(trace)
            return found

        traces.server, traces.env = server, made  # type: ignore[attr-defined]
        yield traces


def error_of(trace: Any) -> tuple[str, str]:
    """The kind of a trace's error; it has no reward."""
    assert not trace.ok
    assert [reward for reward in trace.rewards.values() if reward is not None] == []
    return trace.errors[-1].type, trace.errors[-1].message


@pytest.mark.usefixtures("leak_check")
async def test_rollouts_are_scored_and_recorded(tasks: dict[str, Any]) -> None:
    async with serving(tasks, concurrency=8) as traces:
        found = await traces(3)
    assert {key: [trace.reward for trace in group] for key, group in found.items()} == {
        "task-0": [0.0] * 3,
        "task-1": [1.0] * 3,
        "task-2": [0.0] * 3,
    }
    for trace in (trace for group in found.values() for trace in group):
        assert (trace.ok, trace.stop_condition, trace.num_turns, trace.num_branches) == (True, "agent_completed", 2, 1)
        assert {tool.name for tool in trace.tools} >= {"terminal", "read_file"}
        assert [message.role for message in trace.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert trace.info["hermes"]["mask_sample"] is False
        assert trace.info["hermes"]["timings"]["verify_s"] > 0
    assert len({trace.id for group in found.values() for trace in group}) == 9


@pytest.mark.usefixtures("leak_check")
async def test_a_setting_that_the_agent_has_not_is_refused_before_the_first_rollout(tasks: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError, match="'max_turn'"):
        async with serving(tasks, agent={"harness": {"id": "hermes_rl", "settings": {"max_turn": 3}}}):
            pytest.fail("it serves")


async def test_the_reference_solutions_are_valid(tasks: dict[str, Any]) -> None:
    from hermes_rl import HermesTaskset
    from hermes_verifiers.adapter import HermesTasksetConfig

    taskset = HermesTaskset(HermesTasksetConfig(id="hermes_rl", env=tasks, run=worker.WorkerOptions(**LEVEL)))
    assert await asyncio.gather(*(task.validate(None) for task in taskset)) == [True] * 3


@pytest.fixture
def place(tmp_path: Path, leak_check: None) -> Iterator[dict[str, Any]]:
    """The options for a folder of the run's own, in which nothing may be left."""
    sandboxes = tmp_path / "sandboxes"
    yield {"backend_config": {"state_dir": str(sandboxes)}}
    assert not list(sandboxes.iterdir())


async def test_a_killed_sandbox_is_a_sandbox_error(tasks: dict[str, Any], place: dict[str, Any]) -> None:
    from hermes_verifiers.adapter import worker_of

    plays = [sleeps]
    async with serving(tasks, lambda prompt: plays[-1](prompt), concurrency=3, **place) as traces:
        rollouts = asyncio.create_task(traces())
        while traces.server.request_count < 3:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        async with worker_of(traces.env.taskset.config).open() as run:
            backend = run.session.runtime.backend("local")
            for sandbox in await backend.list(run.session.runtime.owner):
                await backend.terminate_id(sandbox.sandbox_id)
        found = await rollouts
        plays.append(writes_1)
        assert sum(trace.reward for (trace,) in (await traces()).values()) == 1.0, "the next rollouts fail, too"
    for (trace,) in found.values():
        kind, message = error_of(trace)
        assert (kind, message[:13]) == ("SandboxError", "infra (agent)")
        assert trace.info["hermes"]["failure_kind"] == "infra"
        assert trace.num_branches == 1, "an attempt that was given up is not trained on"


async def test_a_dead_endpoint_is_the_error_of_verifiers_own(tasks: dict[str, Any], place: dict[str, Any]) -> None:
    def asks_twice(prompt: str) -> Generator[ScriptedCall, Any, str]:
        yield call("terminal", command="sleep 2")
        return "Done."

    async with serving(tasks, asks_twice, **place) as traces:
        rollouts = asyncio.create_task(traces())
        while traces.server.request_count < 3:
            await asyncio.sleep(0.05)
        await traces.server.__aexit__(None, None, None)
        found = await rollouts
    assert {error_of(trace)[0] for (trace,) in found.values()} == {"ProviderError"}
    assert {trace.info["hermes"]["failure_kind"] for (trace,) in found.values()} <= {"model"}


class Broken(Environment):
    """Hooks that fail, each in its way."""

    name = "broken"

    def items(self) -> list[dict[str, str]]:
        return [{"id": kind} for kind in ("sound", "setup", "hangs", "raises")]

    def format_prompt(self, item: Any) -> str:
        return "do it"

    @hookimpl
    async def setup_trajectory_workspace(self, item: Any) -> dict[str, Any]:
        if item["id"] == "setup":
            raise SetupFailed("no such repository")
        return {}

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any) -> float:
        if item["id"] == "hangs":
            await asyncio.sleep(60)
        if item["id"] == "raises":
            raise RuntimeError("bug")
        return 0.25


class Plugin:
    HERMES_PLUGIN_API = 1

    @hookimpl
    def hermes_register_environments(self, registry: Any) -> None:
        registry.add("broken", Broken)


@pytest.mark.usefixtures("tasks")
async def test_a_broken_hook_is_a_task_error(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "Runtime", partial(Runtime, plugins=[Plugin()]))
    async with serving({}, environment="broken", verify_timeout=1, concurrency=2, **place) as traces:
        await traces()
        found = {key: trace for key, (trace,) in (await traces()).items()}  # no place is lost
    assert found.pop("sound").reward == 0.25
    assert {key: error_of(trace)[0] for key, trace in found.items()} == dict.fromkeys(found, "TaskError")
    assert {key: trace.info["hermes"]["failure_kind"] for key, trace in found.items()} == {
        "setup": "setup",
        "hangs": "verifier",
        "raises": "verifier",
    }
    assert "not done after 1 s" in error_of(found["hangs"])[1]


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("limit", ["ours", "theirs"])
async def test_what_was_done_within_the_time_limit_is_scored(tasks: dict[str, Any], limit: str) -> None:
    run = {"rollout_timeout": 2} if limit == "ours" else {}
    agent = {"timeout": {"rollout": 2}} if limit == "theirs" else {}
    async with serving(tasks, sleeps, agent=agent, **run) as traces:
        found = {key: trace for key, (trace,) in (await traces()).items()}
    assert {key: trace.reward for key, trace in found.items()} == {"task-0": 0.0, "task-1": 1.0, "task-2": 0.0}
    assert {(trace.ok, trace.is_timeout, trace.stop_condition) for trace in found.values()} == {
        (True, True, "agent_timeout")
    }


async def test_a_limit_of_verifiers_ends_the_conversation_which_is_scored(tasks: dict[str, Any]) -> None:
    async with serving(tasks, agent={"max_turns": 1}) as traces:
        found = {key: trace for key, (trace,) in (await traces()).items()}
    assert {key: trace.reward for key, trace in found.items()} == {"task-0": 0.0, "task-1": 1.0, "task-2": 0.0}
    assert {(trace.ok, trace.stop_condition) for trace in found.values()} == {(True, "max_turns")}


async def test_a_cancelled_evaluation_leaves_nothing(tasks: dict[str, Any], leak_check: None) -> None:
    async with serving(tasks, sleeps) as traces:
        rollouts = asyncio.create_task(traces())
        while traces.server.request_count < 3:
            await asyncio.sleep(0.05)
        rollouts.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollouts
