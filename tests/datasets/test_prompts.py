"""The environment `prompts`: data without rewards, with and without sandboxes, and what a row can ask for."""

import asyncio
import json
import os
import random
import sys
from collections import Counter

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript, call

from hermes_core.datasets.prompts import PromptsConfig, PromptsEnvironment
from hermes_core.datasets.tasks import TasksConfig, TasksEnvironment
from hermes_core.environment import Environment
from hermes_core.errors import DatasetError, PluginError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.records.store import read_records
from hermes_core.runs.runner import run_rollouts
from hermes_core.runs.session import check_scored
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.soundness.validate import validate
from hermes_core.tools.base import Tool, ToolParams

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


class Watcher:
    """Counts sandboxes, and adds a tool that needs none."""

    def __init__(self):
        self.sandboxes = []

    @hookimpl
    def hermes_sandbox_created(self, sandbox_id):
        self.sandboxes.append(sandbox_id)

    @hookimpl
    def hermes_register_tools(self, registry):
        async def look_up(ctx, params):
            return "a fact"

        registry.add(Tool("look_up", ToolParams, look_up, "Look something up.", where="driver", toolsets=("web",)))
        registry.add_distribution("web_only", {"web": 100})


@pytest.fixture
def watcher():
    return Watcher()


@pytest.fixture
async def runtime(tmp_path, watcher):
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, plugins=[watcher], load_entry_points=False) as one:
        yield one


@pytest.fixture
def roll_out(runtime, tmp_path):
    """Roll out these lines, and return the summary and the records. The endpoint is the same in each call."""
    port = 0

    async def run(rows, script, *, env=None, **options):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        nonlocal port
        async with ScriptedServer(script, port=port) as server:
            port = int(server.base_url.removesuffix("/v1").rpartition(":")[2])
            settings = {"model": "scripted", "base_url": server.base_url, **options.pop("settings", {})}
            config = {"dataset_name": str(path), **(env or {})}
            options = {**ISOLATION, "out_dir": tmp_path / "out", "settings": settings, **options}
            summary = await run_rollouts(runtime, "prompts", env=config, **options)
        return summary, [*read_records(tmp_path / "out")]

    return run


NO_TOOLS = {"enabled_toolsets": ()}


async def test_a_rollout_that_ends_has_no_reward_and_no_failure(roll_out, watcher):
    summary, (record,) = await roll_out([{"prompt": "Hello", "metadata": {"from": "me"}}], [Reply("Hi")], env=NO_TOOLS)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (None, None, "finished")
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    assert record["timings"]["verify_s"] is None
    assert summary.complete
    assert (summary.finished, summary.scored, summary.mean_reward, summary.failures) == (1, 0, None, {})
    assert watcher.sandboxes == []


async def test_a_failure_is_one_all_the_same(roll_out):
    summary, (record,) = await roll_out([{"prompt": "Hello"}], [Fault(400, "no")], env=NO_TOOLS)
    assert (record["reward"], record["failure"]["kind"]) == (None, "model")
    assert not summary.complete
    assert summary.failures == {"model": 1}


async def test_tools_of_the_driver_need_no_sandbox_and_others_do(roll_out, watcher):
    def look(prompt):
        said = yield call("look_up")
        return str(said)

    summary, records = await roll_out(
        [{"prompt": "a", "distribution": "web_only"}, {"prompt": "b", "toolsets": "web"}], ToolScript(look)
    )
    assert summary.complete
    assert [record["messages"][-1]["content"] for record in records] == ["{'output': 'a fact', 'error': None}"] * 2
    assert watcher.sandboxes == []

    def run(prompt):
        ran = yield call("terminal", command=prompt)
        return ran["output"]

    summary, _ = await roll_out([{"prompt": "true"}], ToolScript(run), out_dir=None)
    assert summary.complete
    assert len(watcher.sandboxes) == 1


async def test_a_row_says_where_its_tools_start_and_what_is_there(roll_out):
    def run(prompt):
        ran = yield call("terminal", command=prompt)
        read = yield call("read_file", path="b/c.txt")
        yield call("write_file", path="made.txt", content="x")
        there = yield call("terminal", command="ls; ls /tmp/nowhere 2>/dev/null")
        return json.dumps([ran["output"], read.get("content"), there["output"]])

    row = {
        "prompt": "cat a.txt; basename $PWD",
        "workspace": {"a.txt": "1\n", "b/c.txt": "2\n"},
        "cwd": "in/it",
        "setup": ["echo 3 >> b/c.txt", "basename $PWD > where.txt"],
    }
    absolute = {"prompt": "pwd", "cwd": "/tmp", "toolsets": ["terminal"]}
    _, (record, _) = await roll_out([row, {**absolute}], ToolScript(run), concurrency=1)
    ran, read, there = json.loads(record["messages"][-1]["content"])
    assert ran == "1\nit\n"
    assert "2" in read and "3" in read
    assert there.split() == ["a.txt", "b", "made.txt", "where.txt"]


async def test_an_absolute_cwd_and_one_that_can_not_be(roll_out):
    def run(prompt):
        ran = yield call("terminal", command=prompt)
        return ran["output"]

    rows = [{"id": "there", "prompt": "pwd", "cwd": "/usr"}, {"id": "denied", "prompt": "pwd", "cwd": "/proc/nothing"}]
    _, records = await roll_out(rows, ToolScript(run))
    found = {record["item_id"]: record for record in records}
    assert found["there"]["messages"][-1]["content"] == "/usr\n"
    assert found["denied"]["failure"]["kind"] == "setup"
    assert "cwd '/proc/nothing' can't be made" in found["denied"]["failure"]["message"]


async def test_a_backend_without_images_refuses_those_of_rows(roll_out):
    row = {"id": "in an image", "prompt": "p", "image": "python:3.12"}
    _, records = await roll_out([row, {"id": "without", "prompt": "p"}], [Reply("ok")], env=NO_TOOLS)
    found = {record["item_id"]: record["failure"] for record in records}
    assert found["without"] is None
    assert (found["in an image"]["kind"], found["in an image"]["stage"]) == ("setup", "acquire")
    assert "sets image, which backend 'local' can't give" in found["in an image"]["message"]


async def test_equal_lines_are_items_of_their_own_and_keep_their_ids(roll_out, tmp_path):
    same, other = {"prompt": "same"}, {"prompt": "other"}
    summary, records = await roll_out([same, other, same, same], [Reply("ok")], env=NO_TOOLS, group_size=2)
    assert summary.complete
    ids = Counter(record["item_id"] for record in records)
    assert set(ids.values()) == {2}
    names = sorted(ids)
    assert len(names) == 4
    (first,) = [name for name in names if f"{name}-2" in names]
    assert {first, f"{first}-2", f"{first}-3"} < set(names)
    # More lines, in another order: what was done is not done again.
    summary, after = await roll_out(
        [other, same, {"prompt": "new"}, same, same, same], [Reply("ok")], env=NO_TOOLS, group_size=2, resume=True
    )
    assert summary.complete
    assert len(after) == 12
    assert [record["trajectory_id"] for record in after[:8]] == [record["trajectory_id"] for record in records]
    assert Counter(record["item_id"] for record in after[8:]).keys() == {f"{first}-4", *_ids(after[8:]) - {first}}


def _ids(records):
    return {record["item_id"] for record in records}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "field 'prompt' is missing"),
        ({"prompt": ""}, "field 'prompt'"),
        ({"prompt": "p", "check": "true"}, "field 'check' is not known"),
        ({"prompt": "p", "workspace": {"../x": ""}}, "field 'workspace'"),
        ({"prompt": "p", "toolsets": ["web"], "distribution": "default"}, "name one of them"),
        ({"prompt": "p", "toolsets": ["wep"]}, "toolset 'wep'"),
        ({"prompt": "p", "distribution": "wep_only"}, "distribution 'wep_only'"),
    ],
)
async def test_a_wrong_row_is_refused_before_anything_begins(roll_out, tmp_path, row, said):
    with pytest.raises(DatasetError, match=said):
        await roll_out([{"prompt": "fine"}, row], [Reply("ok")], env=NO_TOOLS)
    assert not (tmp_path / "out" / "trajectories.jsonl").exists()


async def test_nothing_that_needs_rewards_takes_it(runtime, roll_out, tmp_path):
    await roll_out([{"prompt": "p"}], [Reply("ok")], env=NO_TOOLS)
    env = {"dataset_name": str(tmp_path / "prompts.jsonl")}
    with pytest.raises(UsageError, match="has no reference solution"):
        await validate(runtime, "prompts", env=env, **ISOLATION)


def test_what_needs_rewards_refuses_it():
    with pytest.raises(UsageError, match="'prompts' gives no rewards"):
        check_scored(PromptsEnvironment(PromptsConfig(dataset_name="x")))
    check_scored(TasksEnvironment(TasksConfig(dataset_name="x")))


async def test_a_scored_environment_without_a_check_is_still_broken(runtime):
    class Forgotten(Environment):
        name = "forgotten"

        def items(self):
            return [{"id": "1"}]

        def format_prompt(self, item):
            return "p"

    with pytest.raises(PluginError, match="does not implement verify_and_score_trajectory"):
        await run_rollouts(runtime, Forgotten(), "nop", **ISOLATION)


async def test_a_rollout_without_a_slot_is_scored(runtime):
    class Spoken(Environment):
        name, default_toolsets = "spoken", ()

        def items(self):
            return [{"id": "1"}]

        def format_prompt(self, item):
            return "p"

        def uses_slot(self, item):
            return False

        @hookimpl
        def verify_and_score_trajectory(self, result):
            return float(result.messages[-1]["content"] == "p")

    found = []
    await run_rollouts(runtime, Spoken(), "nop", on_record=found.append, **ISOLATION)
    assert (found[0]["reward"], found[0]["failure"]) == (1.0, None)
    assert not [info for info in await runtime.backend("local").list() if info.owner == runtime.owner]


async def test_a_hook_without_a_slot_is_told_why(runtime):
    class Wrong(Environment):
        name, scored, default_toolsets = "wrong", False, ()

        def items(self):
            return [{"id": "1"}]

        def format_prompt(self, item):
            return "p"

        def uses_slot(self, item):
            return False

        @hookimpl
        async def setup_trajectory_workspace(self, rollout):
            await rollout.commands.run("true")

    found = []
    await run_rollouts(runtime, Wrong(), "nop", on_record=found.append, **ISOLATION)
    assert found[0]["failure"]["kind"] == "setup"
    assert "this rollout has no slot" in found[0]["failure"]["message"]


@pytest.mark.full  # test_rollout_cli.py kills runs of tasks
async def test_killed_again_and_again_each_rollout_of_each_line_is_there_once(tmp_path):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"prompt": f"Question {number % 30}"}) + "\n" for number in range(40)))
    chance = random.Random(3)
    async with ScriptedServer(lambda request: Reply("ok", delay_s=0.02)) as server:
        command = [
            *(sys.executable, "-m", "hermes_core", "rollout", "prompts", f"--env.dataset_name={path}"),
            *("--env.enabled_toolsets=", "--model", "scripted", "--base-url", server.base_url, "--group-size", "3"),
            *("--out", str(out), "--resume", "--progress", "json"),
        ]
        environ = {**os.environ, "HERMES_PLUGINS": "", "HERMES_STATE_DIR": str(tmp_path / "state")}
        for kill in (True, True, True, False):
            driver = await asyncio.create_subprocess_exec(
                *command, env=environ, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
            states = [json.loads(line) async for line in _lines_of(driver, chance.uniform(0.0, 0.4) if kill else None)]
    assert states[-1]["event"] == "end" and states[-1]["finished"] == 120
    assert driver.returncode == 0
    records = [*read_records(out)]
    done = Counter((record["item_id"], record["rollout_index"]) for record in records)
    assert set(done.values()) == {1} and len(done) == 120
    asked = Counter(record["messages"][0]["content"] for record in records)
    assert Counter(asked.values()) == {3: 20, 6: 10}
    names = {record["item_id"] for record in records}
    assert sum(f"{name}-2" in names for name in names) == 10


async def _lines_of(driver, killed_after_s):
    """Yield the lines of the driver's progress; kill it so many seconds after the first."""
    async for line in driver.stderr:
        if not line.startswith(b"{"):
            continue
        yield line
        if killed_after_s is not None and json.loads(line)["event"] == "begin":
            await asyncio.sleep(killed_after_s)
            driver.kill()
    await driver.wait()


async def test_a_row_names_its_profile(tmp_path):
    row = {"id": "big", "prompt": "p", "check": "true", "profile": "large"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    environment = TasksEnvironment(TasksConfig(dataset_name=str(tmp_path / "rows.jsonl")))
    await environment.setup()
    try:
        (item,) = environment.items()
        assert environment.profile(item) == "large" and PromptsEnvironment.uses_slot(environment, item)
    finally:
        await environment.aclose()
