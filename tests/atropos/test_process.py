"""Process mode with an openai server: groups, records, how they are shown; failures end nothing; no tokens made up."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript, call
from rich.console import Console

from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.errors import UsageError
from hermes_core.records.index import RecordedRun
from hermes_core.records.statistics import totals
from hermes_core.sandbox.pool.cost import CostLimitReached
from hermes_core.tool_backend import ToolBackend
from hermes_core.view.transcript import rollout


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


async def test_every_group_is_written_and_scored_and_can_be_looked_at(
    make_env: Any, obedient_server: ScriptedServer, tmp_path: Path
) -> None:
    env = make_env(obedient_server.base_url)
    await env.process_manager()
    groups = lines(tmp_path / "data/groups.jsonl")
    assert len(groups) == 6
    assert sorted(group["group_overrides"]["item_id"] for group in groups) == [f"task-{n}" for n in range(6)]
    for group in groups:
        assert group["scores"] == [1.0, 1.0]
        assert [len(messages) for messages in group["messages"]] == [4, 4]
        assert group["messages"][0][1]["tool_calls"][0]["function"]["name"] == "terminal"
    records = lines(tmp_path / "data/groups.trajectories.jsonl")
    assert len(records) == 12
    assert {record["mask_sample"] for record in records} == {False}
    run = RecordedRun(tmp_path / "data/groups.trajectories.jsonl")
    assert totals(run.rows.values()).solved == 12
    console = Console(file=(out := io.StringIO()), width=200)
    row = next(row for row in run.rows.values() if row.item_id == "task-3")
    for part in rollout(row, run.record(row).to_json()):
        console.print(part)
    page = out.getvalue()
    assert "echo 3 > out.txt" in page
    assert "exit code 0" in page
    assert "Done <b>" in page


async def test_without_tokens_nothing_is_made_up(
    make_env: Any, obedient_server: ScriptedServer, tmp_path: Path
) -> None:
    await make_env(obedient_server.base_url, total_steps=1).process_manager()
    (group,) = lines(tmp_path / "data/groups.jsonl")
    assert group["tokens"] == group["masks"] == [[], []]
    assert "inference_logprobs" not in group
    assert [about["trainable"] for about in group["overrides"]] == [False, False]
    assert lines(tmp_path / "data/groups.trajectories.jsonl")[0]["sequences"] == []


async def test_a_plain_answer_is_verified_like_any_other(make_env: Any, tmp_path: Path) -> None:
    async with ScriptedServer([Reply("I did nothing.")]) as server:
        await make_env(server.base_url, total_steps=1).process_manager()
    (group,) = lines(tmp_path / "data/groups.jsonl")
    assert group["scores"] == [0.0, 0.0]


def checked_first(then: Callable[[], Reply | Fault]) -> Callable[[Any], Reply | Fault]:
    """Answers of a server: to the check before the run, and from then on."""
    answers = itertools.chain([Reply("Hello")], (then() for _ in itertools.count()))
    return lambda request: next(answers)


async def test_an_endpoint_that_refuses_everybody_is_found_before_the_first_rollout(
    make_env: Any, tmp_path: Path
) -> None:
    async with ScriptedServer(lambda request: Fault(401, "no")) as server:
        with pytest.raises(EndpointDown, match="refused the API key"):
            await make_env(server.base_url, total_steps=50).process_manager()
    assert [path for path in (tmp_path / "data").glob("*") if path.read_bytes()] == []


async def test_an_endpoint_that_refuses_everybody_ends_it_and_is_never_a_reward(make_env: Any, tmp_path: Path) -> None:
    async with ScriptedServer(checked_first(lambda: Fault(401, "no"))) as server:
        env = make_env(server.base_url, total_steps=50, endpoint_patience=1.0)
        with pytest.raises(EndpointDown, match="refused the API key"):
            await env.process_manager()
    assert (tmp_path / "data/groups.jsonl").read_text() == ""
    records = lines(tmp_path / "data/groups.trajectories.jsonl")
    assert {(record["reward"], record["failure"]["kind"]) for record in records} == {(None, "model")}
    assert len(records) <= 3 * 2, "those that were under way"


async def test_what_the_endpoint_does_not_have_is_found_before_the_first_rollout(make_env: Any, tmp_path: Path) -> None:
    async with ScriptedServer([Reply("Done.")], models=("scripted-2",)) as server:
        with pytest.raises(EndpointDown, match="did you mean 'scripted-2'"):
            await make_env(server.base_url).process_manager()
    assert lines(tmp_path / "data/groups.trajectories.jsonl") == []


async def test_an_item_whose_group_stays_short_for_the_models_failures_is_put_back(
    make_env: Any, obedient_play: Any, tmp_path: Path
) -> None:
    failing, play = {"Write 1 into out.txt": 3, "Write 2 into out.txt": 1000}, ToolScript(obedient_play)

    def script(request: dict[str, Any]) -> Any:
        prompt = request["messages"][-1]["content"]
        if failing.get(prompt, 0):
            failing[prompt] -= 1
            return Fault(400, "not this one")
        return play(request)

    async with ScriptedServer(script) as server:
        env = make_env(server.base_url, group_refills=0, max_num_workers=1)
        await env.process_manager()
    groups = [group["group_overrides"]["item_id"] for group in lines(tmp_path / "data/groups.jsonl")]
    assert sorted(groups) == ["task-0", "task-1", "task-3", "task-4", "task-5"]
    assert (env.metrics.totals["items_put_back"], env.metrics.totals["groups_short"]) == (2 + 3, 2 + 4)


async def test_the_cost_limit_lets_groups_end_that_have_their_slots(
    make_env: Any, obedient_server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, acquired = ToolBackend.acquire, 0

    async def until_spent(self: ToolBackend, *args: Any, **kwargs: Any) -> Any:
        nonlocal acquired
        acquired += 1
        if acquired > 3:
            raise CostLimitReached("spent")
        return await acquire(self, *args, **kwargs)

    monkeypatch.setattr(ToolBackend, "acquire", until_spent)
    env = make_env(obedient_server.base_url, max_num_workers=2)
    with pytest.raises(CostLimitReached):
        await env.process_manager()
    records = lines(tmp_path / "data/groups.trajectories.jsonl")
    assert sorted(str(record["reward"]) for record in records if record["reward"] is not None) == ["1.0"] * 3
    assert {record["failure"]["kind"] for record in records if record["reward"] is None} == {"cancelled"}
    assert len(lines(tmp_path / "data/groups.jsonl")) == 1


async def test_failed_rollouts_are_replaced(make_env: Any, obedient_play: Any, tmp_path: Path) -> None:
    played = ToolScript(obedient_play)
    # The check before the run is answered: a server that never was any use is given up after three refusals.
    answers = itertools.chain([played], itertools.repeat(lambda request: Fault(400), 2), itertools.repeat(played))
    async with ScriptedServer(lambda request: next(answers)(request)) as server:
        env = make_env(server.base_url, total_steps=3)
        await env.process_manager()
    assert [group["scores"] for group in lines(tmp_path / "data/groups.jsonl")] == [[1.0, 1.0]] * 3
    assert env.metrics.totals["failures_model"] == 2


async def test_a_hung_model_stops_nothing_and_is_no_reward(make_env: Any, tmp_path: Path) -> None:
    async with ScriptedServer(checked_first(lambda: Reply("late", delay_s=600))) as server:
        env = make_env(server.base_url, total_steps=1, group_refills=0, rollout_timeout=0.5, model_timeout=0.5)
        async with asyncio.timeout(60):
            await env.process_manager()
    assert (tmp_path / "data/groups.jsonl").read_text() == ""
    records = lines(tmp_path / "data/groups.trajectories.jsonl")
    assert {(record["reward"], record["failure"]["kind"]) for record in records} == {(None, "model")}
    assert len(records) == 2 * (1 + 3), "the item was put back, and not for ever"


async def test_groups_run_at_the_same_time(make_env: Any, tmp_path: Path) -> None:
    under_way, most = 0, 0

    async def answer(request: dict[str, Any]) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.3)
        under_way -= 1
        return Reply("no")

    async with ScriptedServer(answer) as server:
        await make_env(server.base_url, group_size=1, max_num_workers=3).process_manager()
    assert most == 3


async def test_each_group_is_on_the_disk_when_it_is_done(
    make_env: Any, obedient_server: ScriptedServer, tmp_path: Path
) -> None:
    env = make_env(obedient_server.base_url, max_num_workers=1)
    seen: list[int] = []
    next_item = env.get_next_item

    async def watched() -> Any:
        seen.append(len(lines(tmp_path / "data/groups.jsonl")))
        return await next_item()

    env.get_next_item = watched
    await env.process_manager()
    assert seen == [0, 1, 2, 3, 4, 5]


async def test_metrics_are_written_as_json(make_env: Any, tmp_path: Path) -> None:
    def clumsy(prompt: str) -> Any:
        yield call("no_such_tool", a=1)
        yield call("read_file", path="missing")
        return "no"

    async with ScriptedServer(ToolScript(clumsy)) as server:
        await make_env(server.base_url, total_steps=1).process_manager()
    (told,) = lines(tmp_path / "data/groups.trajectories.metrics.jsonl")
    assert told["train/tool_errors_count"] == 4
    assert "no_such_tool" in told["train/tool_error_details"]
    assert told["train/reward"] == 0.0
    assert told["train/turns"] == 3.0
    assert told["train/failures_infra"] == 0
    assert told["train/seconds_agent"] > 0


async def test_wrong_use_is_said_at_once(make_env: Any, obedient_server: ScriptedServer) -> None:
    with pytest.raises(UsageError, match="did you mean 'terminal'"):
        await make_env(obedient_server.base_url, enabled_toolsets=["terminl"]).process_manager()
    with pytest.raises(UsageError, match="unknown backend 'locale'"):
        await make_env(obedient_server.base_url, terminal_backend="locale").process_manager()
    with pytest.raises(UsageError, match="gives no tokens"):
        await make_env(obedient_server.base_url).env_manager()
    assert obedient_server.request_count == 0


async def test_an_environment_has_its_own_backend(make_env: Any, obedient_server: ScriptedServer) -> None:
    one = make_env(obedient_server.base_url, total_steps=1)
    other = make_env(obedient_server.base_url, total_steps=1, local_slots_per_sandbox=3)
    await asyncio.gather(one.process_manager(), other.process_manager())
    assert one.config.backend_config() != other.config.backend_config()


async def test_images_of_the_next_groups_are_made_ahead(
    make_env: Any, obedient_server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def prepare_image(_: ToolBackend, image: str, *, profile: str | None = None) -> str:
        asked.append(image)
        return image

    monkeypatch.setattr(ToolBackend, "prepare_image", prepare_image)
    rows = [{"id": f"{n}", "prompt": "p", "check": "true", "image": f"image-{n}"} for n in range(6)]
    (tmp_path / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = make_env(obedient_server.base_url, dataset_name=str(tmp_path / "images.jsonl"), prefetch=1)
    async with env.running(start=False):
        taken = [(await env.get_next_item())["image"] for _ in range(2)]
        await asyncio.sleep(0)
    assert (asked[:2], len(asked)) == (taken, 3)
