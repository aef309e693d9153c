"""GRPO over Tinker's SDK: advantages within each group, then a step of the optimizer on Tinker's servers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_core import Group, TokenSequence
from hermes_tinker.run import TinkerRun


@dataclass(frozen=True)
class Step:
    """What happened in one step."""

    number: int
    groups: list[Group]
    reward: float | None
    """The mean reward of the rollouts that have one; None if none has."""
    failures: dict[str, int]
    """The rollouts that failed, by `failure_kind`. None of them is trained on."""
    trained: int
    """Number of sequences that were trained on; 0 if no group had a difference to learn from."""
    drift: float | None
    """The largest difference between the logprobs of the sampler and those of the trainer, over all tokens that are
    trained on. Only rounding errors, unless the weights were trained in between."""


def grpo(
    run: TinkerRun,
    *,
    steps: int,
    groups: int = 8,
    size: int = 8,
    learning_rate: float = 1e-4,
    loss: str = "importance_sampling",
    substeps: int = 1,
) -> Iterator[Step]:
    """Train, and yield each step when it is done. New weights are used from the next step on.

    Args:
        groups, size: number of items of a step, and of rollouts of each.
        loss: `importance_sampling`, `ppo` or another loss of Tinker that takes advantages.
        substeps: number of steps of the optimizer in which the groups of a step are trained on.

    Raises:
        HermesError: as `TinkerRun.roll` says.
    """
    from tinker import AdamParams

    for number in range(steps):
        rolled = run.roll(groups, size)
        drift, trained = None, 0
        for part in range(substeps):
            data = datums(rolled[part::substeps])
            if not data:
                continue
            # One after the other: of two requests that wait, SkyRL's server has done the second one first.
            outputs = run.training.forward_backward(data, loss).result().loss_fn_outputs
            run.training.optim_step(AdamParams(learning_rate=learning_rate)).result()
            drift = _drift(data, outputs) if drift is None else drift
            trained += len(data)
        if trained:
            run.use_new_weights()
        rewards = [reward for group in rolled for each in group.kept if (reward := each.reward) is not None]
        failures = Counter(each.failure_kind or "" for group in rolled for each in group.failed)
        mean = statistics.fmean(rewards) if rewards else None
        yield Step(number, rolled, mean, dict(failures), trained, drift)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return how much better each reward is than the mean of its group, in standard deviations."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def datums(groups: Sequence[Group]) -> list[Any]:
    """Return the sequences of the groups as `tinker.Datum`s, with the advantages of their rollouts.

    A group without differences has none, nor has a rollout that failed. Each sequence of a rollout is trained on.
    """
    made = []
    for group in groups:
        kept = [(each, reward) for each in group.kept if (reward := each.reward) is not None]
        if len({reward for _, reward in kept}) < 2:
            continue
        for (each, _), advantage in zip(kept, advantages([reward for _, reward in kept]), strict=True):
            made += [_datum(sequence, advantage) for sequence in each.sequences]
    return made


def _datum(sequence: TokenSequence, advantage: float) -> Any:
    """Return a sequence as Tinker takes it: each position has the token that comes after it."""
    import numpy as np
    from tinker import Datum, ModelInput

    tokens = np.asarray(sequence.tokens, np.int64)
    own = np.asarray(sequence.own)[1:]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": np.where(own, np.asarray(sequence.logprobs)[1:], 0.0).astype(np.float32),
            "advantages": np.where(own, advantage, 0.0).astype(np.float32),
        },
    )


def _drift(data: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Return the largest difference between the logprobs that were sent and those that came back."""
    import numpy as np

    def difference(sent: Any, came: Any) -> float:
        own = sent["advantages"].to_numpy() != 0
        return float(np.abs(came["logprobs"].to_numpy() - sent["logprobs"].to_numpy())[own].max(initial=0.0))

    return max(difference(each.loss_fn_inputs, output) for each, output in zip(data, outputs, strict=True))
