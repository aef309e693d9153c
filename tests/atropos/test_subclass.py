"""People's own subclasses: the contract that they know, `ToolContext`, hooks, concurrent groups, kinds of failure."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Reply, ScriptedServer

from hermes_core.errors import ConfigError, DatasetError, InfraError, PluginError, UnknownNameError


@pytest.fixture
def subclass(atropos_extra: None) -> type[Any]:
    """A subclass that implements just what it has to."""
    from hermes_atropos import HermesAgentBaseEnv, HermesAgentEnvConfig

    class Greetings(HermesAgentBaseEnv):  # type: ignore[misc, valid-type]
        name = "greetings"
        env_config_cls = HermesAgentEnvConfig

        async def setup(self) -> None:
            self.left = [{"id": f"g{n}", "word": f"word{n}"} for n in range(3)]
            self.seen = []

        async def get_next_item(self) -> Any:
            return self.left.pop(0) if self.left else None

        def format_prompt(self, item: Any) -> str:
            return f"Write {item['word']}"

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            self.seen.append((item["id"], ctx.task_id, result.turns_used))
            said = await ctx.terminal("echo hello; sleep 300 & exit 3")
            assert said == {"exit_code": 3, "output": "hello\n"}
            return 0.5

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Greetings


def groups(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "data/groups.jsonl").read_text().splitlines()]


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "data/groups.trajectories.jsonl").read_text().splitlines()]


async def test_what_has_to_be_implemented_is_enough(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=subclass, dataset_name=None)
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[0.5, 0.5]] * 3
    assert len({task_id for _, task_id, _ in env.seen}) == 6
    assert {turns for _, _, turns in env.seen} == {1}


async def test_the_hooks_take_the_arguments_that_users_know(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    class Hooked(subclass):  # type: ignore[misc]
        async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> dict[str, Any]:
            await exec_tool("write_file", {"path": "word.txt", "content": item["word"]})
            return {"id": trajectory_id}

        async def verify_and_score_trajectory(
            self, item: Any, result: Any, *, trajectory_id: str, exec_tool: Any, workspace_meta: Any = None
        ) -> tuple[float, dict[str, Any]]:
            found = await exec_tool("bash", {"command": "cat word.txt"}, timeout=20)
            assert workspace_meta == {"id": trajectory_id}
            return float(found.output == item["word"]), {"said": found.output}

    async with ScriptedServer([Reply("hi")]) as server:
        await make_env(server.base_url, kind=Hooked, dataset_name=None).process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0, 1.0]] * 3
    assert records(tmp_path)[0]["details"]["said"].startswith("word")


async def test_a_reward_that_can_not_be_computed_is_none(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    class Broken(subclass):  # type: ignore[misc]
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if item["id"] == "g0":
                raise InfraError("gone")
            return float("nan") if item["id"] == "g1" else 1

    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=Broken, dataset_name=None, infra_retries=1, group_refills=0)
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0, 1.0]]
    kinds = {record["item_id"]: record["failure"] and record["failure"]["kind"] for record in records(tmp_path)}
    assert kinds == {"g0": "infra", "g1": "verifier", "g2": None}
    assert {record["reward"] for record in records(tmp_path) if record["failure"]} == {None}
    assert env.metrics.totals["groups_short"] == 5  # that of g0 is put back three times


async def test_exact_bytes_go_both_ways(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    data = os.urandom(20 << 20)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "big").write_bytes(data)
    (tmp_path / "in" / "sub").mkdir()
    (tmp_path / "in" / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "in" / "sub" / "run.sh").chmod(0o755)
    seen: dict[str, Any] = {}

    class Files(subclass):  # type: ignore[misc]
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            seen["up"] = await ctx.upload_file(tmp_path / "in" / "big", "dir/big")
            summed = await ctx.terminal("sha256sum dir/big")
            assert summed["output"].split()[0] == hashlib.sha256(data).hexdigest()
            seen["down"] = await ctx.download_file("dir/big", tmp_path / "out" / "big")
            await ctx.upload_dir(tmp_path / "in", "all")
            assert (await ctx.terminal("all/sub/run.sh; ln -s /etc/passwd all/link"))["output"] == "ran\n"
            seen["dir"] = await ctx.download_dir("all", tmp_path / "all")
            await ctx.write_file("a b'c.txt", "é\r\n\x00")
            seen["read"] = await ctx.read_file("a b'c.txt")
            seen["missing"] = [await ctx.read_file("no"), await ctx.download_file("no", tmp_path / "no")]
            seen["search"] = await ctx.search("echo ran", "all")
            seen["tool"] = json.loads(await ctx.call_tool("bash", {"command": "exit 4"}))
            return 1.0

    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=Files, dataset_name=None, group_size=1, total_steps=1)
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0]], records(tmp_path)[0]["failure"]
    assert seen["up"] == seen["down"] == {"success": True, "bytes": len(data)}
    assert (tmp_path / "out" / "big").read_bytes() == data
    assert (tmp_path / "all" / "big").read_bytes() == data
    assert os.access(tmp_path / "all" / "sub" / "run.sh", os.X_OK)
    assert not (tmp_path / "all" / "link").exists()
    assert [Path(name).name for name in seen["dir"]["left_out"]] == ["link"]
    assert seen["read"]["content"] == "é\r\n\x00"
    assert all("error" in each for each in seen["missing"])
    assert "run.sh" in json.dumps(seen["search"])
    assert seen["tool"]["exit_code"] == 4


async def test_concurrent_groups_have_their_own_tools(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    offered: dict[str, set[tuple[str, ...]]] = {}

    async def answer(request: dict[str, Any]) -> Reply:
        await asyncio.sleep(0.05)
        word = request["messages"][-1]["content"]
        names = tuple(tool["function"]["name"] for tool in request.get("tools", ()))
        offered.setdefault(word, set()).add(names)
        return Reply("hi")

    class Many(subclass):  # type: ignore[misc]
        async def setup(self) -> None:
            self.left = [{"id": f"m{n}", "word": f"word{n}"} for n in range(12)]
            self.seen = []

    async with ScriptedServer(answer) as server:
        env = make_env(server.base_url, kind=Many, dataset_name=None, distribution="balanced", total_steps=12)
        await env.process_manager()
    del offered["Hello"]  # the check before the run
    assert len(offered) == 12
    assert all(len(names) == 1 for names in offered.values()), "one set of tools for all rollouts of a group"
    assert len({next(iter(names)) for names in offered.values()}) > 1, "and not the same for all groups"


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("collect_trajectory", "verify_and_score_trajectory for one rollout, or collect_trajectories"),
        ("_use_sandbox_backend", "terminal_backend"),
        ("_collect_trajectory_local", "setup_trajectory_workspace"),
        ("_collect_trajectory_sandbox", "setup_trajectory_workspace"),
        ("_run_agent_loop", "format_prompt"),
        ("_build_scored_item", "postprocess_histories"),
        ("_resolve_tools_for_group", "enabled_toolsets"),
        ("_use_managed_server", "--openai.server_type"),
        ("_format_trajectory_for_display", "add_rollouts_for_wandb"),
        ("setup_wandb", "use_wandb"),
        ("register_env", "wandb_name"),
        ("get_status", "status_dict"),
        ("get_cli_serve_config_cls", "config_init"),
        ("server_cls", "--openai.server_type"),
    ],
)
def test_a_method_that_nothing_would_call_is_refused(subclass: type[Any], method: str, instead: str) -> None:
    async def own(self: Any, *args: Any) -> Any:
        return None

    with pytest.raises(ConfigError, match=rf"Own.{method} would never be called \(use .*{re.escape(instead)}"):
        type("Own", (subclass,), {method: own})
    mixin = type("Mixin", (), {method: own})
    with pytest.raises(ConfigError, match="would never be called"):
        type("Mixed", (mixin, subclass), {})


async def test_one_rollout_as_an_item(make_env: Any, subclass: type[Any]) -> None:
    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=subclass, dataset_name=None)
        async with env.running():
            item, backlog = await env.collect_trajectory(await env.get_next_item())
    assert (item["scores"], item["tokens"], backlog) == (0.5, [], [])
    assert item["overrides"]["trainable"] is False


def test_every_method_of_atropos_is_called_or_refused(subclass: type[Any]) -> None:
    """What a subclass overrides has an effect, or is an error."""
    from atroposlib.envs.base import BaseEnv
    from hermes_atropos.contract import INSTEAD

    called = """
        add_rollouts_for_wandb add_train_workers cleanup cli collect_trajectories config_init create_rollout_table
        derived_batch_size env_config_cls env_manager env_step_checks evaluate evaluate_log get_next_item handle_env
        handle_send_to_api load_checkpoint name perf_stats postprocess_histories process_manager save_checkpoint setup
        wandb_log _send_scored_data_to_api
    """
    there = {name for name in vars(BaseEnv) if not name.startswith("__")} - {"_abc_impl"}
    assert there - set(INSTEAD) == set(called.split())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return float(ctx.terminal('true')['exit_code'] == 0)", "ctx.terminal(…) was not awaited"),
        ("return 1.0 if ctx.terminal('test -e /nothing') else 0.0", "ctx.terminal(…) was not awaited"),
        ("return float(ctx.read_file('a').get('content') == 'x')", "ctx.read_file(…) was not awaited"),
        ("return float('x' in ctx.search('x'))", "ctx.search(…) was not awaited"),
        ("ctx.write_file('a', 'x'); return 1.0", "ctx.write_file(…) was not awaited"),
        ("return None", "compute_reward of 'greetings' gave None"),
        ("return float('nan')", "compute_reward of 'greetings' gave nan"),
        ("return '1'", "compute_reward of 'greetings' gave '1'"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_reward_that_is_written_wrongly_says_how_to_write_it(
    make_env: Any, subclass: type[Any], tmp_path: Path, body: str, said: str, kind: str
) -> None:
    scope: dict[str, Any] = {}
    exec(f"{kind} compute_reward(self, item, result, ctx):\n    {body}", scope)
    written = type("Written", (subclass,), {"compute_reward": scope["compute_reward"]})
    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=written, dataset_name=None, group_size=1, group_refills=0, total_steps=1)
        await env.process_manager()
    (record,) = records(tmp_path)
    assert (record["reward"], record["failure"]["kind"]) == (None, "verifier")
    assert said in record["failure"]["message"]
    assert "verify_and_score_trajectory" not in record["failure"]["message"]


async def test_calls_of_a_reward_may_run_at_the_same_time(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    class Together(subclass):  # type: ignore[misc]
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            one, two = await asyncio.gather(ctx.terminal("echo 1"), asyncio.create_task(ctx.terminal("echo 2")))
            three = await asyncio.wait_for(ctx.terminal("echo 3"), 60)
            return float([each["output"] for each in (one, two, three)] == ["1\n", "2\n", "3\n"])

    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=Together, dataset_name=None, group_size=1, total_steps=1)
        await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[1.0]]


async def test_a_prompt_that_is_none_names_the_method(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    class Silent(subclass):  # type: ignore[misc]
        def format_prompt(self, item: Any) -> Any:
            return None if item["id"] == "g1" else "go"

    async with ScriptedServer([Reply("hi")]) as server:
        await make_env(server.base_url, kind=Silent, dataset_name=None, group_refills=0).process_manager()
    assert len(groups(tmp_path)) == 2, "the other items go on"
    failed = [record["failure"] for record in records(tmp_path) if record["failure"]]
    assert {failure["kind"] for failure in failed} == {"setup"}
    assert all("format_prompt of environment 'greetings' gave None, not a text" in each["message"] for each in failed)


async def test_no_items_at_all_are_an_error(make_env: Any, subclass: type[Any], tmp_path: Path) -> None:
    class Empty(subclass):  # type: ignore[misc]
        async def setup(self) -> None:
            self.left = []

    (tmp_path / "empty.jsonl").write_text("")
    async with ScriptedServer([Reply("hi")]) as server:
        with pytest.raises(DatasetError, match="environment 'greetings' has no items"):
            await make_env(server.base_url, kind=Empty, dataset_name=None).process_manager()
        for mode in ("process_manager", "evaluate_manager"):
            with pytest.raises(DatasetError, match=r"no items|no tasks|empty"):
                await getattr(make_env(server.base_url, dataset_name=str(tmp_path / "empty.jsonl")), mode)()


async def test_items_that_can_not_be_had_cancel_nothing_that_runs(
    make_env: Any, subclass: type[Any], tmp_path: Path
) -> None:
    class Breaking(subclass):  # type: ignore[misc]
        async def get_next_item(self) -> Any:
            if not self.left:
                raise KeyError("the next row")
            return self.left.pop(0)

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await asyncio.sleep(1)
            return 0.5

    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=Breaking, dataset_name=None)
        with pytest.raises(PluginError, match=r"get_next_item of environment 'greetings' failed: KeyError"):
            await env.process_manager()
    assert [group["scores"] for group in groups(tmp_path)] == [[0.5, 0.5]] * 3
    assert [record["failure"] for record in records(tmp_path)] == [None] * 6


async def test_an_evaluation_leaves_the_training_records_alone(
    make_env: Any, subclass: type[Any], tmp_path: Path
) -> None:
    class Evaluated(subclass):  # type: ignore[misc]
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await asyncio.gather(*(self.collect_trajectories({"id": f"e{n}", "word": "x"}) for n in range(2)))

    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, kind=Evaluated, dataset_name=None)
        async with env.running():
            await env.collect_trajectories(await env.get_next_item())
            await env.evaluate()
        assert {record["item_id"] for record in records(tmp_path)} == {"g0"}
        assert (env.metrics.totals["rollouts"], env.evaluation.totals["rollouts"]) == (2, 4)
        kept = tmp_path / "data/groups.evaluations.jsonl"
        assert {json.loads(line)["item_id"] for line in kept.read_text().splitlines()} == {"e0", "e1"}
        alone = make_env(server.base_url, kind=Evaluated, dataset_name=None)
        await alone.evaluate_manager()
    assert not alone.trajectories_path.exists()
    assert len(alone.evaluations_path.read_text().splitlines()) == 4


def test_a_setting_that_the_plugin_does_not_have(make_env: Any, runtime: Any) -> None:
    env = make_env("http://127.0.0.1:9/v1", prompt_field="question")
    with pytest.raises(UnknownNameError, match="setting 'prompt_field' of environment 'tasks'"):
        env.make_environment(runtime)
