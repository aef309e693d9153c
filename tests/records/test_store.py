"""The output folder: whole lines, resuming, and what is refused."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hermes_core.errors import FailureKind, UsageError
from hermes_core.records.record import Failure
from hermes_core.records.store import OutputFolder, configuration_hash
from hermes_core.records.summary import Tally
from hermes_core.rollout.trajectory import Trajectory

CONFIGURATION = {"environment": "tasks", "env": {"max_items": 3, "shuffle": False}, "agent": "oracle"}


def record(item_id: str = "a", index: int = 0, reward: float | None = 1.0, **changes):
    trajectory = Trajectory("tasks", item_id, item_id, index, "oracle", "local", reward=reward, **changes)
    if reward is None:
        trajectory.failure = Failure(FailureKind.INFRA, "setup", "gone")
    return trajectory.to_record().line()


def opened(path: Path, configuration=CONFIGURATION, *, resume: bool = False) -> tuple[OutputFolder, Tally]:
    folder, tally = OutputFolder(path), Tally()
    try:
        folder.open(configuration, {"seed": 1}, tally, resume=resume)
    except BaseException:
        folder.close()
        raise
    return folder, tally


def lines(path: Path) -> list[str]:
    return (path / "trajectories.jsonl").read_text().splitlines()


def test_each_record_is_one_line_even_with_every_line_separator_in_it(tmp_path):
    folder, _ = opened(tmp_path)
    folder.append(record(details={"text": "a\nb\r\u2028\u2029\x85\x0b\x1ec\ud800"}))
    folder.append(record("b"))
    folder.close()
    assert len(lines(tmp_path)) == 2
    assert json.loads(lines(tmp_path)[0])["details"]["text"] == "a\nb\r\u2028\u2029\x85\x0b\x1ec?"


def test_a_torn_last_line_is_cut_off_and_its_rollout_counts_as_not_done(tmp_path):
    folder, _ = opened(tmp_path)
    folder.append(record("a"))
    folder.append(record("b"))
    folder.close()
    file = tmp_path / "trajectories.jsonl"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first + 1, len(whole) - 1, first):
        file.write_bytes(whole[:cut])
        folder, tally = opened(tmp_path, resume=True)
        assert tally.was_done_before(("a", 0))
        assert not tally.was_done_before(("b", 0))
        folder.append(record("c"))
        folder.close()
        assert [json.loads(line)["item_id"] for line in lines(tmp_path)] == ["a", "c"]


def test_a_resumed_run_has_one_line_for_each_rollout_and_loses_none(tmp_path):
    folder, _ = opened(tmp_path)
    folder.append(record("a", 0, None))
    folder.append(record("a", 1, None))
    folder.append(record("a", 0, 0.5))
    folder.close()
    folder, tally = opened(tmp_path, resume=True)
    assert tally.was_done_before(("a", 0))
    assert not tally.was_done_before(("a", 1))
    summary = tally.summary(2)
    assert (summary.scored, summary.mean_reward, summary.failures) == (1, 0.5, {})
    folder.append(record("a", 1, 1.0))
    folder.close()
    assert [(one["rollout_index"], one["reward"]) for one in map(json.loads, lines(tmp_path))] == [(0, 0.5), (1, 1.0)]
    moved = [json.loads(line) for line in (tmp_path / "superseded.jsonl").read_bytes().splitlines()]
    assert [(one["rollout_index"], one["reward"]) for one in moved] == [(0, None), (1, None)]
    before = (tmp_path / "trajectories.jsonl").stat().st_ino
    opened(tmp_path, resume=True)[0].close()
    assert (tmp_path / "trajectories.jsonl").stat().st_ino == before, "there was nothing to move"


def test_the_hash_does_not_depend_on_the_order_of_keys():
    assert configuration_hash({"a": 1, "b": 2}) == configuration_hash({"b": 2, "a": 1})
    assert configuration_hash({"a": 1}) != configuration_hash({"a": "1"})


def test_two_runs_cannot_share_a_folder(tmp_path):
    folder, _ = opened(tmp_path)
    with pytest.raises(UsageError, match="another run"):
        OutputFolder(tmp_path)
    script = (
        "import sys, pathlib; from hermes_core.records.store import OutputFolder as F; F(pathlib.Path(sys.argv[1]))"
    )
    other = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert "another run" in other.stderr
    folder.close()
    OutputFolder(tmp_path).close()


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path):
    begun = [OutputFolder.begin(tmp_path / "runs", "swe smith/x") for _ in range(5)]
    assert len({folder.path for folder in begun}) == 5
    assert all(re.fullmatch(r"swe-smith-x-\d{8}-\d{6}(-[2-5])?", folder.path.name) for folder in begun)
    for folder in begun:
        folder.close()
    assert list((tmp_path / "runs").iterdir()) == [], "nothing was recorded"


@pytest.mark.full
def test_processes_that_begin_at_once_have_folders_of_their_own(tmp_path):
    script = """
import pathlib, sys, time
from hermes_core.records.store import OutputFolder
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
for _ in range(20):
    print(OutputFolder.begin(pathlib.Path(sys.argv[1]), "x").path)
"""
    command = [sys.executable, "-c", script, tmp_path, str(time.time() + 2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = [line for process in running for line in process.communicate()[0].splitlines()]
    assert len(paths) == len(set(paths)) == 60


def test_a_parent_that_is_a_file_is_wrong_use(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UsageError, match="output folder"):
        OutputFolder.begin(tmp_path / "runs", "x")


def test_run_json_keeps_when_it_started_and_was_resumed(tmp_path):
    folder, _ = opened(tmp_path)
    folder.append(record())
    folder.close()
    first = json.loads((tmp_path / "run.json").read_text())
    folder, _ = opened(tmp_path, resume=True)
    folder.close()
    second = json.loads((tmp_path / "run.json").read_text())
    assert first["configuration"] == second["configuration"] == CONFIGURATION
    assert (first["seed"], first["resumed"], len(second["resumed"])) == (1, [], 1)
    assert first["started"] == second["started"]


def test_closing_twice_is_harmless_and_frees_the_descriptors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    folder, _ = opened(tmp_path)
    folder.close()
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_chosen_failures_are_done_again(tmp_path):
    def failed(item_id, kind):
        trajectory = Trajectory("tasks", item_id, item_id, 0, "oracle", "local")
        trajectory.failure = Failure(kind, "setup", "gone")
        return trajectory.to_record().line()

    folder, _ = opened(tmp_path)
    for line in (record("a"), failed("b", FailureKind.MODEL), failed("c", FailureKind.SETUP), record("d", reward=0.0)):
        folder.append(line)
    folder.close()
    folder, tally = OutputFolder(tmp_path), Tally()
    folder.open(CONFIGURATION, {}, tally, resume=True, again={FailureKind.MODEL, FailureKind.CANCELLED})
    folder.close()
    assert [tally.was_done_before((item, 0)) for item in "abcd"] == [True, False, True, True]
    assert (tally.finished, tally.failures) == (2, {"setup": 1})
    assert [json.loads(line)["item_id"] for line in lines(tmp_path)] == ["a", "c", "d"]
