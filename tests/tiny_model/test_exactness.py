"""The proof of exactness fails for every way in which training data can be wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine, SampledCompletion
from hermes_testing.tiny_model.folder import make_model

from hermes_core.records.tokens import MASKED
from tests.tiny_model.token_exactness import TrainedSequence, check_exactness

Rollouts = tuple[list[TrainedSequence], list[SampledCompletion]]


@pytest.fixture(scope="module")
def rollouts(tiny: Any) -> Rollouts:
    """Two conversations of three turns, as a careful client would keep them."""
    chance, sequences = random.Random(0), []
    with Engine(tiny.model, stop=()) as engine:
        for _ in range(2):
            tokens: list[int] = []
            masks: list[int] = []
            logprobs: list[float] = []
            for _ in range(3):
                said = [chance.randrange(len(tiny.tokenizer)) for _ in range(10)]
                done = engine.submit(tokens + said, max_tokens=12).result(60)
                tokens += [*said, *done.tokens]
                masks += [*[MASKED] * len(said), *done.tokens]
                logprobs += [*[1.0] * len(said), *done.logprobs]
            sequences.append(TrainedSequence(tokens, masks, logprobs))
        return sequences, list(engine.sampled)


def test_what_was_sampled_is_exact(tiny: Any, rollouts: Rollouts) -> None:
    found = check_exactness(tiny.model, *rollouts)
    assert found.problems == []
    assert (found.sequences, found.trained) == (2, found.drawn)
    assert (found.tokens, found.trained) == (132, 72)
    assert 0 < found.worst <= 1e-5


def changed(sequence: TrainedSequence, name: str, index: int, value: Any) -> TrainedSequence:
    values = [*getattr(sequence, name)]
    values[index] = value(values[index]) if callable(value) else value
    return dataclasses.replace(sequence, **{name: values})


WRONG: dict[str, Callable[[TrainedSequence], TrainedSequence]] = {
    "a token of the prompt": lambda s: changed(s, "tokens", 3, lambda token: token ^ 1),
    "a trained token": lambda s: changed(changed(s, "tokens", 12, 9), "masks", 12, 9),
    "a token and not its mask": lambda s: changed(s, "tokens", 12, lambda token: token ^ 1),
    "a mask and not its token": lambda s: changed(s, "masks", 12, lambda token: token ^ 1),
    "the first token masked": lambda s: changed(s, "masks", 10, MASKED),
    "a token in the middle masked": lambda s: changed(s, "masks", 12, MASKED),
    "a prompt's token trained on": lambda s: changed(s, "masks", 9, s.tokens[9]),
    "the last token masked": lambda s: changed(s, "masks", -1, MASKED),
    "a logprob by a little": lambda s: changed(s, "logprobs", 12, lambda value: value - 1e-9),
    "a logprob by much": lambda s: changed(s, "logprobs", 12, lambda value: value - 0.1),
    "a logprob that is none": lambda s: changed(s, "logprobs", 12, float("nan")),
    "a turn cut off": lambda s: TrainedSequence(s.tokens[:-15], s.masks[:-15], s.logprobs[:-15]),
    "a list too short": lambda s: dataclasses.replace(s, logprobs=s.logprobs[:-1]),
    "all masked": lambda s: dataclasses.replace(s, masks=[MASKED] * len(s.masks)),
    "shifted by one": lambda s: dataclasses.replace(s, logprobs=[*s.logprobs[1:], 1.0]),
}


@pytest.mark.parametrize("how", WRONG)
def test_one_thing_wrong_is_found(tiny: Any, rollouts: Rollouts, how: str) -> None:
    sequences, sampled = rollouts
    assert check_exactness(tiny.model, [sequences[0], WRONG[how](sequences[1])], sampled).problems


def test_a_rollout_left_out_or_given_twice_is_found(tiny: Any, rollouts: Rollouts) -> None:
    sequences, sampled = rollouts
    assert check_exactness(tiny.model, sequences[:1], sampled).problems
    assert check_exactness(tiny.model, [*sequences, sequences[0]], sampled).problems


def test_other_weights_are_found(tiny: Any, rollouts: Rollouts) -> None:
    found = check_exactness(make_model(tiny.tokenizer, seed=1), *rollouts)
    assert len(found.problems) == 6
    assert found.worst > 1e-3
