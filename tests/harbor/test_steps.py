"""Tasks of several steps on Docker: their rewards, where they end, and what an agent can't do to the next one."""

from __future__ import annotations

import pytest
from hermes_harbor.steps import StepProgress, combine_verdicts
from hermes_harbor.task_toml import TaskToml
from hermes_harbor.tasks import HarborTask, TaskPart
from hermes_harbor.verify import PartVerdict

from tests.harbor.harbor_tasks import Shell, write_task
from tests.harbor.harbor_tasks import roll_out_here as roll_out
from tests.harbor.task_folders import REWARD, STEPS, step

NAMES = ("one", "two", "three")


def write_steps(folder, *, root="", of_two="", **more):
    """Write a task with three steps; `more` are files of step two."""
    steps = "".join(f'\n[[steps]]\nname = "{name}"\n{of_two if name == "two" else ""}' for name in NAMES)
    files = {**step("one"), **step("two", files=more), **step("three")}
    return write_task(folder, f"{root}\n{steps}", files=files, **STEPS)


def does(*names):
    return [f"echo {name} >/app/{name}" for name in names]


async def test_each_step_has_its_instruction_and_its_reward(host_runtime, tmp_path):
    write_steps(tmp_path / "task")
    agent = Shell(*does("one"), None, "ls /tests /solution; echo no", None, *does("three"), None, "echo never")
    record = (await roll_out(host_runtime, tmp_path, agent))["task"]
    said = [message["content"] for message in record["messages"] if message["role"] == "user"]
    assert said == [f"Write {name} to /app/{name}.\n" for name in NAMES]
    steps = record["details"]["steps"]
    assert [(each["name"], each["reward"], each["exit_code"]) for each in steps] == [
        ("one", 1.0, 0),
        ("two", 0.0, 0),
        ("three", 1.0, 0),
    ]
    assert record["reward"] == pytest.approx(2 / 3)
    assert "never" not in str(agent.answers)
    assert "No such file" in agent.answers[1]["output"] and "test.sh" not in agent.answers[1]["output"]
    assert (record["failure"], record["stop_reason"]) == (None, "finished")


@pytest.mark.full
async def test_a_step_below_its_least_reward_is_the_last(host_runtime, tmp_path):
    write_steps(tmp_path / "task", of_two="min_reward = 0.5")
    agent = Shell(*does("one"), None, "true", None, *does("three"))
    record = (await roll_out(host_runtime, tmp_path, agent))["task"]
    assert (record["reward"], record["details"]["not_begun"]) == (0.5, ["three"])
    assert record["details"]["reason"] == "step 'two' is below its min_reward of reward"
    assert len(agent.answers) == 2


@pytest.mark.full
async def test_steps_that_an_agent_does_not_come_to_count_zero(host_runtime, tmp_path):
    write_steps(tmp_path / "task", of_two="agent = {timeout_sec = 1}")
    write_steps(tmp_path / "last", root='multi_step_reward_strategy = "final"')
    for agent, reward in (
        (Shell(*does("one")), 1 / 3),
        (Shell(*does("one"), None, *does("two"), "sleep 60", None, *does("three")), 2 / 3),
    ):
        records = await roll_out(host_runtime, tmp_path / "task", agent)
        assert records["task"]["reward"] == pytest.approx(reward)
        assert records["task"]["details"]["reason"] == "the agent stopped before the last step"
    assert records["task"]["stop_reason"] == "time_limit"
    assert records["task"]["details"]["not_begun"] == ["three"]
    record = (await roll_out(host_runtime, tmp_path / "last", Shell(*does("one"))))["last"]
    assert (record["reward"], record["details"]["not_begun"]) == (0.0, ["two", "three"])


@pytest.mark.full
async def test_an_agent_that_forges_one_step_scores_zero_for_all(host_runtime, tmp_path):
    write_steps(tmp_path / "task")
    agent = Shell(*does("one"), None, f"echo 1 >{REWARD}.txt", None, *does("three"))
    record = (await roll_out(host_runtime, tmp_path, agent))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert record["details"]["tampered"] == [f"{REWARD}.txt was there before the tests"]
    assert record["details"]["reason"] == "the agent tampered with step 'two'"
    assert len(agent.answers) == 2


@pytest.mark.full
async def test_what_an_agent_left_running_is_dead_in_the_next_step(host_runtime, tmp_path):
    write_steps(tmp_path / "task")
    daemon = "env -i setsid sh -c 'while :; do echo >/app/alive; sleep 0.05; done' >/dev/null 2>&1 &"
    agent = Shell(f"{daemon} sleep 0.3; ls", None, "rm alive; sleep 0.3; ls", None, *does("three"))
    record = (await roll_out(host_runtime, tmp_path, agent))["task"]
    assert [each["output"].strip() for each in agent.answers[:2]] == ["alive", ""]
    assert [each["reward"] for each in record["details"]["steps"]] == [0.0, 0.0, 1.0]


@pytest.mark.full
async def test_a_step_that_can_t_begin_any_more_counts_zero(host_runtime, tmp_path):
    setup = {"workdir/setup.sh": "#!/bin/sh\n[ -f /app/one ] || { echo gone >&2; exit 3; }\n"}
    write_steps(tmp_path / "task", **setup)
    record = (await roll_out(host_runtime, tmp_path, Shell("true", None, *does("two", "three"))))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert record["details"]["reason"] == (
        "step 'two' could not begin: setup.sh of step 'two' ended with status 3: gone"
    )


@pytest.mark.full
async def test_a_first_step_that_can_t_begin_is_a_failure(host_runtime, tmp_path):
    for name, files, toml in (
        ("setup", {"workdir/setup.sh": "#!/bin/sh\nexit 3\n"}, ""),
        ("health", {}, '[steps.healthcheck]\ncommand = "echo ill; false"\nretries = 2\ninterval_sec = 0'),
    ):
        write_task(tmp_path / name, f'[[steps]]\nname = "one"\n{toml}', files=step("one", files=files), **STEPS)
    records = await roll_out(host_runtime, tmp_path)
    assert records["setup"]["failure"]["kind"] == records["health"]["failure"]["kind"] == "setup"
    assert "setup.sh of step 'one' ended with status 3" in records["setup"]["failure"]["message"]
    assert "the healthcheck of step 'one' failed 2 times" in records["health"]["failure"]["message"]


def task_of(toml, *names):
    parts = [TaskPart(name, "", (), None, None, None, None, {}, None, None, (), {}) for name in names]
    return HarborTask("t", None, TaskToml.model_validate(toml), None, "/app", {}, tuple(parts))


@pytest.mark.parametrize(
    ("strategy", "rewards", "over", "reward"),
    [
        (None, (1.0, 0.5, 0.0), None, 0.5),
        ("mean", (1.0, 0.5, 0.0), None, 0.5),
        ("final", (1.0, 0.5, 0.25), None, 0.25),
        ("mean", (1.0, 0.5), None, 0.5),
        ("final", (1.0, 0.5), None, 0.0),
        ("mean", (1.0, 0.5), "excused", 0.75),
        ("final", (1.0, 0.5), "excused", 0.5),
        ("mean", (1.0,), "could not begin", 1 / 3),
    ],
)
def test_the_reward_of_all_steps(strategy, rewards, over, reward):
    toml = {} if strategy is None else {"multi_step_reward_strategy": strategy}
    progress = StepProgress(None, [PartVerdict(each, {}) for each in rewards], over, excused=over == "excused")
    found, details = combine_verdicts(task_of(toml, *NAMES), progress)
    assert found == pytest.approx(reward)
    assert details.get("not_begun", []) == [*NAMES[len(rewards) :]]


@pytest.mark.full
async def test_a_sandbox_that_is_not_healthy_is_a_failure_of_the_setup(host_runtime, tmp_path):
    check = '[environment.healthcheck]\ncommand = "echo 1 >>/tmp/n; cat /tmp/n; {}"\ninterval_sec = 0.05\n'
    write_task(tmp_path / "never", check.format("false") + "retries = 2")
    write_task(tmp_path / "hangs", check.format("sleep 9") + "retries = 1\ntimeout_sec = 0.5")
    patience = "retries = 1\nstart_period_sec = 30\nstart_interval_sec = 0.05"
    write_task(tmp_path / "late", check.format("[ $(wc -l </tmp/n) -ge 3 ]") + patience)
    records = await roll_out(host_runtime, tmp_path)
    messages = {name: record["failure"] and record["failure"]["message"] for name, record in records.items()}
    assert messages["never"].startswith("environment.healthcheck failed 2 times, in the end with status 1 (1\n1)")
    assert "failed 1 times, in the end with its time limit" in messages["hangs"]
    assert {record["failure"]["kind"] for name, record in records.items() if name != "late"} == {"setup"}
    assert (records["late"]["reward"], messages["late"]) == (1.0, None)
