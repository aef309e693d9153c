"""What a run amounts to."""

import io
import json
import os
import time
from dataclasses import replace

import pytest

from hermes_core.agents.base import Usage
from hermes_core.cli.progress import JsonProgress, PlainProgress, progress_for, progress_on, status_line
from hermes_core.cli.report import Failures, summary_text
from hermes_core.errors import FailureKind, UnknownNameError, UsageError
from hermes_core.records.record import STAGES, Failure, Record
from hermes_core.records.summary import Spread, Tally
from hermes_core.records.tokens import TokenSequence


def record(item="a", index=0, reward=1.0, kind=None, retries=0, **timings):
    failure = Failure(FailureKind(kind), "setup", "m") if kind else None
    timings = {**dict.fromkeys(f"{stage}_s" for stage in STAGES), **timings}
    about = {"reward": None if kind else reward, "failure": failure, "infra_retries": retries, "timings": timings}
    return Record("t", "tasks", item, item, index, "oracle", "local", **about)


def test_counts_rewards_failures_and_retries():
    tally = Tally()
    for one in (
        record("a", 0, 1.0, retries=2),
        record("a", 1, 0.0),
        record("b", 0, 0.25),
        record("b", 1, kind="model"),
        record("c", 0, kind="infra", retries=1),
    ):
        tally.add(one)
    summary = tally.summary(6)
    assert (summary.total, summary.scored, summary.solved) == (6, 3, 1)
    assert summary.mean_reward == 1.25 / 3
    assert summary.failures == {"infra": 1, "model": 1}
    assert summary.infra_retries == 3
    assert not summary.complete


def test_a_run_with_tokens_says_how_many_rollouts_train():
    one = TokenSequence.of([1, 2], [-100, 2], [1.0, -0.5])
    tally = Tally()
    tally.add(record("a"))
    assert (tally.summary(1).trainable, tally.summary(1).split) == (None, None)
    assert "tokens to train on" not in summary_text(tally.summary(1), Failures())
    tally = Tally()
    for changes in (
        {"sequences": (one,)},
        {"sequences": (one, one)},
        {"tokens_refused": "mask 2 is 3"},
        {"sequences": (one,), "failure": Failure(FailureKind.INFRA, "verify", "gone"), "reward": None},
    ):
        tally.add(replace(record(str(changes)), **changes))
    summary = tally.summary(4)
    assert (summary.finished, summary.trainable, summary.split) == (3, 2, 1)
    text = "tokens to train on: 2 of 3 finished rollouts (66.7%), 1 of them in several sequences"
    assert text in summary_text(summary, Failures())


def test_a_later_record_replaces_the_earlier_one():
    tally = Tally()
    tally.add(record("a", kind="infra"), earlier=True)
    tally.add(record("a", reward=1.0))
    summary = tally.summary(1)
    assert summary.complete
    assert (summary.scored, summary.solved, summary.failures) == (1, 1, {})
    assert tally.session == 1


def test_the_mean_of_nothing_is_none():
    assert Tally().summary(3).mean_reward is None


def test_percentiles_are_values_that_occurred():
    tally = Tally()
    for index in range(1, 21):
        tally.add(record("a", index, acquire_s=float(index), release_s=None))
    assert tally.summary(20).timings == {"acquire_s": {"p50": 10.0, "p95": 19.0, "max": 20.0}}
    assert tally.summary(20).timings["acquire_s"]["max"] == 20.0


def test_a_spread_keeps_three_digits_of_any_number_of_numbers():
    spread = Spread()
    for number in range(100_000):
        spread.add(1 + number / 100_000)
    assert (spread.percentile(0.5), spread.percentile(0.95), spread.largest) == (1.5, 1.95, 1.99999)
    assert len(spread._counts) == 101


def test_no_percentile_is_above_the_largest():
    spread = Spread()
    spread.add(1.2351)
    assert (spread.percentile(0.5), spread.percentile(0.95)) == (1.2351, 1.2351)


def test_the_infra_rate_is_about_the_last_rollouts_and_needs_ten():
    tally = Tally(window=10)
    for index in range(9):
        tally.add(record("a", index, kind="infra"))
    assert tally.infra_rate() == 0.0
    tally.add(record("a", 9, kind="infra"))
    assert tally.infra_rate() == 1.0
    for index in range(10, 15):
        tally.add(record("a", index))
    assert tally.infra_rate() == 0.5


def test_earlier_sessions_do_not_count_for_the_infra_rate_or_the_speed():
    tally = Tally()
    for index in range(20):
        tally.add(record("a", index, kind="infra"), earlier=True)
    assert tally.infra_rate() == 0.0
    assert tally.session == 0


def test_a_pipe_gets_plain_lines():
    stream = io.StringIO()
    progress, tally = progress_on(stream, "oracle"), Tally()
    progress.begin(3, tally)
    tally.add(record("a"))
    progress.update(tally)
    tally.add(record("b", kind="infra"))
    progress.end(tally)
    first, *_, last = stream.getvalue().splitlines()
    assert first == "oracle: 3 rollouts"
    assert last.startswith("oracle: 2/3 done, 1 solved, 1 failed (1 infra), ")
    assert "left" in last
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_are_not_one_for_each_rollout():
    stream, tally = io.StringIO(), Tally()
    progress = PlainProgress(stream, every_s=3600)
    progress.begin(1000, tally)
    for index in range(1000):
        tally.add(record("a", index))
        progress.update(tally)
    progress.end(tally)
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize(("seconds", "rated"), [(2.0, False), (120.0, True)])
def test_a_rate_is_told_when_it_tells_something(monkeypatch, seconds, rated):
    tally = Tally()
    tally.add(record("a"))
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + seconds)
    told = summary_text(tally.summary(2), Failures())
    assert (f"{seconds:.1f} s" in told, "30 rollouts an hour" in told) == (True, rated)
    assert ("/h" in status_line(tally, 2)) == rated
    assert "left" in status_line(tally, 2)


def test_what_stopped_a_run_is_not_told_twice():
    tally, failures = Tally(), Failures()
    one = record("a", kind="model")
    tally.add(one)
    failures.add(one.to_json())
    assert "stopped: no other rollout would do better" in summary_text(tally.summary(2, stopped="m"), failures)
    assert "stopped: interrupted" in summary_text(tally.summary(2, stopped="interrupted"), failures)


def test_failures_that_differ_only_by_what_is_of_one_rollout_are_one_line():
    failures = Failures()
    for number in range(3):
        failed = record(f"item-{number}", kind="setup").to_json()
        home = f"/data/slot_{number}/.agent-Ab12C{number}"
        failed["failure"]["message"] = (
            f"codex ended with 1: {home}/config.toml, thread 01a223c7-1f8c-7703-a549-9747eb1cf02{number}"
        )
        failures.add(failed)
    other = record("item-3", kind="setup").to_json()
    other["failure"]["message"] = "codex ended with 2: no room"
    failures.add(other)
    lines = failures.lines(None)
    assert len(lines) == 4 and "/data/slot_0/.agent-Ab12C0/config.toml" in lines[0]
    assert lines[1].strip() == "item-0, item-1, item-2"


def test_a_terminal_gets_a_display():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, tally = Terminal(), Tally()
    progress = progress_on(stream)
    progress.begin(2, tally)
    tally.add(record("a"))
    progress.update(tally)
    progress.end(tally)
    assert "1 solved" in stream.getvalue()


def test_a_resumed_run_says_what_was_done_before():
    stream, tally = io.StringIO(), Tally()
    tally.add(record("a"), earlier=True)
    progress_on(stream).begin(4, tally)
    assert stream.getvalue() == "4 rollouts, 1 of them done before\n"
    assert status_line(tally, 4).startswith("1/4 done, 1 solved")


def test_without_rewards_only_what_is_done_is_told():
    tally = Tally()
    tally.add(record("a", reward=None), earlier=True)
    assert status_line(tally, 1) == "1/1 done"


def test_programs_get_lines_of_json():
    stream, tally = io.StringIO(), Tally()
    progress = JsonProgress(stream, every_s=0.0)
    progress.begin(4, tally)
    tally.add(record("a"))
    tally.add(record("b", kind="infra"))
    tally.add(replace(record("c", reward=None), usage=Usage(2, 30, 4, cost=0.25)))
    progress.update(tally)
    progress.end(tally)
    first, middle, last = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["total"], first["finished"], first["left_s"]) == ("begin", 4, 0, None)
    assert (last["event"], last["failures"]) == ("end", {"infra": 1})
    assert (middle["finished"], middle["scored"], middle["solved"], middle["cost"]) == (2, 1, 1, 0.25)
    assert middle["left_s"] is not None
    assert "$0.25" in status_line(tally, 4)


def test_a_run_that_was_done_before_has_nothing_left():
    stream, tally = io.StringIO(), Tally()
    tally.add(record("a"), earlier=True)
    JsonProgress(stream).begin(1, tally)
    assert json.loads(stream.getvalue())["left_s"] == 0.0
    assert status_line(tally, 1) == "1/1 done, 1 solved"


def test_a_reader_that_does_not_read_never_stops_the_run():
    reading, writing = os.pipe()
    try:
        progress, tally = progress_for(f"json:{writing}", io.StringIO()), Tally()
        progress.begin(1, tally)
        for _ in range(2000):  # much more than a pipe holds
            progress.end(tally)
        os.close(reading)
        progress.end(tally)
    finally:
        os.close(writing)


@pytest.mark.parametrize(
    ("form", "error"), [("jsn", UnknownNameError), ("json:x", UsageError), ("json:987", UsageError)]
)
def test_a_form_of_progress_that_is_none(form, error):
    with pytest.raises(error):
        progress_for(form, io.StringIO())
