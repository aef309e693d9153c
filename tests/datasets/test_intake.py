"""Datasets with rows or folders that can't be used: one message counts and names them all, or they are left out."""

import json
import logging
import shutil

import pytest
from hermes_harbor.config import HarborConfig, TerminalBench2Config
from hermes_harbor.endless.config import EndlessConfig
from hermes_harbor.endless.environment import EndlessTerminalsEnvironment
from hermes_harbor.environment import HarborEnvironment
from hermes_harbor.terminal_bench import TerminalBench2Environment
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.environment import SweSmithEnvironment

from benchmarks.terminal_tasks import write_task as write_endless
from hermes_core.datasets.intake import SHOWN, Intake
from hermes_core.datasets.prompts import PromptsConfig, PromptsEnvironment
from hermes_core.datasets.tasks import TasksConfig, TasksEnvironment
from hermes_core.errors import DatasetError
from tests.harbor.harbor_tasks import write_task
from tests.harbor.test_endless import TASK


def lines(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def prompts(top):
    row = {"id": "good", "prompt": "Do it."}
    return lines(top / "rows.jsonl", row, {"id": "bad"}, "{\n", row, {"id": 5, "prompt": ""})


def tasks(top):
    row = {"id": "good", "prompt": "Do it.", "check": "true"}
    return lines(top / "rows.jsonl", row, {**row, "check": ""}, "[]\n", row, {**row, "id": ""})


def harbor(top):
    for name in ("good", "windows", "no-toml", "no-tests", "no-text"):
        write_task(top / name, '[environment]\nos = "windows"' if name == "windows" else "", image="x")
    (top / "no-toml/task.toml").write_text("[[")
    shutil.rmtree(top / "no-tests/tests")
    (top / "no-text/instruction.md").write_bytes(b"\xff")
    return top


def terminal_bench(top):
    row = {"task_name": "good", "instruction": "Do it.", "docker_image": "x", "test_sh": "true"}
    bad = {**row, "task_name": "bad", "tests_tar": "AAAA"}
    return lines(top / "rows.jsonl", row, bad, "{\n", row, {**row, "docker_image": ""})


def endless(top):
    for name in ("good", "no-tests", "no-json", "no-def", "no-words"):
        write_endless(top / name, TASK, source="ubuntu:22.04")
    (top / "no-tests/test_final_state.py").write_text("")
    (top / "no-json/task.json").write_text("{")
    (top / "no-def/container.def").unlink()
    (top / "no-words/task.json").write_text("{}")
    return top


def swe_smith(top):
    row = {
        "instance_id": "good",
        "repo": "owner/name",
        "patch": "diff --git a/a.py b/a.py\n",
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
        "problem_statement": "It is broken.",
    }
    (top / "name.bundle").touch()
    listed = [{"repo": "owner/name", "bundle": "name.bundle", "base_commit": "0" * 40}]
    (top / "repos.json").write_text(json.dumps(listed))
    silent, elsewhere = {**row, "instance_id": "s", "problem_statement": ""}, {**row, "instance_id": "e", "repo": "x/y"}
    return lines(top / "rows.jsonl", row, silent, "{\n", row, elsewhere)


KINDS = {
    "prompts": (prompts, PromptsEnvironment, PromptsConfig),
    "tasks": (tasks, TasksEnvironment, TasksConfig),
    "harbor": (harbor, HarborEnvironment, HarborConfig),
    "terminal-bench-2": (terminal_bench, TerminalBench2Environment, TerminalBench2Config),
    "endless-terminals": (endless, EndlessTerminalsEnvironment, EndlessConfig),
    "swe-smith": (swe_smith, SweSmithEnvironment, SweSmithConfig),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_one_message_names_all_that_can_t_be_used_or_they_are_left_out(tmp_path, caplog, kind):
    write, environment, config = KINDS[kind]
    settings = {"dataset_name": str(write(tmp_path)), "skip_refused": True}
    if kind == "swe-smith":
        settings["repo_base_url"] = str(tmp_path)

    async def set_up(**changes):
        made = environment(config(**{**settings, **changes}))
        try:
            await made.setup()
            return [made.item_id(item) for item in made.items()]
        finally:
            await made.aclose()

    with pytest.raises(DatasetError, match="4 of 5 can't be used: ") as refused:
        await set_up(skip_refused=False)
    assert refused.value.message.count("; ") == 3
    assert "skip_refused=true" in refused.value.hint
    with caplog.at_level(logging.WARNING):
        assert await set_up() == ["good"]
    assert "left out (skip_refused): 4 of 5 can't be used: " in caplog.text


def test_no_message_is_without_end():
    intake = Intake("rows", skip=True)
    readers = [(f"line {number}", lambda: "x" * 5) for number in range(1000)]
    assert intake.read_all(readers, str) == {"xxxxx": "xxxxx"}
    with pytest.raises(DatasetError) as refused:
        Intake("rows", skip=False).read_all(readers, lambda name: name * 10_000)
    assert f"; and {999 - SHOWN} more" in refused.value.message and len(refused.value.message) < 20_000
    assert "line 1: " in refused.value.message


@pytest.mark.parametrize("skip", [False, True])
def test_nothing_at_all_is_refused(skip):
    with pytest.raises(DatasetError, match="nothing to do in dataset 'rows'"):
        Intake("rows", skip=skip).read_all([("line 1", lambda: None)], str)
