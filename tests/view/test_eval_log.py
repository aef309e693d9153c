"""Our writer of Inspect's logs, without Inspect: members, spans, scores and errors, epochs, and a log that grows."""

from __future__ import annotations

import fcntl
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import FailureKind, OutputError
from hermes_core.export import eval_log
from hermes_core.export.eval_log import RunLog, log_name
from hermes_core.export.eval_sample import details_text
from hermes_core.records.index import RecordedRun
from hermes_core.records.record import Failure
from tests.view.conftest import summarised


def written(folder: Path, log: Path) -> dict[str, Any]:
    """Return the members of the log of a run."""
    run_log = RunLog(RecordedRun(folder), log)
    run_log.update()
    run_log.close()
    return members(log)


def members(log: Path) -> dict[str, Any]:
    with zipfile.ZipFile(log) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == len(set(archive.namelist()))
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, as one that is writing does."""
    lock = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def test_a_rollout_is_a_sample_with_its_story(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    log = written(write_run([make_record()]), tmp_path / "x.eval")
    sample = log["samples/greet_epoch_1.json"]
    events = [(event["event"], event.get("name") or event.get("span_id")) for event in sample["events"]]
    assert events == [
        *[("sample_init", None), ("span_begin", "acquire"), ("span_end", None), ("span_begin", "setup")],
        *[("span_end", None), ("span_begin", "agent"), ("model", "agent"), ("tool", "agent"), ("model", "agent")],
        *[("span_end", None), ("span_begin", "verify"), ("sandbox", "verify"), ("score", "verify"), ("span_end", None)],
        *[("span_begin", "release"), ("span_end", None)],
    ]
    times = [event["timestamp"] for event in sample["events"]]
    assert times == sorted(times)
    assert sample["scores"]["reward"]["value"] == 1.0
    assert "1 of 2 tests failed" in sample["scores"]["reward"]["explanation"]
    assert "error" not in sample
    assert "limit" not in sample
    assert (sample["total_time"], sample["working_time"], sample["turn_count"]) == (10.0, 9.5, 2)
    model, tool = sample["events"][6], sample["events"][7]
    assert model["input"] == []
    assert model["input_refs"] == [[0, 2]]
    assert (model["output"]["usage"]["input_tokens"], model["output"]["usage"]["input_tokens_cache_read"]) == (800, 100)
    assert model["config"] == {"temperature": 0.7}
    assert [tool["name"] for tool in model["tools"]] == ["terminal"]
    assert tool["arguments"] == {"command": "make test"}
    assert tool["metadata"] == {"exit_code": 2, "bytes_dropped": 4096}
    assert [part["type"] for part in sample["messages"][2]["content"]] == ["reasoning", "text"]


def test_a_summary_is_a_compaction_and_each_answer_names_what_the_model_saw(
    make_record: Any, write_run: Any, tmp_path: Path
) -> None:
    record = summarised(make_record())
    sample = written(write_run([record]), tmp_path / "x.eval")["samples/greet_epoch_1.json"]
    assert [message["role"] for message in sample["input"]] == ["system", "user"]
    agent = [event for event in sample["events"] if event.get("span_id") == "agent" and event["event"] != "span_end"]
    assert [event["event"] for event in agent] == ["model", "tool", "model", "compaction", "model"]
    assert [event["input_refs"] for event in agent if event["event"] == "model"] == [
        [[0, 2]],
        [[0, 5]],
        [[0, 1], [6, 7]],
    ]
    assert (agent[3]["type"], agent[3]["tokens_before"]) == ("summary", 1000)


def test_content_of_models_is_not_trusted(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    log = written(write_run([make_record()]), tmp_path / "x.eval")
    for member in ("_journal/start.json", "header.json"):
        assert log[member]["eval"]["viewer"]["trust_content"] is False


def test_the_list_shows_rewards_and_hides_what_is_always_empty(
    make_record: Any, write_run: Any, tmp_path: Path
) -> None:
    log = written(write_run([make_record()]), tmp_path / "x.eval")
    columns = log["header.json"]["eval"]["viewer"]["task_samples_view"]["columns"]
    assert {"id": "score__reward__reward", "visible": True} in columns
    assert [column["id"] for column in columns if not column["visible"]] == ["target", "answer"]


def test_a_failure_is_an_error_and_no_score(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    log = written(write_run([make_record(), make_record(index=1, reward=None)]), tmp_path / "x.eval")
    lost = log["samples/greet_epoch_2.json"]
    assert lost["scores"] is None
    assert lost["error"]["message"] == "infra failure at verify: the sandbox was lost"
    assert [event["span_id"] for event in lost["events"] if event["event"] == "error"] == ["verify"]
    assert "score" not in [event["event"] for event in lost["events"]]
    (score,) = log["header.json"]["results"]["scores"]
    assert (score["scored_samples"], score["unscored_samples"]) == (1, 1)
    assert score["metrics"]["mean"]["value"] == 1.0
    assert [summary.get("error") for summary in log["summaries.json"]] == [None, lost["error"]["message"]]


def test_a_rollout_that_never_began_says_so(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    failure = Failure(FailureKind.SETUP, "setup", "the patch does not apply")
    bare = make_record(reward=None, failure=failure, messages=[], turns=(), calls=())
    log = written(write_run([bare]), tmp_path / "x.eval")
    (summary,) = log["summaries.json"]
    assert summary["input"] == "(the rollout ended before its conversation began)"
    assert summary["error"] == "setup failure: the patch does not apply"
    assert log["samples/greet_epoch_1.json"]["input"] == []


def test_the_list_shows_the_beginning_of_a_prompt(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    run = write_run([make_record(), make_record(index=1, messages=[{"role": "user", "content": "x" * 301}])])
    shown = [summary["input"] for summary in written(run, tmp_path / "x.eval")["summaries.json"]]
    assert shown == ["Make the tests pass.", "x" * 300 + "…"]


def test_a_report_is_told_in_few_lines() -> None:
    details = {
        "passed": 205,
        "fail_to_pass": {"passed": 3, "total": 3},
        "texts": [["test_a", "E  assert 1\nE  assert 2"], ["test_b", "x" * 80]],
        "output": "a\nb",
    }
    assert details_text(details).splitlines() == [
        "passed: 205",
        'fail_to_pass: {"passed": 3, "total": 3}',
        *("texts:", "test_a", "E  assert 1", "E  assert 2", "test_b", "x" * 80),
        *("output:", "a", "b"),
    ]


def test_without_rewards_there_is_no_scorer(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    log = written(write_run([make_record(reward=None, failure=None), make_record("lost", reward=None)]), tmp_path / "x")
    header = log["header.json"]
    assert header["results"] == {"total_samples": 2, "completed_samples": 1, "scores": []}
    assert header["eval"]["scorers"] == []
    assert log["samples/greet_epoch_1.json"]["scores"] is None


@pytest.mark.parametrize(
    ("reason", "kind", "reached"),
    [
        ("max_turns", "turn", 2),
        ("time_limit", "time", 3.0),
        ("length", "token", 2000),
        ("context_length", "context", 2000),
    ],
)
def test_a_limit_is_named(
    make_record: Any, write_run: Any, tmp_path: Path, reason: str, kind: str, reached: float
) -> None:
    log = written(write_run([make_record(stop_reason=reason)]), tmp_path / "x.eval")
    limit = log["samples/greet_epoch_1.json"]["limit"]
    assert (limit["type"], limit["limit"], limit["reason"]) == (kind, reached, reason)


def test_a_group_is_the_epochs_of_a_sample(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    records = [make_record(index=index, group=group) for group in ("greet#0", "greet#1") for index in (0, 1)]
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"".join(record.line() for record in records))
    log = written(path, tmp_path / "x.eval")
    samples = [log[name] for name in log if name.startswith("samples/")]
    assert sorted(sample["epoch"] for sample in samples) == [1, 2, 3, 4]
    assert len({(sample["metadata"]["group"], sample["epoch"]) for sample in samples}) == 4


def test_long_texts_are_kept_once_and_bounded(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    long = "z" * (1 << 20)
    messages = [*make_record().messages[:3], {"role": "tool", "tool_call_id": "c1", "content": long}]
    log = written(write_run([make_record(messages=messages, turns=(), calls=())]), tmp_path / "x.eval")
    sample = log["samples/greet_epoch_1.json"]
    (tool,) = (event for event in sample["events"] if event["event"] == "tool")
    assert tool["result"].startswith("attachment://")
    assert tool["arguments"] == {"command": "make test"}, "also without a list of calls"
    assert sample["attachments"][tool["result"].removeprefix("attachment://")].startswith("zzz")
    assert len(json.dumps(sample)) < 200_000


def test_a_running_run_has_no_end_yet(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    folder, path = write_run([make_record()], ended=False), tmp_path / "x.eval"
    log = RunLog(RecordedRun(folder), path)
    assert members(path).keys() == {"_journal/start.json", "_journal/hermes-rl.json"}, "it can be opened at once"
    with running(folder):
        assert not log.update()
        assert {"header.json", "summaries.json"}.isdisjoint(members(path))
        assert [summary["epoch"] for summary in members(path)["_journal/summaries/1.json"]] == [1]
        with (folder / "trajectories.jsonl").open("ab") as file:
            file.write(make_record(index=1).line())
        log.update()
        assert "samples/greet_epoch_2.json" in members(path)
    assert log.update()
    assert len(members(path)["summaries.json"]) == 2
    assert members(path)["header.json"]["status"] == "cancelled", "it has no summary: it was killed"
    log.close()


def test_what_was_read_before_stays_readable_while_the_log_grows(
    make_record: Any, write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_log, "BATCH", 3)
    folder = write_run([make_record(index=index) for index in range(20)])
    log, seen = RunLog(RecordedRun(folder), tmp_path / "x.eval"), []
    log.update(lambda done, of: seen.append((len(members(tmp_path / "x.eval")), of)))
    assert [of for _, of in seen] == [20] * 7
    assert [count for count, _ in seen] == sorted({count for count, _ in seen}), "each batch could be read"
    log.close()


@pytest.mark.parametrize("count", [3, eval_log.PART + 1])
def test_a_log_is_continued(
    make_record: Any, write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    folder = write_run([make_record(index=index) for index in range(count)])
    first = written(folder, tmp_path / "x.eval")
    with monkeypatch.context() as patched:
        patched.setattr(eval_log.eval_sample, "sample", None)
        assert written(folder, tmp_path / "x.eval") == first, "nothing is converted twice"
    write_run([make_record(index=count)])
    again = written(folder, tmp_path / "x.eval")
    assert [summary["epoch"] for summary in again["summaries.json"]] == list(range(1, count + 2))
    assert again["header.json"]["results"]["total_samples"] == count + 1


def test_a_log_of_other_records_is_made_again(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    folder = write_run([make_record(), make_record(index=1, reward=None)])
    log = RunLog(RecordedRun(folder), tmp_path / "x.eval")
    log.update()
    write_run([make_record(index=1, reward=0.0, trajectory_id="another")])  # resumed: the failed one is done again
    log.update()
    log.close()
    assert members(tmp_path / "x.eval")["samples/greet_epoch_2.json"]["uuid"] == "another"
    assert [summary.get("error") for summary in members(tmp_path / "x.eval")["summaries.json"]] == [None, None]


def test_nothing_is_missing_after_an_interruption(
    make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(eval_log, "BATCH", 1)
    path = tmp_path / "all.jsonl"
    first, second = make_record(reward=None), make_record(index=1)
    path.write_bytes(first.line() + second.line() + make_record(reward=0.5).line())  # the first one was done again
    log = RunLog(RecordedRun(path), tmp_path / "x.eval")
    with pytest.raises(KeyboardInterrupt):
        log.update(interrupt)
    log.close()
    names = written(path, tmp_path / "x.eval")
    assert {"samples/greet_epoch_1.json", "samples/greet_epoch_2.json"} <= names.keys()


def test_the_list_of_a_long_run_has_few_parts(make_record: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(make_record().line())
    log = RunLog(RecordedRun(path), tmp_path / "x.eval")
    for index in range(1, 50):
        with path.open("ab") as file:
            file.write(make_record(index=index).line())
        log.update()
    log.close()
    parts = [value for name, value in members(tmp_path / "x.eval").items() if name.startswith("_journal/summaries/")]
    assert [len(part) for part in parts] == [20, 20, 10]
    assert [summary["epoch"] for part in parts for summary in part] == list(range(1, 51))


def test_the_directory_of_a_long_log_is_not_written_for_each_few_samples(
    make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_log, "BATCH", 2)
    path, seen = tmp_path / "all.jsonl", []
    path.write_bytes(b"".join(make_record(index=index).line() for index in range(50)))
    log = RunLog(RecordedRun(path), tmp_path / "x.eval")
    log.update(lambda done, of: seen.append((done, of)))
    log.close()
    counts = [done for done, _ in seen]
    assert counts[:3] == [2, 4, 6]
    assert counts[-1] == 50
    assert counts[-2] < 47
    assert {of for _, of in seen} == {50}
    assert len(members(tmp_path / "x.eval")["summaries.json"]) == 50


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip at all"])
def test_a_broken_log_is_made_again(make_record: Any, write_run: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.eval").write_bytes(content)
    assert "header.json" in written(write_run([make_record()]), tmp_path / "x.eval")


def test_a_log_that_cannot_be_written_is_an_error(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't write"):
        RunLog(RecordedRun(write_run([make_record()])), tmp_path / "file" / "x.eval")


def test_the_name_of_a_log_has_its_time_task_and_id(make_record: Any, write_run: Any) -> None:
    run = RecordedRun(write_run([make_record()]))
    time, task, name = log_name(run).removesuffix(".eval").split("_")
    assert time[:2] == "20"
    assert task == "tasks"
    assert name == log_name(RecordedRun(run.path)).removesuffix(".eval").split("_")[2]


def test_a_hostile_item_is_only_a_name(make_record: Any, write_run: Any, tmp_path: Path) -> None:
    log = written(write_run([make_record("../../etc/passwd")]), tmp_path / "x.eval")
    assert "samples/../../etc/passwd_epoch_1.json" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.eval"]
