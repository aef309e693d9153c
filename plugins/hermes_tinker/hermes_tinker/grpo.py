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
    """The outcome of one training step."""

    number: int
    groups: list[Group]
    reward: float | None
    """The mean reward of the rollouts that have one; None if none has."""
    failures: dict[str, int]
    """Number of failed rollouts by `failure_kind`. None of them is trained on."""
    trained: int
    """Number of sequences that were trained on; 0 if the rewards were equal within every group."""
    drift: float | None
    """The largest difference between the sampler's and the trainer's logprob of a token that was trained on; None if no
    token was. If it exceeds rounding errors, the weights changed between sampling and training."""


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
    """Train, and yield each step when it is done. Each step samples from the weights that the step before trained.

    Args:
        groups: number of items of a step.
        size: number of rollouts of each item.
        loss: `importance_sampling`, `ppo` or another loss of Tinker that takes advantages.
        substeps: number of optimizer steps over which the groups of a step are spread.

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
            # Wait for each result: if two requests were queued, SkyRL's server sometimes ran the second one first.
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
    """Return each reward's difference from the mean of its group, in standard deviations."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def datums(groups: Sequence[Group]) -> list[Any]:
    """Return a `tinker.Datum` for each sequence of the groups' scored rollouts, with the rollout's advantage.

    A group whose rewards are all equal is left out, because its advantages are 0.
    """
    data = []
    for group in groups:
        kept = [(each, reward) for each in group.kept if (reward := each.reward) is not None]
        if len({reward for _, reward in kept}) < 2:
            continue
        for (each, _), advantage in zip(kept, advantages([reward for _, reward in kept]), strict=True):
            data += [_datum(sequence, advantage) for sequence in each.sequences]
    return data


def _datum(sequence: TokenSequence, advantage: float) -> Any:
    """Return a sequence in Tinker's form, in which the target of each position is the next token."""
    import numpy as np
    from tinker import Datum, ModelInput

    tokens = np.asarray(sequence.tokens, np.int64)
    sampled = np.asarray(sequence.own)[1:]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": np.where(sampled, np.asarray(sequence.logprobs)[1:], 0.0).astype(np.float32),
            "advantages": np.where(sampled, advantage, 0.0).astype(np.float32),
        },
    )


def _drift(data: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Return the largest difference between the logprobs of the data and the logprobs that the trainer computed."""
    import numpy as np

    def difference(inputs: Any, output: Any) -> float:
        trained = inputs["advantages"].to_numpy() != 0
        return float(np.abs(output["logprobs"].to_numpy() - inputs["logprobs"].to_numpy())[trained].max(initial=0.0))

    return max(difference(each.loss_fn_inputs, output) for each, output in zip(data, outputs, strict=True))
