"""The index of a run: what a row says, when the file is used, and what happens while the records grow or change."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.base import CallRecord
from hermes_core.errors import UsageError
from hermes_core.records import index
from hermes_core.records.index import RecordedRun
from hermes_core.records.record import ToolCalls
from hermes_core.records.store import read_run


def test_a_row_says_what_a_table_needs(make_record: Any, write_run: Any) -> None:
    (row,) = RecordedRun(write_run([make_record()])).rows.values()
    assert (row.name, row.reward, row.solved, row.turns, row.calls) == ("greet/0", 1.0, True, 2, 1)
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens, row.cost) == (1900, 100, 100, 0.02)
    assert (row.seconds, row.waited_s, row.model) == (10.0, 0.5, "scripted")
    assert row.tools == {"terminal": (1, 1.0, {}, {}, {"2": 1})}


def test_a_failure_is_in_the_row(make_record: Any, write_run: Any) -> None:
    (row,) = RecordedRun(write_run([make_record(reward=None)])).rows.values()
    assert (row.failure_kind, row.failure_stage, row.failure_message) == ("infra", "verify", "the sandbox was lost")


def test_a_record_of_version_1_has_a_row(make_record: Any, tmp_path: Path) -> None:
    whole = make_record().to_json()
    old = {
        key: whole[key]
        for key in ("trajectory_id", "environment", "item_id", "group", "rollout_index", "agent", "backend", "reward")
    }
    old |= {key: whole[key] for key in ("details", "failure", "patch", "messages", "stop_reason", "timings")}
    old |= {"tokens": None, "masks": None, "logprobs": None, "tool_calls": dataclasses.asdict(ToolCalls(1, 1, 1, 0))}
    (tmp_path / "old.jsonl").write_text(json.dumps(old) + "\n")
    run = RecordedRun(tmp_path / "old.jsonl")
    (row,) = run.rows.values()
    assert (row.turns, row.calls, row.seconds, row.cost) == (2, 1, 10.0, None)
    assert row.tools == {"terminal": (1, 0.0, {}, {}, {})}, "they are read from the messages"
    assert run.record(row).item_id == "greet"


def test_the_second_time_no_record_is_read(make_record: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run([make_record(index=number) for number in range(3)])
    first = RecordedRun(folder).rows
    monkeypatch.setattr(index, "parse_outline", None)
    assert RecordedRun(folder).rows == first


def test_garbage_is_collected_again_after_a_run_was_read(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    folder = write_run([make_record()])
    was_on = gc.isenabled()
    try:
        gc.enable()
        RecordedRun(folder)
        with pytest.raises(UsageError):
            RecordedRun(tmp_path / "none")
        assert gc.isenabled()
        gc.disable()
        RecordedRun(folder)
        assert not gc.isenabled()
    finally:
        (gc.enable if was_on else gc.disable)()


def test_what_was_appended_is_read(make_record: Any, write_run: Any) -> None:
    run = RecordedRun(write_run([make_record()]))
    write_run([make_record(index=1)])
    assert len(run.rows) == 1
    assert run.refresh()
    assert [row.rollout_index for row in run.rows.values()] == [0, 1]
    assert run.record(run.rows["greet", "greet", 1]).rollout_index == 1


def test_a_line_that_is_being_written_is_left_for_later(make_record: Any, write_run: Any) -> None:
    folder = write_run([make_record()])
    line = make_record(index=1).line()
    with (folder / "trajectories.jsonl").open("ab") as file:
        file.write(line[:50])
        file.flush()
        run = RecordedRun(folder)
        assert len(run.rows) == 1
        file.write(line[50:])
    run.refresh()
    assert len(run.rows) == 2


def test_the_last_record_of_a_rollout_counts(make_record: Any, tmp_path: Path) -> None:
    lines = [make_record(reward=None).line(), make_record(reward=0.5).line()]
    (tmp_path / "all.jsonl").write_bytes(b"".join(lines))
    (row,) = RecordedRun(tmp_path / "all.jsonl").rows.values()
    assert row.reward == 0.5


def test_records_that_were_replaced_are_read_again(make_record: Any, write_run: Any) -> None:
    folder = write_run([make_record(reward=None), make_record(index=1)])
    run = RecordedRun(folder)
    path = folder / "trajectories.jsonl"
    path.with_name("new").write_bytes(make_record(index=1).line() + make_record(index=2).line())
    path.with_name("new").replace(path)
    assert not run.refresh()
    assert [row.rollout_index for row in run.rows.values()] == [1, 2]
    assert RecordedRun(folder).rows == run.rows


def test_records_that_were_edited_in_place_are_read_again(make_record: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(make_record(reward=1.0).line())
    RecordedRun(path)
    path.write_bytes(make_record(reward=0.0).line())
    os.utime(path, (1, 1))
    assert [row.reward for row in RecordedRun(path).rows.values()] == [0.0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 0, "end": 0}'])
def test_a_bad_index_file_is_made_again(make_record: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(make_record().line())
    (tmp_path / ".all.jsonl.index").write_text(text)
    assert len(RecordedRun(path).rows) == 1


@pytest.mark.parametrize("change", [{"offset": -1}, {"size": 2**62}, {"offset": 2**62, "size": 1}])
def test_an_index_of_rows_beyond_the_records_is_made_again(
    make_record: Any, tmp_path: Path, change: dict[str, int]
) -> None:
    path, held = tmp_path / "all.jsonl", tmp_path / ".all.jsonl.index"
    path.write_bytes(make_record().line())
    rows = RecordedRun(path).rows
    (row,) = rows.values()
    content = json.loads(held.read_bytes())
    held.write_text(json.dumps([*content[:-1], [row._replace(**change)]]))
    assert RecordedRun(path).rows == rows


def test_the_records_of_a_run_that_is_replaced_stay_readable_until_it_is_read_again(
    make_record: Any, write_run: Any
) -> None:
    folder = write_run([make_record()])
    run = RecordedRun(folder)
    (row,) = run.rows.values()
    beside = folder / "new"
    beside.write_bytes(make_record("other").line())
    beside.replace(folder / "trajectories.jsonl")
    assert run.record(row).item_id == "greet"
    assert not run.refresh()
    assert [run.record(row).item_id for row in run.rows.values()] == ["other"]


def test_a_folder_that_cannot_be_written_is_read(make_record: Any, write_run: Any, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    folder = write_run([make_record()])
    monkeypatch.setattr(index, "open_to_write", refuse)
    assert len(RecordedRun(folder).rows) == 1
    assert not (folder / ".trajectories.jsonl.index").exists()


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "validation" / "local").mkdir(parents=True)
    (tmp_path / "validation" / "local" / "trajectories.jsonl").touch()
    with pytest.raises(UsageError, match=r"\(name a run in it: .*/validation/local\)"):
        RecordedRun(tmp_path / "validation")
    with pytest.raises(UsageError, match=r"no usable run\.json: .* \(name a run in it: .*/validation/local\)"):
        read_run(tmp_path / "validation")
    with pytest.raises(UsageError, match=r"trajectories.jsonl can't be read: .* \(name the folder of a run\)"):
        RecordedRun(tmp_path)
    (tmp_path / "trajectories.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="line 1: no record of a rollout"):
        RecordedRun(tmp_path)


def test_the_kinds_of_failed_calls_are_counted(make_record: Any, write_run: Any, failed_call: CallRecord) -> None:
    (row,) = RecordedRun(write_run([make_record(calls=(failed_call, failed_call))])).rows.values()
    assert row.tools == {"patch": (2, 2.0, {"invalid_arguments": 2}, {"path is missing": 2}, {})}
