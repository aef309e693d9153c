"""`rollout_func` and the rollout worker: the server's own tokens in TRL's trainer, and what becomes of failures."""

from __future__ import annotations

import copy
import math
import queue
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hermes_trl import HermesSpec

from hermes_core import ConfigError, ModelError, UsageError
from hermes_core.agents.compaction import REQUEST
from hermes_core.testing.tiny_model.engine import Plan
from hermes_core.testing.tiny_model.exactness import TrainedSequence, check_exactness
from hermes_core.testing.tiny_model.plans import Gap, letters, make_plan
from tests.trl.conftest import ISOLATION, Notes, Served

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_extra", "offline", "leak_check")]


Columns = dict[str, list[Any]]


def train(
    spec: HermesSpec, new_trainer: Callable[..., Any], model: Any, **given: Any
) -> tuple[Any, dict[str, list[Any]]]:
    """Train one step. Return the trainer, and what it was given."""
    columns: list[Columns] = []

    def rollout_func(prompts: Any, trainer: Any) -> Columns:
        columns.append(spec.rollout_func(prompts, trainer))
        return dict(columns[-1])

    trainer = new_trainer(
        model, train_dataset=spec.train_dataset, rollout_func=rollout_func, reward_funcs=spec.reward_funcs, **given
    )
    trainer.train()
    (got,) = columns
    return trainer, got


def sequences(columns: Columns) -> list[TrainedSequence]:
    """The rows as sequences of our own."""
    rows = zip(*(columns[key] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True)
    return [
        TrainedSequence(
            [*prompt, *ids],
            [*[-100] * len(prompt), *(token if own else -100 for token, own in zip(ids, mask, strict=True))],
            [*[1.0] * len(prompt), *logprobs],
        )
        for prompt, ids, mask, logprobs in rows
        if any(mask)
    ]


@pytest.mark.parametrize("rollouts", [8, pytest.param(200, marks=pytest.mark.stress)])
def test_the_trainer_gets_the_tokens_that_the_model_sampled(
    served: Served, new_trainer: Callable[..., Any], rollouts: int
) -> None:
    before = copy.deepcopy(served.model)
    with HermesSpec(Notes(), agent=served.agent, concurrency=8, **ISOLATION) as spec:
        trainer, got = train(spec, new_trainer, served.model, rollouts=rollouts)
    # Before the first rollout, the endpoint was tried out with short prompts.
    sampled = [each for each in served.engine.sampled if len(each.prompt) > 100]
    exact = check_exactness(before, sequences(got), sampled)
    assert not exact.problems
    assert exact.sequences == rollouts
    assert exact.drawn > 5 * rollouts
    assert exact.worst < 1e-5
    wrote = ["echo fox" in served_text(trainer, ids) for ids in got["completion_ids"]]
    assert got["reward"] == [float(each) for each in wrote]
    assert list(trainer._logs["rewards"]["environment_reward"]) == got["reward"]
    assert any(
        bool((old != new).any()) for old, new in zip(before.parameters(), trainer.model.parameters(), strict=True)
    )


def served_text(trainer: Any, ids: Sequence[int]) -> str:
    return str(trainer.processing_class.decode(ids))


@pytest.mark.parametrize("breaks", ["infra", "setup", "verifier"])
def test_a_failed_rollout_is_replaced(served: Served, new_trainer: Callable[..., Any], breaks: str) -> None:
    item = {"breaks": breaks, "times": 3 if breaks == "infra" else 1}
    with HermesSpec(Notes(item), agent=served.agent, concurrency=4, **ISOLATION) as spec:
        _, got = train(spec, new_trainer, served.model)
    assert None not in got["reward"]
    assert got["failure"] == [None] * 4


@pytest.mark.parametrize("breaks", ["infra", "setup", "verifier"])
def test_what_is_missing_in_a_group_moves_nothing(served: Served, new_trainer: Callable[..., Any], breaks: str) -> None:
    item = {"breaks": breaks, "times": 1}
    with HermesSpec(Notes(item), agent=served.agent, concurrency=4, refills=0, infra_retries=0, **ISOLATION) as spec:
        trainer, got = train(spec, new_trainer, served.model)
    assert [reward is None for reward in got["reward"]] == [False, False, False, True]
    assert got["failure"][3].startswith(f"{breaks}: ")
    assert sum(got["env_mask"][3]) == 0
    assert trainer._logs["advantages"][3] == 0.0
    assert math.isnan(trainer._logs["rewards"]["environment_reward"][3])
    assert sum([*trainer._logs["advantages"]][:3]) == pytest.approx(0.0, abs=1e-4)


def test_a_batch_that_failed_as_a_whole_moves_nothing(served: Served, new_trainer: Callable[..., Any]) -> None:
    before = copy.deepcopy(served.model)
    with HermesSpec(Notes({"breaks": "setup"}), agent=served.agent, concurrency=4, **ISOLATION) as spec:
        trainer, got = train(spec, new_trainer, served.model, config={"beta": 0.0})
    assert got["reward"] == [None] * 4
    assert all(
        bool((old == new).all()) for old, new in zip(before.parameters(), trainer.model.parameters(), strict=True)
    )


def test_a_server_that_is_gone_ends_the_training(served: Served, new_trainer: Callable[..., Any]) -> None:
    with HermesSpec(Notes(), agent=served.agent, concurrency=4, **ISOLATION) as spec:
        served.stop()
        with pytest.raises(ModelError):
            train(spec, new_trainer, served.model)


def test_another_temperature_and_a_spec_without_a_model_are_refused(
    served: Served, new_trainer: Callable[..., Any]
) -> None:
    with (
        HermesSpec(Notes(), agent=served.agent, concurrency=4, **ISOLATION) as spec,
        pytest.raises(ConfigError, match="temperature"),
    ):
        train(spec, new_trainer, served.model, config={"temperature": 0.7})
    with HermesSpec(Notes(), concurrency=4, **ISOLATION) as spec, pytest.raises(UsageError, match="names no model"):
        train(spec, new_trainer, served.model)


# --- the worker for AsyncGRPOTrainer ----------------------------------------------------------------------------------


def taken(worker: Any, count: int) -> list[Any]:
    """That many samples."""
    deadline = time.monotonic() + 60
    samples: list[Any] = []
    while len(samples) < count:
        worker.check_health(60)
        assert time.monotonic() < deadline
        try:
            samples.append(worker.rollout_buffer.get(timeout=0.2))
        except queue.Empty:
            continue
    return samples


def sequence_of(sample: Any) -> TrainedSequence:
    """A sample as a sequence of our own."""
    masks = [int(token) if own else -100 for token, own in zip(sample.input_ids, sample.completion_mask, strict=True)]
    return TrainedSequence(sample.input_ids.tolist(), masks, sample.old_log_probs.tolist())


def test_all_sequences_of_a_summarised_conversation_are_trained_on(served: Served, tokenizer: Any) -> None:
    said, drawn = served.engine.plan, Gap(3, letters(tokenizer))
    assert said is not None

    def summarises(prompt: Sequence[int], chance: random.Random) -> Plan:
        asked = REQUEST in tokenizer.decode(prompt)
        return make_plan(tokenizer, ["I wrote it. ", drawn]) if asked else said(prompt, chance)

    with HermesSpec(Notes(), agent=served.agent, concurrency=2, **ISOLATION) as spec:
        (group,) = spec.run.call(spec.run.roll([("0", 1)]))
    (turn, *_) = group.kept[0].record.turns
    served.engine.plan = summarises
    agent = {**served.agent, "compact_at": turn.prompt_tokens + 1}
    with HermesSpec(Notes(), agent=agent, concurrency=4, **ISOLATION) as spec:
        worker = spec.rollout_worker(4, groups=1)
        worker.start()
        samples = taken(worker, 8)
        worker.stop()
    exact = check_exactness(served.model, map(sequence_of, samples), served.engine.sampled)
    assert exact.worst <= 1e-5
    assert not [problem for problem in exact.problems if "never sampled" in problem]
    assert [sum(mask) > 0 for mask in (each.completion_mask for each in samples)] == [True] * 8
    begun = ["I wrote it. " in tokenizer.decode(each.input_ids) for each in samples]
    ended = ["Done " in tokenizer.decode(each.input_ids) for each in samples]
    assert begun == [True] * 8
    assert ended == [False, True] * 4, (
        "each rollout has the sequence with its summary, and the one that goes on from it"
    )
    for before, after in zip(samples[::2], samples[1::2], strict=True):
        assert before.advantage == after.advantage


def test_the_worker_gives_groups_for_as_long_as_it_is_asked(served: Served) -> None:
    with HermesSpec(Notes({}, {"breaks": "setup"}), agent=served.agent, refills=0, concurrency=8, **ISOLATION) as spec:
        worker = spec.rollout_worker(4, groups=2, queue_size=8)
        worker.start()
        first = taken(worker, 4)
        worker.update_model_version(7)
        later = taken(worker, 24)
        assert check_exactness(served.model, map(sequence_of, first), served.engine.sampled).worst <= 1e-5
        time.sleep(1.0)
        assert worker.rollout_buffer.qsize() <= 8 + 2 * 4, "it does not wait for the trainer"
        worker.stop()
        worker.stop()
    assert {each.model_version for each in first} == {0}
    assert later[-1].model_version == 7
    groups: dict[int, list[Any]] = {}
    for each in [*first, *later]:
        groups.setdefault(each.group_id, []).append(each)
    whole = [group for group in groups.values() if len(group) == 4]
    assert whole
    for group in whole:
        assert sum(each.advantage for each in group) == pytest.approx(0.0, abs=1e-3)
        assert all(each.metrics["reward"] in (0.0, 1.0) for each in group)


def test_a_worker_whose_server_is_gone_is_not_healthy(served: Served) -> None:
    with HermesSpec(Notes(), agent=served.agent, concurrency=4, **ISOLATION) as spec:
        worker = spec.rollout_worker(4, groups=1)
        worker.start()
        taken(worker, 4)
        served.stop()
        deadline = time.monotonic() + 60
        with pytest.raises(RuntimeError, match="the rollouts ended"):
            while time.monotonic() < deadline:
                worker.check_health(60)
                time.sleep(0.1)


def test_a_worker_whose_groups_all_fail_is_not_healthy(served: Served) -> None:
    with HermesSpec(Notes({"breaks": "setup"}), agent=served.agent, refills=0, concurrency=4, **ISOLATION) as spec:
        worker = spec.rollout_worker(4, groups=1)
        worker.start()
        deadline = time.monotonic() + 60
        with pytest.raises(RuntimeError, match=r"no group could be trained on .*no such dataset"):
            while time.monotonic() < deadline:
                worker.check_health(1.0)
                time.sleep(0.1)
        worker.stop()


def test_a_worker_whose_rollouts_take_long_is_healthy(served: Served) -> None:
    environment = Notes()
    environment.hanging = 4
    with HermesSpec(environment, agent=served.agent, concurrency=4, **ISOLATION) as spec:
        worker = spec.rollout_worker(4, groups=1)
        worker.start()
        until = time.monotonic() + 8
        while time.monotonic() < until:
            worker.check_health(3.0)
            time.sleep(0.2)
        assert worker.rollout_buffer.empty()
        worker.stop()
