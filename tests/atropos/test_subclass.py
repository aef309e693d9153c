"""People's own subclasses: the contract that they know, `ToolContext`, hooks, concurrent groups, kinds of failure."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import ConfigError, InfraError
from hermes_core.testing.scripted_server import Reply, ScriptedServer


@pytest.fixture
def subclass(atropos_extra: None) -> type[Any]:
    """A subclass that implements just what it has to."""
    from hermes_core.atropos import HermesAgentBaseEnv, HermesAgentEnvConfig

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
    assert env.metrics.totals["groups_short"] == 2


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
    ],
)
def test_a_method_that_nothing_would_call_is_refused(subclass: type[Any], method: str, instead: str) -> None:
    async def own(self: Any, *args: Any) -> Any:
        return None

    with pytest.raises(ConfigError, match=rf"Own.{method} would never be called \(use .*{instead}"):
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
