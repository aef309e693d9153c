"""Agents that make their verification give no reward: an untouched environment gives one, so they score 0."""

from __future__ import annotations

import pytest

from tests.harbor.harbor_tasks import BUSYBOX, PYTHON, Shell, roll_out, roll_out_here, write_task
from tests.harbor.task_folders import REWARD, STEPS, step

TESTS = f"""
cd /app; /usr/bin/env python3 -c 'import json, os; print(json.dumps(os.path.exists("out") + 0))' >{REWARD}.txt
"""
SHADOWED = "echo 'raise SystemExit(0)' >/app/json.py"
WAYS = {
    "a module of theirs": SHADOWED,
    "no such program": "rm /usr/bin/env",
    "a program that does nothing": "ln -sf /bin/true /usr/bin/env",
}


@pytest.mark.parametrize("way", WAYS)
async def test_what_breaks_the_tests_scores_zero(host_runtime, tmp_path, way):
    write_task(tmp_path / "task", test=TESTS, image=PYTHON)
    record = (await roll_out_here(host_runtime, tmp_path, Shell(WAYS[way])))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert "an untouched environment can be verified" in record["details"]["reason"]


async def test_what_breaks_the_tests_of_a_step_scores_zero(host_runtime, tmp_path):
    files = {**step("one"), **step("two", test=TESTS)}
    write_task(tmp_path / "task", '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n', files=files, **STEPS)
    record = (await roll_out_here(host_runtime, tmp_path, Shell("echo one >/app/one", None, SHADOWED)))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)


async def test_tests_that_never_give_a_reward_are_the_tasks_fault(host_runtime, tmp_path):
    write_task(tmp_path / "task", test="[ -e /app/out ] && exit 0; echo x; exit 1")
    record = (await roll_out_here(host_runtime, tmp_path, Shell(SHADOWED)))["task"]
    assert (record["reward"], record["failure"]["kind"]) == (None, "verifier")


@pytest.mark.full
@pytest.mark.parametrize("way", ["rm -rf /bin /lib /usr", "kill 1; kill -9 -1; kill -9 $(pidof sleep) 1", "rm /bin/sh"])
async def test_an_agent_that_ends_its_sandbox_scores_zero(runtime, tmp_path, way):
    write_task(tmp_path / "task", image=BUSYBOX)
    record = (await roll_out(runtime, tmp_path, Shell(way), isolation="dedicated"))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
