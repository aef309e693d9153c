"""`validate` finds what is wrong with a dataset: on real sandboxes, with the cheats, repeated, on two backends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import hermes_docker
import pytest

from hermes_core.cli.report import validation_text
from hermes_core.datasets.tasks import TasksEnvironment
from hermes_core.environment import Environment
from hermes_core.errors import InfraError, PluginError, PolicyError, ProvisionError, UnknownNameError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.records.store import read_records
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.settings import Settings
from hermes_core.soundness.validate import Validation, validate
from hermes_core.soundness.verdicts import ItemResult, Verdict

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "namespace"}
ALONE = {"isolation": "shared", "allow_unisolated": True}

FEW = ("empty-files", "every-number", "kills-every-process")
"""Cheats of each kind."""


class FlakyTasks(TasksEnvironment):
    """Tasks of which one, when it is solved, has its reward every other time only."""

    name = "flaky-tasks"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.solved = 0

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, rollout: Any) -> tuple[float, dict[str, Any]]:
        reward, details = await super().verify_and_score_trajectory(item, rollout)
        if item["id"] == "flaky gold" and reward:
            self.solved += 1
            return float(self.solved % 2), {"reason": "it flaked"}
        return reward, details


class LostBackend(LocalBackend):
    """A backend that can't make sandboxes today."""

    name = "lost"

    async def create(self, spec: Any) -> Any:
        raise ProvisionError("no host has room")


class Plugin:
    @hookimpl
    def hermes_register_environments(self, registry: Any) -> None:
        registry.add("flaky-tasks", FlakyTasks)

    @hookimpl
    def hermes_register_backends(self, registry: Any) -> None:
        registry.add("lost", LostBackend)


@pytest.fixture
async def runtime(tmp_path):
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, plugins=[Plugin()], load_entry_points=False) as one:
        yield one


@pytest.fixture
def tasks(tmp_path):
    """Writes a dataset of `tasks` and returns the settings of the environment."""

    def write(*rows: Mapping[str, Any]) -> dict[str, str]:
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps({"prompt": "Write it to out.txt.", **row}) + "\n" for row in rows))
        return {"dataset_name": str(path)}

    return write


SOUND = {"id": "sound", "check": "grep -qx 42 out.txt && test $(wc -l <out.txt) = 1", "solution": "echo 42 >out.txt"}


PLANTED = [
    SOUND,
    {"id": "nop scores", "check": "! test -f missing", "solution": "true"},
    {"id": "gold fails", "check": 'test "$(cat out.txt)" = 43', "solution": "echo 42 >out.txt"},
    {"id": "cheatable", "check": "grep -q 42 out.txt", "solution": "echo 42 >out.txt"},
    {"id": "differs", "check": "test -s out.txt && test $FLAVOUR = one", "solution": "echo 42 >out.txt"},
    {**SOUND, "id": "flaky gold"},
]


def found(outcome: Validation) -> dict[str, set[str]]:
    """The reasons by item."""
    reasons: dict[str, set[str]] = {}
    for finding in outcome.findings:
        reasons.setdefault(finding.item_id, set()).add(str(finding.reason))
    return reasons


async def test_each_planted_fault_is_found_and_the_quarantine_makes_the_rest_sound(runtime, tasks, tmp_path):
    env = tasks(*PLANTED)
    backends = {
        flavour: {"backend": "local", "backend_config": {"env_vars": {"FLAVOUR": flavour}}}
        for flavour in ("one", "two")
    }
    given = {"env": env, "concurrency": 3, **ISOLATION}
    outcome = await validate(
        runtime, "flaky-tasks", repeat=2, cheats=FEW, backends=backends, out_dir=tmp_path / "out", **given
    )
    assert found(outcome) == {
        "nop scores": {"nop-scores"},
        "gold fails": {"gold-fails"},
        "cheatable": {"cheat-solves"},
        "differs": {"gold-fails", "differs", "cheat-solves"},
        "flaky gold": {"gold-flakes"},
    }
    assert outcome.complete and not outcome.sound
    rows = {(row["item"], row["backend"]): row for row in outcome.rows()}
    assert rows["sound", "one"] == {
        **{"item": "sound", "backend": "one", "gold": "2/2", "nop": "0/2"},
        **{"cheats": "0/3", "result": "sound"},
    }
    assert rows["flaky gold", "two"]["gold"] == "1/2"
    assert rows["cheatable", "one"]["cheats"] == "1/3"

    records = {each["trajectory_id"]: each for backend in backends for each in read_records(tmp_path / "out" / backend)}
    written = json.loads((tmp_path / "out/quarantine.json").read_text())
    assert [item["item_id"] for item in written["items"]] == [row["id"] for row in PLANTED[1:]]
    for item in written["items"]:
        for reason in item["reasons"]:
            if reason["reason"] == "differs":
                continue
            evidence = [records[name] for name in reason["records"]]
            assert [each["reward"] for each in evidence] == reason["rewards"] != []
            assert {(each["item_id"], each["agent"]) for each in evidence} == {(item["item_id"], reason["agent"])}
    table = (tmp_path / "out/validation.md").read_text()
    assert "| flaky gold | two | 1/2 | 0/2 | 0/3 | gold-flakes |" in table
    assert json.loads((tmp_path / "out/validation.json").read_text())["count"] == {
        **{"sound": 1, "unsound": 5, "not tried": 0}
    }

    again = await validate(runtime, "flaky-tasks", quarantine=str(tmp_path / "out/quarantine.json"), **given)
    assert again.sound and [each.item_id for each in again.results] == ["sound"]


@pytest.mark.full
async def test_a_difference_between_backends_of_two_kinds_is_found(tasks, tmp_path, docker_images):
    """What differs is what the sandbox is, not what it was told."""
    only = {"id": "apart", "check": "test -s out.txt && test -e /.dockerenv", "solution": "echo 42 >out.txt"}
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, plugins=[hermes_docker], load_entry_points=False) as runtime:
        outcome = await validate(
            runtime,
            "tasks",
            env=tasks(SOUND, only),
            cheats=["every-number"],
            backends={"local": {}, "docker": {"backend": "docker", "backend_config": {"image": docker_images[0]}}},
            **ISOLATION,
        )
    assert found(outcome) == {"apart": {"gold-fails", "differs", "cheat-solves"}}
    assert {(row["item"], row["backend"]): row["gold"] for row in outcome.rows()} == {
        **{("sound", "local"): "1/1", ("sound", "docker"): "1/1"},
        **{("apart", "local"): "0/1", ("apart", "docker"): "1/1"},
    }


async def test_no_usual_cheat_solves_a_task_with_a_good_check(runtime, tasks):
    hidden = {
        "id": "hidden",
        "check": "python3 ~/check.py",
        "files": {"check.py": "assert open('out.txt').read() == '42\\n'"},
        "solution": "echo 42 >out.txt",
    }
    outcome = await validate(runtime, "tasks", env=tasks(hidden), cheats=True, concurrency=3, **ISOLATION)
    assert outcome.sound, outcome.to_dict()
    assert {"check-files", "a-daemon", "python-startup", *FEW} <= {*outcome.cheats}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cheat", "row"),
    [
        ("empty-files", {"check": "test -f out.txt"}),
        ("the-prompt", {"prompt": "Write hello to out.txt.", "check": "grep -q hello out.txt"}),
        ("exits-with-0", {"check": "sh run.sh", "workspace": {"run.sh": "exit 1"}}),
        ("python-startup", {"check": "python3 -c 'import sys; sys.path[:0] = [\"\"]; import unittest; exit(1)'"}),
        ("pytest-plugins", {"check": "test -f conftest.py"}),
        ("forged-rewards", {"check": "grep -q 1 reward.txt"}),
        ("fake-programs", {"check": "PATH=$PWD/bin:$PATH; jq -e .ok out.json"}),
        ("shell-startup", {"check": ". ./.profile; exit 1"}),
        ("check-files", {"check": "python3 check.py", "files": {"check.py": "exit(1)"}}),
    ],
)
async def test_each_cheat_solves_a_task_that_trusts_the_wrong_thing(runtime, tasks, cheat, row):
    env = tasks({"id": "weak", "solution": "true", **row})
    rewards = []
    for agent in ("nop", f"cheat:{cheat}"):
        await run_rollouts(
            runtime, "tasks", agent, env=env, on_record=lambda each: rewards.append(each["reward"]), **ISOLATION
        )
    assert rewards == [0.0, 1.0]


async def test_a_cheat_is_a_rollout_like_any_other_and_names_itself(runtime, tasks, tmp_path):
    summary = await run_rollouts(
        runtime, "tasks", "cheat:every-number", env=tasks(*PLANTED), out_dir=tmp_path / "out", **ISOLATION
    )
    assert summary.complete
    records = {each["item_id"]: each for each in read_records(tmp_path / "out")}
    assert {each["agent"] for each in records.values()} == {"cheat:every-number"}
    assert records["cheatable"]["reward"] == 1.0
    assert "seq 0 9999" in records["sound"]["sandbox_commands"][0]["command"]
    with pytest.raises(UnknownNameError, match="unknown cheat 'every' of environment 'tasks'"):
        await run_rollouts(runtime, "tasks", "cheat:every", env=tasks(SOUND), **ISOLATION)


class Doubted(Environment):
    """Items that score rightly, of which some have a fault that no reward shows."""

    name = "doubted"

    def items(self) -> list[dict[str, Any]]:
        return [{"id": "good"}, {"id": "bad"}]

    def format_prompt(self, item: Any) -> str:
        return "p"

    @hookimpl
    async def solve_trajectory(self, exec_tool: Any) -> None:
        await exec_tool("bash", {"command": "touch done"})

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, exec_tool: Any) -> tuple[float, dict[str, Any]]:
        done = await exec_tool("bash", {"command": "test -f done"})
        return float(done.success), {"checks": 1 if item["id"] == "bad" else 2}

    def doubt(self, item: Any, agent: str, details: Mapping[str, Any]) -> str | None:
        return f"a check of {item['id']} is missing" if agent == "nop" and details["checks"] < 2 else None

    def cheats(self) -> dict[str, Any]:
        async def touches(exec_tool: Any) -> None:
            await exec_tool("bash", {"command": "touch done"})

        async def breaks() -> None:
            raise KeyError("oops")

        return {"touches": touches, "breaks": breaks}


class Broken(Doubted):
    def doubt(self, item: Any, agent: str, details: Mapping[str, Any]) -> str | None:
        raise KeyError("checks")


async def test_an_item_that_its_environment_doubts_is_not_sound(runtime):
    outcome = await validate(runtime, Doubted(), **ALONE)
    (verdict,) = outcome.unsound
    assert (verdict.item_id, verdict.agent, verdict.rewards) == ("bad", "nop", [0.0])
    assert verdict.doubts == ["a check of bad is missing"] and not verdict.flaky
    assert validation_text(outcome).splitlines() == [
        "item  backend  gold  nop  result",
        "good  local    1/1   0/1  sound",
        "bad   local    1/1   0/1  doubted",
        "",
        "doubted: bad on local",
        "  a check of bad is missing",
        "1 of 2 items are sound, 1 unsound; each tried once with either baseline, on local",
    ]
    assert outcome.to_dict()["unsound"][0]["doubts"] == verdict.doubts


async def test_an_environment_brings_its_own_cheats_and_a_broken_one_says_nothing(runtime):
    outcome = await validate(runtime, Doubted(), cheats=True, **ISOLATION)
    assert found(outcome) == {"good": {"cheat-solves"}, "bad": {"doubted", "cheat-solves"}}
    assert not outcome.complete
    assert outcome.results[0].untried == [
        "cheat:breaks on local: agent: the cheat 'breaks' is broken: KeyError: 'oops' (fix the cheat)"
    ]


async def test_an_environment_that_fails_to_say_so_is_named(runtime):
    with pytest.raises(PluginError, match=r"'doubted' failed in doubt\(\): KeyError"):
        await validate(runtime, Broken(), **ALONE)


async def test_what_the_infrastructure_spoils_is_not_tried_and_is_in_no_quarantine(runtime, tasks, tmp_path):
    """One backend can't be started; the other's results stand."""
    nowhere = {"backend": "lost"}
    given = {"env": tasks(SOUND, PLANTED[1]), **ISOLATION}
    outcome = await validate(
        runtime, "tasks", backends={"local": {}, "lost": nowhere}, out_dir=tmp_path / "out", **given
    )
    assert found(outcome) == {"nop scores": {"nop-scores"}}
    assert not outcome.complete and outcome.stopped.startswith("lost: ")
    assert [str(each.status) for each in outcome.results] == ["not tried", "unsound"]
    written = json.loads((tmp_path / "out/quarantine.json").read_text())
    assert [each["item_id"] for each in written["items"]] == ["nop scores"]
    assert written["validated"]["complete"] is False
    with pytest.raises(InfraError, match="no host has room"):
        await validate(runtime, "tasks", backends={"lost": nowhere}, **given)


class Elsewhere(Doubted):
    """Items whose slots are said by their ids: an image, or a profile."""

    name = "elsewhere"
    item_images = True

    def __init__(self, *ids: str) -> None:
        super().__init__()
        self.ids = ids

    def items(self) -> list[dict[str, Any]]:
        return [{"id": each} for each in self.ids]

    def image(self, item: Any) -> str | None:
        return item["id"] if ":" in item["id"] else None

    def profile(self, item: Any) -> str | None:
        return item["id"] if "profile" in item["id"] else None


@pytest.mark.parametrize(
    ("ids", "said"),
    [(("image:1", "image:2"), "sets image, which backend 'local' can't give"), (("a profile",), "unknown profile")],
)
async def test_settings_with_which_no_item_can_get_a_slot_are_wrong_use(runtime, tmp_path, ids, said):
    for run in (validate(runtime, Elsewhere(*ids), **ALONE), run_rollouts(runtime, Elsewhere(*ids), "nop", **ALONE)):
        with pytest.raises((PolicyError, UsageError), match=said):
            await run
    outcome = await validate(runtime, Elsewhere(*ids, "good"), **ALONE)
    assert found(outcome) == {each: {"gold-fails", "nop-fails"} for each in ids}


async def test_what_fails_all_items_is_in_no_quarantine(runtime, tmp_path):
    class Unset(Doubted):
        @hookimpl
        async def setup_trajectory_workspace(self, item: Any) -> dict[str, Any]:
            raise KeyError("setting")

    outcome = await validate(runtime, Unset(), out_dir=tmp_path / "out", **ALONE)
    assert outcome.fails_everywhere == ("local",) and len(outcome.unsound) == 4
    assert (tmp_path / "out/validation.md").exists() and not (tmp_path / "out/quarantine.json").exists()
    assert "no quarantine, as no rollout on local got a reward" in validation_text(outcome)


@pytest.mark.full
async def test_a_resumed_validation_goes_on_with_what_is_left(runtime, tasks, tmp_path):
    given = {"env": tasks(*PLANTED), "cheats": FEW, "repeat": 2, **ISOLATION}
    whole = await validate(runtime, "tasks", out_dir=tmp_path / "out", **given)
    lines = (tmp_path / "out/local/trajectories.jsonl").read_bytes().splitlines(keepends=True)
    kept = lines[:11]
    (tmp_path / "out/local/trajectories.jsonl").write_bytes(b"".join(kept) + lines[11][:50])
    again = await validate(runtime, "tasks", out_dir=tmp_path / "out", resume=True, **given)
    assert found(again) == found(whole)
    assert [each.to_dict()["rewards"] for each in again.results] == [
        each.to_dict()["rewards"] for each in whole.results
    ]
    now = (tmp_path / "out/local/trajectories.jsonl").read_bytes().splitlines(keepends=True)
    assert now[:11] == kept and len(now) == len(lines) == len(PLANTED) * (2 + 2 + 3)
    with pytest.raises(UsageError, match=r"another configuration: agents .*group_size"):
        await validate(runtime, "tasks", out_dir=tmp_path / "out", resume=True, **{**given, "repeat": 3})
    with pytest.raises(UsageError, match="already holds a run"):
        await validate(runtime, "tasks", out_dir=tmp_path / "out", **given)
    tasks({**SOUND, "prompt": "Another prompt."}, *PLANTED[1:])
    with pytest.raises(UsageError, match=r"the dataset was changed after .* was written"):
        await validate(runtime, "tasks", out_dir=tmp_path / "out", resume=True, **given)


async def test_cheats_never_run_with_the_rights_of_whoever_started_them(runtime, tasks):
    with pytest.raises((PolicyError, UsageError)):
        await validate(runtime, "tasks", env=tasks(SOUND), cheats=True, isolation="shared")
    with pytest.raises(PolicyError, match="at isolation 'shared' these would be yours"):
        await validate(runtime, "tasks", env=tasks(SOUND), cheats=True, **ALONE)


async def test_what_cannot_be_is_refused_before_anything_runs(runtime, tasks):
    env = tasks(SOUND)
    with pytest.raises(UnknownNameError, match="unknown cheat 'emty-files' of environment 'tasks'"):
        await validate(runtime, "tasks", env=env, cheats=["emty-files"], **ISOLATION)
    with pytest.raises(UsageError, match="has one backend"):
        await validate(runtime, Doubted(), backends={"a": {}, "b": {}}, **ALONE)
    with pytest.raises(UsageError, match="no validation to resume"):
        await validate(runtime, "tasks", env=env, resume=True, **ISOLATION)


def test_what_comes_out_of_a_sandbox_is_text_in_the_table():
    nop = Verdict("a|b\n# x", "nop", "here", [None], failures=["`rm` <b>|\n\n# title " + "x" * 2000])
    oracle = Verdict("a|b\n# x", "oracle", "here", [1.0])
    result = ItemResult.of("a|b\n# x", {"here": {"oracle": oracle, "nop": nop}})
    told = Validation("tasks", 1, ("here",), (), (result,)).to_markdown()
    assert "| a\\|b \\# x | here | 1/1 | 0/0, 1 without reward | nop-fails |" in told
    assert max(map(len, told.splitlines())) < 700
    assert [line for line in told.splitlines() if line.startswith("#")] == ["# Validation of `tasks`", "## Findings"]
