"""Recorded patches verified again, on the real local backend."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from hermes_core.environment import Environment
from hermes_core.errors import UsageError, VerifierError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.pool.cost import Meter
from hermes_core.settings import Settings
from hermes_core.soundness.rescore import rescore

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


class Patched(Environment):
    """Scores a patch by applying it in a fresh slot; each item's reward can be changed between run and rescoring."""

    name = "patched"

    def __init__(self, ids=("a", "b", "c"), rewards=None):
        super().__init__()
        self.ids, self.rewards = ids, rewards or {}

    def items(self):
        return [{"id": one} for one in self.ids]

    def format_prompt(self, item):
        return "p"

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        if item["id"] != "none":
            rollout.record_patch(f"patch of {item['id']}")
        return 1.0

    async def score_patch(self, item, patch, rollout):
        if item["id"] == "broken":
            raise VerifierError("no report")
        async with rollout.fresh_slot() as fresh:
            await fresh.exec_tool("write_file", {"path": "patch", "content": patch})
            read = await fresh.commands.run("cat patch")
        assert read.text == f"patch of {item['id']}"
        return self.rewards.get(item["id"], 1.0), {"read": read.text}


@pytest.fixture
async def runtime(tmp_path: Path):
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as one:
        yield one


def lines(out: Path) -> dict[str, dict]:
    return {one["item_id"]: one for one in map(json.loads, (out / "rescored.jsonl").read_text().splitlines())}


async def test_patches_that_score_the_same_again_agree(runtime, tmp_path):
    out = tmp_path / "out"
    await run_rollouts(runtime, Patched(), "nop", out_dir=out, **ISOLATION)
    before = (out / "trajectories.jsonl").read_bytes()
    outcome = await rescore(runtime, out, environment=Patched(), **ISOLATION)
    assert (outcome.patches, outcome.agreed, outcome.without_patch, outcome.agrees) == (3, 3, 0, True)
    assert {one: line["details"]["read"] for one, line in lines(out).items()} == {
        one: f"patch of {one}" for one in ("a", "b", "c")
    }
    assert {(line["infra_retries"], line["check_repeated"]) for line in lines(out).values()} == {(0, None)}
    assert (out / "trajectories.jsonl").read_bytes() == before


async def test_differing_failing_and_missing_ones_are_told_apart(runtime, tmp_path):
    out, ids = tmp_path / "out", ("a", "b", "broken", "none")
    await run_rollouts(runtime, Patched(ids), "nop", out_dir=out, **ISOLATION)
    outcome = await rescore(runtime, out, environment=Patched(ids, {"b": 0.0}), **ISOLATION)
    assert (outcome.patches, outcome.agreed, outcome.without_patch) == (3, 1, 1)
    assert {one["item_id"] for one in outcome.differing} == {"b", "broken"}
    found = lines(out)
    assert (found["b"]["recorded_reward"], found["b"]["reward"], found["b"]["agrees"]) == (1.0, 0.0, False)
    assert (found["broken"]["reward"], found["broken"]["failure"]["kind"]) == (None, "verifier")


async def test_the_last_record_of_a_rollout_is_what_is_verified(runtime, tmp_path):
    out = tmp_path / "out"
    await run_rollouts(runtime, Patched(("a",)), "nop", out_dir=out, **ISOLATION)
    last = (out / "trajectories.jsonl").read_text()
    (out / "trajectories.jsonl").write_text(last.replace("patch of a", "an older one") + last)
    outcome = await rescore(runtime, out, environment=Patched(("a",)), **ISOLATION)
    assert (outcome.patches, outcome.agreed) == (1, 1)


async def test_an_item_that_is_gone_is_wrong_use(runtime, tmp_path):
    out = tmp_path / "out"
    await run_rollouts(runtime, Patched(("a",)), "nop", out_dir=out, **ISOLATION)
    with pytest.raises(UsageError, match="the dataset no longer has item 'a'"):
        await rescore(runtime, out, environment=Patched(("z",)), **ISOLATION)


async def test_what_a_run_names_is_used_only_if_it_is_trusted(runtime, tmp_path):
    """A folder of somebody else: its backend's settings name a program, which would run here."""
    out, ran = tmp_path / "out", tmp_path / "ran"
    await run_rollouts(runtime, Patched(("a",)), "nop", out_dir=out, **ISOLATION)
    run = json.loads((out / "run.json").read_text())
    run["configuration"] |= {"backend": "ssh", "backend_config": {"config_file": f"ProxyCommand touch {ran}"}}
    (out / "run.json").write_text(json.dumps(run))
    with pytest.raises(UsageError, match=r"would run on this machine: .*ProxyCommand touch .*--trust-run"):
        await rescore(runtime, out)
    outcome = await rescore(runtime, out, environment=Patched(("a",)), **ISOLATION)
    assert outcome.agrees
    with pytest.raises(UsageError, match="unknown environment 'patched'"):  # the name in run.json, as trusted
        await rescore(runtime, out, trust_run=True)


async def test_a_folder_without_a_run_is_wrong_use(runtime, tmp_path):
    with pytest.raises(UsageError, match=r"no usable run\.json"):
        await rescore(runtime, tmp_path, environment=Patched())
    assert list(tmp_path.glob("rescored*")) == []


async def test_it_stops_when_the_money_is_spent_and_what_has_a_slot_is_finished(runtime, tmp_path, monkeypatch):
    meters, begin = [], Meter.begin
    monkeypatch.setattr(Meter, "begin", lambda meter, sandbox_id: (meters.append(meter), begin(meter, sandbox_id)))
    begun = []

    class Slow(Patched):
        async def score_patch(self, item, patch, rollout):
            begun.append(item["id"])
            while not meters[-1].is_spent:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2 * len(begun))  # when others have been refused
            assert (await rollout.exec_tool("bash", {"command": "true"})).success
            return 1.0, {}

    out, ids = tmp_path / "out", tuple("abcdef")
    await run_rollouts(runtime, Patched(ids), "nop", out_dir=out, **ISOLATION)
    dear = {"backend_config": {"prices": {"sandbox": 3600.0}, "max_cost": 3, "slots_per_sandbox": 3}}
    outcome = await rescore(runtime, out, environment=Slow(ids), concurrency=2, **dear, **ISOLATION)
    assert "of its max_cost 3" in outcome.stopped
    assert not outcome.agrees
    found = lines(out)
    assert sorted(found) == sorted(begun)
    assert {(line["reward"], line["failure"], line["agrees"]) for line in found.values()} == {(1.0, None, True)}
    assert (outcome.patches, outcome.agreed, len(begun)) == (2, 2, 2)
