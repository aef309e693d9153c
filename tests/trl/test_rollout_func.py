"""`rollout_func` and the rollout worker: the server's own tokens in TRL's trainer, and what becomes of failures."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hermes_trl import HermesSpec

from hermes_core import ConfigError, Group, ModelError, TokenSequence, UsageError, hookimpl
from tests.support.exactness import FORMS, TURNS, check_run, check_share, long_conversations, without_trial
from tests.tiny_model.plans import WildPlans
from tests.tiny_model.token_exactness import TrainedSequence, check_exactness, spans
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


def sizes(*small: str) -> list[Any]:
    """How many groups of four are rolled out with each chat template: 50, and two with the `small` ones for CI."""
    return [*((form, 2) for form in small), *(pytest.param(form, 50, marks=pytest.mark.stress) for form in FORMS)]


class Wild(Notes):
    """Every second rollout of an item has the reward 1, whatever it wrote: each group has something to learn from."""

    @hookimpl
    async def verify_and_score_trajectory(self, item: Mapping[str, Any], exec_tool: Any) -> float:
        self.broken[item["id"]] = self.broken.get(item["id"], 0) + 1
        return float(self.broken[item["id"]] % 2)


def open_wild(served: Served, tokenizer: Any, form: str, groups: int) -> tuple[HermesSpec, list[Group]]:
    """A spec with so many items whose conversations are long, and where its groups are kept. After one round of the
    items, nothing else is rolled out."""
    served.engine.plan = WildPlans(tokenizer, form, TURNS)
    environment = Wild(*[{}] * groups)
    task = environment.format_prompt({"word": "fox"})
    agent = {**served.agent, **long_conversations(tokenizer, form, task, rollouts=4 * groups)}
    spec = HermesSpec(environment, agent=agent, concurrency=32, **ISOLATION)
    kept: list[Group] = []
    left, roll = [groups], spec.run.roll

    async def noted(sizes: Sequence[tuple[str, int]]) -> list[Group]:
        left[0] -= len(sizes)
        if left[0] < 0:
            await asyncio.Event().wait()
        rolled = await roll(sizes)
        kept.extend(rolled)
        return rolled

    spec.run.roll = noted  # type: ignore[method-assign]
    return spec, kept


def summaries_of(groups: Sequence[Group]) -> list[int]:
    """The number of summaries of each rollout."""
    return [sum(turn.compacted for turn in each.record.turns) for group in groups for each in group.kept]


def lists_of(sequence: TokenSequence) -> TrainedSequence:
    """A sequence of a record as one of our own."""
    return TrainedSequence(**sequence.lists())


@pytest.mark.parametrize(("form", "groups"), sizes("chatml"))
def test_the_trainer_gets_the_tokens_that_the_model_sampled(
    served: Served,
    tokenizer: Any,
    new_trainer: Callable[..., Any],
    form: str,
    groups: int,
    record_property: Callable[[str, object], None],
) -> None:
    before = copy.deepcopy(served.model)
    spec, kept = open_wild(served, tokenizer, form, groups)
    batch = {"num_generations": 4, "per_device_train_batch_size": 4, "steps_per_generation": groups}
    with spec:
        trainer, got = train(spec, new_trainer, served.model, config={**batch, "gradient_accumulation_steps": groups})
    rolled = [each for group in kept for each in group.kept]
    assert got["trajectory_id"] == [each.record.trajectory_id for each in rolled]
    # TRL takes one sequence of each rollout. With the others, nothing that was sampled is missing.
    left_out = [
        lists_of(sequence)
        for each in rolled
        for sequence in sorted(each.sequences, key=lambda sequence: -sequence.trained)[1:]
    ]
    rows = sequences(got)
    found = check_run(
        f"TRL's rollout_func, {form}, {len(rows)} sequences in its rows and {len(left_out)} left out",
        before,
        [*rows, *left_out],
        without_trial(served.engine.sampled, tokenizer),
        summaries=summaries_of(kept),
        tell=record_property,
    )
    check_share(summaries_of(kept))
    assert len(rows) == len(rolled) == 4 * groups
    assert found.drawn > 20 * len(rolled)
    assert got["reward"] == [each.reward for each in rolled]
    assert list(trainer._logs["rewards"]["environment_reward"]) == got["reward"]
    assert any(
        bool((old != new).any()) for old, new in zip(before.parameters(), trainer.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("agent", ["program"], indirect=True)
def test_a_step_trains_on_what_was_sampled_for_a_program(
    served: Served, agent: dict[str, Any], tokenizer: Any, new_trainer: Callable[..., Any]
) -> None:
    before = copy.deepcopy(served.model)
    with HermesSpec(Notes(), concurrency=4, **agent) as spec:
        trainer, got = train(spec, new_trainer, served.model)
    rows = sequences(got)
    assert check_exactness(before, rows, without_trial(served.engine.sampled, tokenizer)).problems == []
    assert len(rows) == 4
    assert all(len(list(spans(row.masks))) == 3 for row in rows)
    assert list(trainer._logs["rewards"]["environment_reward"]) == got["reward"]
    assert 0 < sum(got["reward"]) < 4, "nothing to learn from"
    pairs = zip(before.parameters(), trainer.model.parameters(), strict=True)
    assert any(bool((old != new).any()) for old, new in pairs)


KINDS_OF_FAILURE = pytest.mark.parametrize(
    "breaks", ["infra", *(pytest.param(kind, marks=pytest.mark.stress) for kind in ("setup", "verifier"))]
)
"""All kinds are in test_environment.py; these tests differ in what becomes of a rollout that failed."""


@KINDS_OF_FAILURE
def test_a_failed_rollout_is_replaced(served: Served, new_trainer: Callable[..., Any], breaks: str) -> None:
    item = {"breaks": breaks, "times": 3 if breaks == "infra" else 1}
    with HermesSpec(Notes(item), agent=served.agent, concurrency=4, **ISOLATION) as spec:
        _, got = train(spec, new_trainer, served.model)
    assert None not in got["reward"]
    assert got["failure"] == [None] * 4


@KINDS_OF_FAILURE
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
    of_the_endpoint = {"tool_call_parser": None, "temperature": None}
    for agent in (served.agent, {**served.agent, **of_the_endpoint, "tokenizer_name": None, "max_token_length": None}):
        with (
            HermesSpec(Notes(), agent=agent, concurrency=4, **ISOLATION) as spec,
            pytest.raises(ConfigError, match=r"the trainer computes logprobs at 0\.7"),
        ):
            train(spec, new_trainer, served.model, config={"temperature": 0.7})
    with HermesSpec(Notes(), concurrency=4, **ISOLATION) as spec, pytest.raises(UsageError, match="names no model"):
        train(spec, new_trainer, served.model)


# --- the worker for AsyncGRPOTrainer ----------------------------------------------------------------------------------


def taken(worker: Any, count: int) -> list[Any]:
    """That many samples."""
    deadline = time.monotonic() + 120
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


@pytest.mark.parametrize(("form", "groups"), sizes("qwen3"))
def test_all_sequences_of_a_summarised_conversation_are_trained_on(
    served: Served, tokenizer: Any, form: str, groups: int, record_property: Callable[[str, object], None]
) -> None:
    spec, kept = open_wild(served, tokenizer, form, groups)
    with spec:
        worker = spec.rollout_worker(4, groups=8)
        worker.start()
        samples: list[Any] = []
        while len({each.group_id for each in samples}) < groups or len(samples) < sum(map(sequences_in, kept)):
            samples += taken(worker, 1)
        worker.stop()
        assert worker.rollout_buffer.empty()
    summaries = summaries_of(kept)
    check_run(
        f"TRL's rollout worker, {form}",
        served.model,
        map(sequence_of, samples),
        without_trial(served.engine.sampled, tokenizer),
        summaries=summaries,
        tell=record_property,
    )
    check_share(summaries)
    assert len(summaries) == 4 * groups
    # The samples of a group come one after the other, and all of a rollout have its advantage.
    given = [(each.input_ids.tolist(), each.metrics["reward"]) for each in samples]
    assert sorted(given) == sorted(
        (sequence.tokens.tolist(), each.reward) for group in kept for each in group.kept for sequence in each.sequences
    )
    for _, same in itertools.groupby(samples, key=lambda each: (each.group_id, each.metrics["reward"])):
        assert len({each.advantage for each in same}) == 1


def sequences_in(group: Group) -> int:
    return sum(len(each.sequences) for each in group.kept)


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
