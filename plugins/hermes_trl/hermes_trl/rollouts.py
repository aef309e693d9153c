"""Token-exact groups as columns for `rollout_func`: token ids, logprobs and a mask for each rollout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_core import Group, Rolled, TokenSequence, UsageError, check_temperature
from hermes_trl.environment import item_of
from hermes_trl.run import TrlRun


def rollout_columns(run: TrlRun, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: Any) -> dict[str, list[Any]]:
    """Roll out a batch of prompts, in which the copies of one prompt are a group; see `HermesSpec.rollout_func`.

    Returns:
        Columns with one entry for each prompt: `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1 for a token
        that the model sampled), and for the reward functions `reward`, `failure` and the keys of `Rolled.notes`. A
        rollout that failed has no reward, and a single token with the mask 0.
    """
    check_exact(run, trainer.args.temperature)
    sizes = [(item_id, len([*copies])) for item_id, copies in itertools.groupby(map(item_of, prompts))]
    groups = run.call(run.roll(sizes))
    rows = [row for group in groups for row in _rows(group, trainer.processing_class.eos_token_id)]
    return {key: [row[key] for row in rows] for key in rows[0]}


def check_exact(run: TrlRun, temperature: float) -> None:
    """Check that the rollouts keep their tokens, and that the tokens are sampled at the trainer's temperature.

    Raises:
        UsageError: the spec has no agent.
        ConfigError: as `check_temperature` says.
    """
    if not run.exact:
        raise UsageError(
            "the spec names no model, and rollout_func samples by itself",
            hint="give HermesSpec agent={'base_url': …, 'tokenizer_name': …}, or use environment_factory",
        )
    check_temperature(run.session, temperature)


def ids_and_mask(sequence: TokenSequence) -> tuple[list[int], list[int], list[float]]:
    """Return three lists of equal length: the token ids, a mask with 1 for each token that the model sampled, and the
    logprobs, which are 0.0 where the mask is 0."""
    mask = [int(sampled) for sampled in sequence.own]
    return sequence.tokens.tolist(), mask, [bit * logprob for bit, logprob in zip(mask, sequence.logprobs, strict=True)]


def _rows(group: Group, filler: int) -> Iterator[dict[str, Any]]:
    """Yield as many rows as the group has prompts, because TRL refuses a batch of another size."""
    for rolled in group.kept:
        yield _row(rolled)
    for rolled in group.failed[-(group.size - len(group.kept)) :] if not group.whole else ():
        missing = {"prompt_ids": [filler], "completion_ids": [filler], "logprobs": [0.0], "env_mask": [0]}
        yield {**missing, "reward": None, "failure": rolled.refused, **rolled.notes}


def _row(rolled: Rolled) -> dict[str, Any]:
    # TRL takes one sequence for each prompt. A conversation whose past was edited has several: train on the longest.
    tokens, mask, logprobs = ids_and_mask(max(rolled.sequences, key=lambda each: each.trained))
    begin = mask.index(1)
    return {
        "prompt_ids": tokens[:begin],
        "completion_ids": tokens[begin:],
        "logprobs": logprobs[begin:],
        "env_mask": mask[begin:],
        "reward": rolled.reward,
        "failure": None,
        **rolled.notes,
    }
