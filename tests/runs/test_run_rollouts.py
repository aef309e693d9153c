"""Many rollouts on the real local backend: scores, groups, limits, lost sandboxes, resuming, cancelling."""

import asyncio
import functools
import json
import os
import platform
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript, call

from hermes_core.agents.base import StopReason
from hermes_core.cli.exits import exit_code
from hermes_core.environment import Environment
from hermes_core.errors import (
    ConfigError,
    InfraError,
    ModelError,
    PluginError,
    PolicyError,
    SetupFailed,
    UnknownNameError,
    UsageError,
)
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.records import store
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.images import ImageBuild
from hermes_core.sandbox.pool.cost import Meter
from hermes_core.settings import Settings
from hermes_core.tools.base import Tool, ToolParams

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}

TASKS = [
    {"id": "hello", "prompt": "Write hello", "check": "grep -qx hello out.txt", "solution": "echo hello > out.txt"},
    {
        "id": "two files",
        "prompt": "Two files",
        "setup": "mkdir in",
        "check": ["test -d in", "test -f a"],
        "solution": ["touch a"],
    },
    {"id": "quotes 'n' $things", "prompt": "p", "check": 'test -f "it\'s"', "solution": 'touch "it\'s"'},
]


@pytest.fixture
def tasks(tmp_path: Path):
    def write(rows=TASKS) -> dict[str, str]:
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"dataset_name": str(path)}

    return write


@pytest.fixture
async def runtime(tmp_path: Path):
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, load_entry_points=False) as one:
        yield one


class Watcher:
    """A plugin that knows which sandboxes there are."""

    def __init__(self):
        self.sandboxes, self.lost, self.started, self.finished, self.calls = [], [], [], [], []

    @hookimpl
    def hermes_sandbox_created(self, sandbox_id):
        self.sandboxes.append(sandbox_id)

    @hookimpl
    def hermes_sandbox_lost(self, sandbox_id):
        self.lost.append(sandbox_id)

    @hookimpl
    def hermes_trajectory_started(self, trajectory_id, item_id):
        self.started.append((trajectory_id, item_id))

    @hookimpl
    def hermes_trajectory_finished(self, trajectory_id, record):
        self.finished.append((trajectory_id, record["item_id"]))

    @hookimpl
    def hermes_tool_called(self, trajectory_id, tool_name):
        self.calls.append((trajectory_id, tool_name))


class Shell:
    """An agent that does what a function of the task says."""

    name = "shell"

    def __init__(self, work):
        self._work = work

    async def run(self, task):
        task.result.messages.extend(task.messages)
        await self._work(task)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self):
        pass


class FreshCheck(Environment):
    """Verifies every rollout on a fresh slot."""

    name = "fresh-check"

    def items(self):
        return [{"id": str(number)} for number in range(8)]

    def format_prompt(self, item):
        return f"do {item['id']}"

    @hookimpl
    async def setup_trajectory_workspace(self, item, rollout):
        return {"shared": await rollout.prepare("data", "echo prepared > file")}

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout, workspace_meta, exec_tool):
        await exec_tool("write_file", {"path": "mine", "content": item["id"]})
        async with rollout.fresh_slot() as fresh:
            assert fresh.slot.slot_id != rollout.slot.slot_id
            assert await fresh.commands.list_dir() == []
            prepared = await fresh.prepare("data", "echo prepared > file")
            await asyncio.sleep(0.05)
            read = await fresh.commands.read_file(f"{prepared}/file")
            await fresh.exec_tool("write_file", {"path": "theirs", "content": item["id"]})
        return float(read.data == b"prepared\n" and prepared == workspace_meta["shared"])


async def terminal(task, command: str, **args) -> dict:
    return json.loads(await task.tool_handler("terminal", {"command": command, **args}, task.trajectory_id))


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.loop_stall(0.2)  # what is imported and made once included
@pytest.mark.usefixtures("leak_check", "loop_lag")
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
async def test_oracle_scores_one_and_nop_nothing_and_nothing_is_left(runtime, tasks, tmp_path, agent, reward):
    out = tmp_path / "out"
    summary = await run_rollouts(runtime, "tasks", agent, env=tasks(), out_dir=out, seed=7, **ISOLATION)
    assert summary.complete
    assert (summary.total, summary.scored, summary.mean_reward) == (3, 3, reward)
    assert summary.solved == 3 * reward
    assert {one["item_id"]: one["reward"] for one in records(out)} == {row["id"]: reward for row in TASKS}
    for one in records(out):
        assert (one["failure"], one["environment"], one["agent"], one["backend"]) == (None, "tasks", agent, "local")
        assert all(seconds is not None for seconds in one["timings"].values())
    assert json.loads((out / "summary.json").read_text()) == summary.to_dict()
    run = json.loads((out / "run.json").read_text())
    assert (run["seed"], run["configuration"]["env"]["seed"]) == (7, 7)
    assert {"python", "hermes-rl"} <= run["versions"].keys()


async def test_a_group_is_rolled_out_together_and_observed(tmp_path, tasks):
    watcher, seen, together = Watcher(), [], {}

    async def work(task):
        barrier = together.setdefault(task.messages[-1]["content"], asyncio.Barrier(3))
        async with asyncio.timeout(20):
            await barrier.wait()

    async with Runtime(Settings(state_dir=tmp_path), plugins=[watcher], load_entry_points=False) as runtime:
        summary = await run_rollouts(
            runtime, "tasks", Shell(work), env=tasks(), group_size=3, concurrency=3, on_record=seen.append, **ISOLATION
        )
    assert (summary.total, summary.scored) == (9, 9)
    assert Counter((one["group"], one["rollout_index"]) for one in seen) == {
        (row["id"], index): 1 for row in TASKS for index in range(3)
    }
    assert len({one["trajectory_id"] for one in seen}) == 9
    assert sorted(watcher.started) == sorted(watcher.finished)
    assert len(watcher.started) == 9


async def test_a_group_is_placed_on_one_sandbox_where_it_fits(runtime):
    places = {}

    class Placed(FreshCheck):
        @hookimpl
        async def setup_trajectory_workspace(self, item, rollout):
            places.setdefault(item["id"], []).append(rollout.slot.sandbox_id)

        @hookimpl
        async def verify_and_score_trajectory(self, item, rollout):
            async with rollout.fresh_slot() as fresh:
                places[item["id"]].append(fresh.slot.sandbox_id)
            return 1.0

    backend = {"slots_per_sandbox": 8, "max_sandboxes": 3, "min_sandboxes": 3, "reserve_slots": 4}
    await run_rollouts(runtime, Placed(), "nop", group_size=3, concurrency=6, backend_config=backend, **ISOLATION)
    assert [len(found) for found in places.values()] == [6] * 8
    assert {len(set(found)) for found in places.values()} == {1}
    assert len({found[0] for found in places.values()}) > 1


class Collecting:
    """A plugin whose sink keeps what it is given."""

    def __init__(self):
        self.targets, self.kept, self.closed = [], [], 0

    @hookimpl
    def hermes_register_sinks(self, registry):
        registry.add("collect", self.open)

    def open(self, target):
        if not target:
            raise ConfigError("no target", hint="--sink collect=PLACE")
        self.targets.append(target)
        return self

    async def write(self, record):
        self.kept.append(record["item_id"])

    async def aclose(self):
        self.closed += 1


async def test_records_go_to_the_sinks_that_plugins_register(tmp_path, tasks):
    plugin = Collecting()
    async with Runtime(Settings(state_dir=tmp_path), plugins=[plugin], load_entry_points=False) as runtime:
        run = functools.partial(run_rollouts, runtime, "tasks", "nop", env=tasks(), **ISOLATION)
        await run(sinks=["collect=there"])
        assert (plugin.targets, sorted(plugin.kept), plugin.closed) == (["there"], sorted(t["id"] for t in TASKS), 1)
        for wrong, error in (("colect=x", UnknownNameError), ("collect", ConfigError)):
            with pytest.raises(error):
                await run(sinks=["collect=there", wrong])
        assert plugin.closed == 3


@pytest.mark.parametrize(("method", "says"), [("write", "failed"), ("aclose", "failed when it was closed")])
async def test_a_sink_that_fails_ends_the_run_with_one_error(tmp_path, tasks, monkeypatch, method, says):
    async def fail(*_):
        raise OSError("no route to the database")

    plugin = Collecting()
    monkeypatch.setattr(plugin, method, fail, raising=False)
    async with Runtime(Settings(state_dir=tmp_path), plugins=[plugin], load_entry_points=False) as runtime:
        with pytest.raises(PluginError, match=f"sink 'collect' {says}: .*no route") as failed:
            await run_rollouts(
                runtime, "tasks", "nop", env=tasks(), sinks=["collect=x"], out_dir=tmp_path / "out", **ISOLATION
            )
    records = tmp_path / "out" / "trajectories.jsonl"
    assert records.read_text()
    assert (str(records) in failed.value.hint) == (method == "write")
    assert exit_code(failed.value) == 1


async def test_an_image_that_one_item_can_not_have_is_that_items_failure(runtime, tasks):
    rows = [TASKS[0], {**TASKS[0], "id": "in an image", "image": "python:3.11"}, {**TASKS[0], "id": "another"}]
    found = {}

    def keep(record):
        found[record["item_id"]] = (record["reward"], record["failure"] and record["failure"]["kind"])

    summary = await run_rollouts(runtime, "tasks", "oracle", env=tasks(rows), on_record=keep, **ISOLATION)
    assert found == {TASKS[0]["id"]: (1.0, None), "in an image": (None, "setup"), "another": (1.0, None)}
    assert summary.stopped is None


class Built(FreshCheck):
    item_images = True

    def image(self, item):
        return ImageBuild(Path("context"))


async def test_images_to_be_built_are_refused_at_the_start_where_nothing_builds_them(runtime):
    with pytest.raises(PolicyError, match="backend 'local' builds no images, and context/Dockerfile is to be built"):
        await run_rollouts(runtime, Built(), "nop", **ISOLATION)
    backend = runtime.tool_backend("local", isolation=ISOLATION["isolation"])
    assert await backend.prepare_image("by-name") == "by-name"
    with pytest.raises(PolicyError, match="builds no images"):
        await backend.acquire(image=ImageBuild(Path("context")))


async def test_each_item_gets_the_profile_that_its_environment_names(tmp_path):
    class Sized(FreshCheck):
        def items(self):
            return [{"id": "small"}, {"id": "big"}, {"id": "none"}]

        def profile(self, item):
            return None if item["id"] == "none" else item["id"]

        @hookimpl
        async def verify_and_score_trajectory(self, item, rollout):
            async with rollout.fresh_slot() as fresh:
                here = [await slot.commands.run('echo "$SIZE"') for slot in (rollout, fresh)]
            assert {each.text.strip() for each in here} == {item["id"].replace("none", "usual")}
            return 1.0

    profiles = {name: {"env_vars": {"SIZE": name}} for name in ("usual", "small", "big")}
    settings = Settings(state_dir=tmp_path / "state", profiles=profiles, default_profile="usual")
    async with Runtime(settings, load_entry_points=False) as runtime:
        summary = await run_rollouts(runtime, Sized(), "nop", **ISOLATION)
    assert (summary.solved, summary.failures) == (3, {})


async def test_a_model_over_http_solves_a_task_with_tools(tmp_path, tasks):
    def solver(prompt):
        listing = yield call("terminal", command="ls")
        assert listing["exit_code"] == 0
        yield call("write_file", path="out.txt", content="hello\n")
        return "Done."

    seen, watcher = [], Watcher()
    async with (
        ScriptedServer(ToolScript(solver)) as server,
        Runtime(Settings(state_dir=tmp_path), plugins=[watcher], load_entry_points=False) as runtime,
    ):
        settings = {"model": "scripted", "base_url": server.base_url, "api_key": "sk-very-secret-key"}
        row = {**TASKS[0], "prompt": "The key is sk-very-secret-key"}
        summary = await run_rollouts(
            runtime, "tasks", env=tasks([row]), settings=settings, on_record=seen.append, **ISOLATION
        )
    assert summary.mean_reward == 1.0
    (record,) = seen
    assert record["tool_calls"] == {"attempted": 2, "schema_valid": 2, "executed_ok": 2, "exec_error": 0}
    roles = [message["role"] for message in record["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert watcher.calls == [(record["trajectory_id"], name) for name in ("terminal", "write_file")], "each once"
    assert "sk-very-secret-key" not in json.dumps(record)


async def test_the_record_is_a_whole_account_of_the_rollout(tmp_path, runtime, tasks):
    def solver(prompt):
        yield call("terminal", command="echo hello > out.txt; seq 100000; exit 3")
        yield call("terminal", command="sleep 9", timeout=0.2)
        yield call("nonsense")
        return "Done."

    row = {**TASKS[0], "setup": "echo ready", "metadata": {"level": 2}}
    async with ScriptedServer(ToolScript(solver)) as server:
        settings = {"model": "scripted", "base_url": server.base_url, "extra_body": {"top_k": 4}}
        arguments = {"env": tasks([row]), "settings": settings, "seed": 7, "out_dir": tmp_path / "run", **ISOLATION}
        await run_rollouts(runtime, "tasks", **arguments)
    (record,) = store.records(tmp_path / "run")
    assert (record.model, record.seed, record.isolation) == ("scripted", 7, ISOLATION["isolation"])
    assert (record.item_id, record.item["metadata"], record.image) == ("hello", {"level": 2}, None)
    assert record.versions["python"] == platform.python_version()
    assert {"terminal", "write_file"} < {schema["function"]["name"] for schema in record.tool_schemas}

    assert [turn.message for turn in record.turns] == [1, 3, 5, 7]
    assert {turn.model for turn in record.turns} == {"scripted"}
    assert [turn.stop_reason for turn in record.turns] == ["tool_calls"] * 3 + ["stop"]
    seed = server.requests[-1]["seed"]
    assert {json.dumps(turn.sampling) for turn in record.turns} == {
        json.dumps({"temperature": 1.0, "top_k": 4, "seed": seed})
    }
    first, late, unknown = record.calls
    assert (first.exit_code, first.error, first.bytes_dropped > 500_000) == (3, None, True)
    assert (str(late.error.kind), late.exit_code) == ("time_limit", 124)
    assert (str(unknown.error.kind), unknown.exit_code) == ("unknown_tool", None)
    assert late.ended - late.started >= 0.2
    for turn, one in zip(record.turns, record.calls, strict=False):
        assert turn.started <= turn.ended <= one.started <= one.ended

    setup, room, check = record.sandbox_commands
    assert (setup.stage, setup.exit_code, setup.output) == ("setup", 0, "ready\n")
    assert (room.stage, room.exit_code) == ("verify", 0)
    assert (check.stage, check.command, check.exit_code) == ("verify", TASKS[0]["check"], 0)
    times = [record.started, setup.started, setup.ended, record.turns[0].started, record.turns[-1].ended]
    times += [check.started, check.ended, record.ended]
    assert times == sorted(times)


MISTAKES = {
    "a tool that does not exist": (("basch", {"command": "true"}), "did you mean 'bash'"),
    "an argument that it does not take": (("bash", {"cmd": "true"}), "command"),
    "a tool of the driver's": (("driven", {}), "unknown tool of the slot 'driven'"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("stage", ["setup", "verifier"])
async def test_a_hooks_own_mistake_is_no_reward(runtime, mistake, stage):
    (name, args), says = MISTAKES[mistake]

    class Mistaken(Environment):
        name = "mistaken"

        def items(self):
            return [{"id": "one"}]

        def format_prompt(self, item):
            return "p"

        async def setup_trajectory_workspace(self, item, exec_tool):
            if stage == "setup":
                await exec_tool(name, args)

        async def verify_and_score_trajectory(self, item, result, exec_tool):
            return float((await exec_tool(name, args)).success)

    seen = []
    await run_rollouts(runtime, Mistaken(), "nop", on_record=seen.append, **ISOLATION)
    assert (seen[0]["reward"], seen[0]["failure"]["kind"]) == (None, stage)
    assert says in seen[0]["failure"]["message"]


class TheirError(InfraError):
    """A plugin's, which is made otherwise."""

    def __init__(self, code, *, retry_in):
        super().__init__(f"code {code}")
        self.retry_in = retry_in


@pytest.mark.parametrize("where", ["sandbox", "driver"])
async def test_a_plugins_infrastructure_error_is_never_told_to_the_model(tmp_path, tasks, where):
    async def search(ctx, params):
        raise TheirError(7, retry_in=3)

    class Tools:
        @hookimpl
        def hermes_register_tools(self, registry):
            registry.add(Tool("search", ToolParams, search, "Search.", where=where, toolsets=("theirs",)))

    seen = []
    async with (
        Runtime(Settings(state_dir=tmp_path / "state"), plugins=[Tools()], load_entry_points=False) as runtime,
        ScriptedServer([Reply(tool_calls=[call("search")]), Reply("Done.")]) as server,
    ):
        await run_rollouts(
            *(runtime, "tasks"),
            env={**tasks(TASKS[:1]), "enabled_toolsets": ["theirs"]},
            settings={"model": "scripted", "base_url": server.base_url},
            on_record=seen.append,
            **ISOLATION,
        )
    assert (seen[0]["reward"], seen[0]["failure"]["kind"]) == (None, "infra")
    assert "code 7" in seen[0]["failure"]["message"]


async def test_a_plugins_tool_that_hangs_is_cut_off_and_the_model_goes_on(tmp_path, tasks):
    async def hang(ctx, params):
        await asyncio.sleep(600)

    class Tools:
        @hookimpl
        def hermes_register_tools(self, registry):
            tool = Tool("hang", ToolParams, hang, "Hang.", "driver", ("theirs",))
            registry.add(replace(tool, timeout_s=0.2))

    seen = []
    async with (
        Runtime(Settings(state_dir=tmp_path / "state"), plugins=[Tools()], load_entry_points=False) as runtime,
        ScriptedServer([Reply(tool_calls=[call("hang")]), Reply("Done.")]) as server,
    ):
        await run_rollouts(
            *(runtime, "tasks"),
            env={**tasks(TASKS[:1]), "enabled_toolsets": ["theirs"]},
            settings={"model": "scripted", "base_url": server.base_url},
            on_record=seen.append,
            **ISOLATION,
        )
    assert (seen[0]["reward"], seen[0]["stop_reason"]) == (0.0, "finished")
    assert "hang was not done within its time limit of 0.2 s" in seen[0]["messages"][-2]["content"]


@pytest.mark.parametrize("how", ["exit", "no result"])
async def test_an_agent_that_ends_wrongly_fails_its_own_rollout_alone(runtime, tasks, how):
    class Wrong(Shell):
        name = "wrong"

        async def run(self, task):
            if task.messages[-1]["content"] == "Two files":
                return sys.exit("no key") if how == "exit" else None
            return await super().run(task)

    async def work(task):
        await terminal(task, "echo hello > out.txt")

    seen = []
    await run_rollouts(runtime, "tasks", Wrong(work), env=tasks(TASKS[:2]), on_record=seen.append, **ISOLATION)
    right, wrong = sorted(seen, key=lambda record: record["item_id"])
    assert (right["reward"], wrong["reward"], wrong["failure"]["kind"]) == (1.0, None, "model")
    told = {
        "exit": "sys.exit('no key') was called",
        "no result": "agent 'wrong' returned None, and not the task's result",
    }
    assert told[how] in wrong["failure"]["message"]


@pytest.mark.parametrize("stage", ["setup", "verifier"])
async def test_a_hook_that_exits_fails_its_rollout_alone(runtime, tmp_path, stage):
    class Exiting(FreshCheck):
        @hookimpl
        async def setup_trajectory_workspace(self, item, rollout):
            sys.exit(3) if stage == "setup" else None

        @hookimpl
        async def verify_and_score_trajectory(self, item):
            sys.exit(3)

    summary = await run_rollouts(runtime, Exiting(), "nop", **ISOLATION)
    assert summary.failures == {stage: 8}


async def test_the_stop_reason_of_an_agent_whose_model_fails_says_so(runtime, tasks):
    async def work(task):
        raise ModelError("gone")

    seen = []
    await run_rollouts(runtime, "tasks", Shell(work), env=tasks(TASKS[:1]), on_record=seen.append, **ISOLATION)
    assert (seen[0]["failure"]["kind"], seen[0]["stop_reason"]) == ("model", "model_error")


async def test_over_its_time_a_rollout_is_verified_with_what_is_there(runtime, tasks):
    async def work(task):
        await terminal(task, "echo hello > out.txt")
        await terminal(task, "sleep 60", timeout=60)

    seen = []
    await run_rollouts(
        runtime, "tasks", Shell(work), env=tasks(TASKS[:1]), rollout_timeout=1, on_record=seen.append, **ISOLATION
    )
    assert (seen[0]["reward"], seen[0]["stop_reason"], seen[0]["failure"]) == (1.0, "time_limit", None)
    assert 1 <= seen[0]["timings"]["agent_s"] < 10


async def test_the_agents_processes_are_dead_when_it_is_verified(runtime, tasks):
    loop = "(trap '' TERM HUP; while :; do echo hello > out.txt; sleep 0.01; done) & sleep 0.2"
    row = {"id": "late", "prompt": "p", "check": ["rm -f out.txt", "sleep 0.3", "test ! -e out.txt"]}

    async def work(task):
        await terminal(task, f"setsid nohup sh -c '{loop}' > /dev/null 2>&1 &\nsleep 0.1")
        assert "running" in (await terminal(task, "test -e out.txt && echo running"))["output"]

    summary = await run_rollouts(runtime, "tasks", Shell(work), env=tasks([row]), **ISOLATION)
    assert summary.mean_reward == 1.0


async def test_a_sandbox_killed_under_a_rollout_is_tried_again_on_another(tmp_path, tasks):
    watcher, killed, seen = Watcher(), [], []

    async def work(task):
        if not killed:
            killed.append(watcher.sandboxes[0])
            await runtime.backend("local").terminate_id(killed[0])
            await terminal(task, "true")
        await terminal(task, "echo hello > out.txt")

    async with Runtime(Settings(state_dir=tmp_path / "s"), plugins=[watcher], load_entry_points=False) as runtime:
        summary = await run_rollouts(
            runtime, "tasks", Shell(work), env=tasks(TASKS[:1]), on_record=seen.append, **ISOLATION
        )
    assert (summary.mean_reward, summary.infra_retries, summary.failures) == (1.0, 1, {})
    assert (seen[0]["details"], seen[0]["infra_retries"]) == ({}, 1)
    assert len(watcher.sandboxes) == 2


async def test_a_run_whose_infrastructure_is_broken_stops(tmp_path, tasks):
    watcher = Watcher()

    async def work(task):
        await runtime.backend("local").terminate_id(watcher.sandboxes[-1])
        await terminal(task, "true")

    rows = [{"id": str(number), "prompt": "p", "check": "true"} for number in range(40)]
    async with Runtime(Settings(state_dir=tmp_path / "s"), plugins=[watcher], load_entry_points=False) as runtime:
        summary = await run_rollouts(
            runtime,
            "tasks",
            Shell(work),
            env=tasks(rows),
            stop_on_infra=0.5,
            infra_retries=0,
            concurrency=1,
            out_dir=tmp_path / "out",
            **ISOLATION,
        )
    assert summary.failures == {"infra": 10}
    assert summary.scored == 0
    assert "infrastructure" in summary.stopped
    assert all(one["reward"] is None for one in records(tmp_path / "out"))


@pytest.mark.parametrize(
    ("error", "rate", "ended", "stopped"),
    [
        (ModelError("asleep"), 0.5, {"model": 10}, True),
        (ModelError("asleep"), 1.0, {"model": 14}, False),  # more than the share, not as much as it
        (SetupFailed("no such row"), 0.5, {"model": 14}, False),
    ],
)
async def test_stopping_on_infra_counts_what_the_model_fails_and_not_the_tasks_own(
    runtime, tasks, tmp_path, error, rate, ended, stopped
):
    async def fail(task):
        raise error

    rows = [{"id": str(number), "prompt": "p", "check": "true"} for number in range(14)]
    if isinstance(error, SetupFailed):
        rows, ended = [{**row, "setup": "exit 1"} for row in rows], {"setup": 14}
    how = {"stop_on_infra": rate, "concurrency": 1, "out_dir": tmp_path / "out", **ISOLATION}
    summary = await run_rollouts(runtime, "tasks", Shell(fail), env=tasks(rows), **how)
    assert (summary.failures, summary.scored) == (ended, 0)
    assert ("the model's endpoint" in (summary.stopped or "")) == stopped


async def test_resuming_repeats_no_score_and_loses_no_rollout(runtime, tasks, tmp_path):
    out, calls, broken = tmp_path / "out", Counter(), {"hello"}

    async def work(task):
        item = task.messages[-1]["content"]
        calls[item] += 1
        if item == "Write hello" and "hello" in broken:
            raise SetupFailed("not today")

    arguments = {"env": tasks(), "out_dir": out, "group_size": 2, **ISOLATION}
    first = await run_rollouts(runtime, "tasks", Shell(work), **arguments)
    assert (first.scored, first.failures) == (4, {"setup": 2})
    with (out / "trajectories.jsonl").open("ab") as file:
        file.write(b'{"trajectory_id": "torn')
    broken.clear()
    second = await run_rollouts(runtime, "tasks", Shell(work), **arguments, resume=True)
    assert (second.total, second.scored, second.failures, second.complete) == (6, 6, {}, True)
    assert calls == {"Write hello": 4, "Two files": 2, "p": 2}
    scored = Counter((one["item_id"], one["rollout_index"]) for one in records(out) if one["reward"] is not None)
    assert scored == {(row["id"], index): 1 for row in TASKS for index in range(2)}


async def test_a_run_is_resumed_by_item_whatever_their_order_and_not_with_a_dataset_that_lost_some(
    runtime, tasks, tmp_path
):
    out = tmp_path / "run"

    async def run(rows, *, resume=True):
        return await run_rollouts(runtime, "tasks", "oracle", env=tasks(rows), out_dir=out, resume=resume, **ISOLATION)

    await run(TASKS, resume=False)
    before = (out / "trajectories.jsonl").read_bytes()
    for fewer, named in ((TASKS[1:], "1 items that the dataset no longer has: hello"), (TASKS[:1], "2 items")):
        with pytest.raises(UsageError, match=named):
            await run(fewer)
        assert (out / "trajectories.jsonl").read_bytes() == before
    summary = await run([{**TASKS[0], "id": "new"}, *reversed(TASKS)])
    assert (summary.complete, summary.total) == (True, 4)
    after = (out / "trajectories.jsonl").read_bytes()
    assert after.startswith(before)
    assert [json.loads(line)["item_id"] for line in after[len(before) :].splitlines()] == ["new"]


async def test_a_run_is_not_resumed_with_items_that_have_changed(runtime, tasks, tmp_path):
    out = tmp_path / "run"

    async def run(rows, *, resume=True):
        return await run_rollouts(runtime, "tasks", "oracle", env=tasks(rows), out_dir=out, resume=resume, **ISOLATION)

    await run(TASKS, resume=False)
    before = (out / "trajectories.jsonl").read_bytes()
    others = [{**TASKS[0], "check": "true"}, *TASKS[1:]]
    with pytest.raises(UsageError, match=rf"1 items that have changed since: {TASKS[0]['id']} \(check\)"):
        await run(others)
    assert (out / "trajectories.jsonl").read_bytes() == before
    await run([{**TASKS[0], "id": "new", "check": "true"}, *TASKS])
    assert (out / "trajectories.jsonl").read_bytes().startswith(before)


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 4))])
async def test_cancelled_at_any_moment_it_ends_at_once_and_can_be_resumed(runtime, tasks, tmp_path, seed):
    solution = ["sleep 0.05", "touch a"]
    rows = [
        {"id": str(n), "prompt": "p", "setup": "sleep 0.05", "check": "test -f a", "solution": solution}
        for n in range(12)
    ]
    arguments = {"env": tasks(rows), "out_dir": tmp_path / "out", "concurrency": 3, **ISOLATION}
    task = asyncio.create_task(run_rollouts(runtime, "tasks", "oracle", **arguments))
    await asyncio.sleep(random.Random(seed).uniform(0, 0.8))
    task.cancel()
    async with asyncio.timeout(30):  # a machine may be busy; a rollout that is not cancelled at all never ends
        await asyncio.wait([task])
    if task.cancelled() and (tmp_path / "out" / "summary.json").exists():
        written = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert written["stopped"] == "interrupted" or written["scored"] == 12  # a fast machine may be done by then
    summary = await run_rollouts(runtime, "tasks", "oracle", **arguments, resume=True)
    assert (summary.scored, summary.mean_reward) == (12, 1.0)
    scored = Counter(one["item_id"] for one in records(tmp_path / "out") if one["reward"] is not None)
    assert set(scored.values()) == {1}


@pytest.mark.parametrize("reserve", [1, 4])
async def test_rollouts_never_wait_for_each_others_verification(runtime, reserve):
    backend = {"slots_per_sandbox": 4 + reserve, "max_sandboxes": 1, "reserve_slots": reserve}
    seen = []
    async with asyncio.timeout(30):
        arguments = {"backend_config": backend, "concurrency": 4, "on_record": seen.append, **ISOLATION}
        summary = await run_rollouts(runtime, FreshCheck(), "nop", **arguments)
    assert (summary.scored, summary.mean_reward) == (8, 1.0)
    [prepared] = [ran for record in seen for ran in record["sandbox_commands"]]
    assert (prepared["stage"], prepared["command"], prepared["exit_code"]) == ("setup", "echo prepared > file", 0)


async def test_what_the_agent_left_can_be_had_as_a_diff_that_applies(runtime):
    patches, seen = [], []

    class Repository(FreshCheck):
        name = "repository"

        def items(self):
            return [{"id": "one"}]

        @hookimpl
        async def setup_trajectory_workspace(self, item, rollout):
            script = "git init -q . && printf 'a\\nb\\n' > keep && echo x > gone && git add -A && git commit -qm start"
            assert (await rollout.commands.run(script)).ok

        @hookimpl
        async def verify_and_score_trajectory(self, item, rollout):
            patches.append(await rollout.diff())
            rollout.record_patch(patches[0])
            left = (await rollout.commands.run("ls ran 2>&1; git -c core.fsmonitor= status --porcelain")).text
            async with rollout.fresh_slot() as fresh:
                await self.setup_trajectory_workspace(item, fresh)
                done = await fresh.commands.run("git apply -", stdin=patches[0].encode())
                assert done.ok, done.error_text
                look = await fresh.commands.run("cat keep 'new file'; ls; od -An -tx1 latin bin | tr -d ' \\n'")
            return 1.0, {"left": left, "look": look.text}

    async def work(task):
        await terminal(task, "printf 'a\\nc\\n' > keep; rm gone; echo n > 'new file'; printf 'caf\\351\\n' > latin")
        await terminal(task, "printf '\\000\\377' > bin; git add 'new file'")
        await terminal(task, "git config core.fsmonitor 'touch ran; false'")
        await terminal(task, "printf '#!/bin/sh\\ntouch ran\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/*")
        await terminal(task, "git config diff.external 'touch ran'")

    summary = await run_rollouts(runtime, Repository(), Shell(work), on_record=seen.append, **ISOLATION)
    assert summary.mean_reward == 1.0, seen
    assert seen[0]["patch"] == patches[0]
    assert seen[0]["details"]["look"] == "a\nc\nn\nbin\nkeep\nlatin\nnew file\n636166e90a00ff"
    assert "No such file" in seen[0]["details"]["left"]  # nothing that the agent configured was run
    assert 'A  "new file"\n?? bin' in seen[0]["details"]["left"]  # and its own index is as it left it


async def test_sinks_get_the_records_and_are_closed(runtime, tasks):
    class Sink:
        def __init__(self):
            self.got, self.closed = [], 0

        async def write(self, record):
            await asyncio.sleep(0)
            self.got.append(record["item_id"])

        async def aclose(self):
            self.closed += 1

    sink = Sink()
    await run_rollouts(runtime, "tasks", "nop", env=tasks(), sinks=[sink], **ISOLATION)
    assert sorted(sink.got) == sorted(row["id"] for row in TASKS)
    assert sink.closed == 1


async def test_items_are_selected_and_ordered_by_the_seed(runtime, tasks):
    rows = [{"id": str(number), "prompt": "p", "check": "true"} for number in range(20)]

    async def order(**env):
        seen = []
        await run_rollouts(
            runtime,
            "tasks",
            "nop",
            env={**tasks(rows), **env},
            concurrency=1,
            on_record=lambda record: seen.append(record["item_id"]),
            **ISOLATION,
        )
        return seen

    first = await order(shuffle=True, seed=1, max_items=5)
    assert first == await order(shuffle=True, seed=1, max_items=5)
    assert first != await order(shuffle=True, seed=2, max_items=5)
    assert await order(max_items=3) == ["0", "1", "2"]


async def test_tools_are_drawn_once_for_each_group(runtime, tasks):
    offered = {}

    async def work(task):
        names = tuple(schema["function"]["name"] for schema in task.tool_schemas)
        offered.setdefault(task.messages[-1]["content"], set()).add(names)

    rows = [{"id": str(number), "prompt": str(number), "check": "true"} for number in range(12)]
    env = {**tasks(rows), "distribution": "balanced"}
    await run_rollouts(runtime, "tasks", Shell(work), env=env, group_size=3, seed=3, **ISOLATION)
    assert all(len(names) == 1 for names in offered.values())
    assert len(set().union(*offered.values())) > 1


async def test_a_model_on_this_host_needs_isolation(runtime):
    class Trusting(FreshCheck):
        isolation = 0

    settings = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}
    with pytest.raises(UsageError, match="--allow-unisolated"):
        await run_rollouts(runtime, Trusting(), "model", settings=settings, isolation="shared")
    summary = await run_rollouts(runtime, Trusting(), "nop", isolation="shared")
    assert summary.complete


async def test_the_summary_says_what_the_sandboxes_cost(runtime, tasks):
    config = {"prices": {"sandbox": 3600.0}}
    summary = await run_rollouts(runtime, "tasks", "oracle", env=tasks(), backend_config=config, **ISOLATION)
    assert summary.complete
    assert summary.sandbox_s["default"] > 0
    assert summary.cost["default"] == pytest.approx(summary.sandbox_s["default"], rel=0.01)


DEAR = {"scripted": {"prompt": 1.0, "completion": 1.0}}
"""One dollar for each answer of a million tokens."""


async def test_a_run_begins_no_rollout_once_its_tokens_have_cost_enough_and_goes_on_with_more(runtime, tasks, tmp_path):
    rows = [{"id": f"t{n}", "prompt": "p", "check": "true"} for n in range(10)]
    async with ScriptedServer([Reply("done", usage=(900_000, 100_000))]) as server:
        settings = {"model": "scripted", "base_url": server.base_url, "prices": DEAR}
        run = functools.partial(
            run_rollouts, runtime, "tasks", env=tasks(rows), settings=settings, out_dir=tmp_path / "out", **ISOLATION
        )
        first = await run(concurrency=2, max_cost=3.5)
        assert first.stopped == f"the model's tokens have cost ${first.usage.cost:g}, and max_cost is $3.5"
        assert 4 <= first.scored <= 5, "those that ran are finished"
        assert first.usage.cost == first.scored
        assert first.cost_per_solved == pytest.approx(1.0)
        again = await run(concurrency=2, max_cost=3.5, resume=True)
        assert (again.scored, again.usage.cost) == (first.scored, first.usage.cost), "all sessions count together"
        last = await run(concurrency=2, max_cost=100, resume=True)
    assert (last.complete, last.stopped, last.usage.cost) == (True, None, 10)


async def test_money_that_was_spent_on_rollouts_that_are_done_again_counts_too(runtime, tasks, tmp_path):
    rows = [{"id": f"t{n}", "prompt": "p", "check": "true"} for n in range(3)]
    fails = True

    def script(request):
        if fails and len(request["messages"]) > 1:
            return Fault(403, "not now")
        return Reply(None if fails else "done", [call("terminal", command="true")] if fails else [], usage=(10**6, 0))

    async with ScriptedServer(script) as server:
        settings = {"model": "scripted", "base_url": server.base_url, "prices": DEAR}
        run = functools.partial(
            run_rollouts, runtime, "tasks", env=tasks(rows), settings=settings, out_dir=tmp_path / "out", **ISOLATION
        )
        summary = await run()
        assert (summary.scored, summary.usage.cost) == (0, 3)
        summary = await run(resume=True)
        assert (summary.scored, summary.usage.cost) == (0, 6)
        fails = False
        summary = await run(resume=True)
        assert (summary.scored, summary.usage.cost, summary.cost_per_solved) == (3, 9, 3)


async def test_a_limit_on_the_cost_needs_the_prices_of_the_model(runtime, tasks):
    settings = {"model": "scripted", "base_url": "http://127.0.0.1:9/v1", "prices": {"other": DEAR["scripted"]}}
    with pytest.raises(ConfigError, match="prices of model 'scripted' are not known") as raised:
        await run_rollouts(runtime, "tasks", env=tasks(), settings=settings, max_cost=1, **ISOLATION)
    assert "--agent.prices" in raised.value.hint
    assert (await run_rollouts(runtime, "tasks", "oracle", env=tasks(), max_cost=1, **ISOLATION)).complete


async def test_a_run_stops_when_the_money_is_spent_and_goes_on_when_resumed(runtime, tasks, tmp_path, monkeypatch):
    meters, begin = [], Meter.begin
    monkeypatch.setattr(Meter, "begin", lambda meter, sandbox_id: (meters.append(meter), begin(meter, sandbox_id)))

    async def work(task):
        while not resumed and not meters[0].is_spent:
            await asyncio.sleep(0.02)

    resumed = False
    how = {"env": tasks(), "out_dir": tmp_path / "out", "concurrency": 1, **ISOLATION}
    dear = {"backend_config": {"prices": {"sandbox": 3600.0}, "max_cost": 3}}
    watcher = Watcher()
    async with Runtime(Settings(state_dir=tmp_path / "state"), plugins=[watcher], load_entry_points=False) as watched:
        summary = await run_rollouts(watched, "tasks", Shell(work), **how, **dear)
    assert summary.scored == 1, "the one that had its slot was finished and verified"
    assert sorted(one for one, _ in watcher.started) == sorted(one for one, _ in watcher.finished)
    assert "of its max_cost 3" in (summary.stopped or "")
    resumed = True
    assert summary.failures == {}
    more = {"backend_config": {"prices": {"sandbox": 3600.0}, "max_cost": 1000}}
    assert (await run_rollouts(runtime, "tasks", Shell(work), resume=True, **how, **more)).complete
