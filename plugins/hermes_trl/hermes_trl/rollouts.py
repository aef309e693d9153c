"""Groups of the exact loop in the form that `rollout_func` returns: token ids, logprobs and a mask for each rollout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_core import ConfigError, Group, Rolled, TokenSequence, UsageError
from hermes_trl.environment import item_of
from hermes_trl.run import TrlRun


def rollout_columns(run: TrlRun, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: Any) -> dict[str, list[Any]]:
    """Roll out a batch of prompts, in which the copies of one prompt are a group; see `HermesSpec.rollout_func`.

    Returns:
        For each prompt `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1 for a token that the model wrote),
        and for the reward functions `reward`, `failure` and `Rolled.notes`. A rollout that failed has no reward, and
        one token with the mask 0.
    """
    check_exact(run, trainer.args.temperature)
    sizes = [(item_id, len([*same])) for item_id, same in itertools.groupby(map(item_of, prompts))]
    groups = run.call(run.roll(sizes))
    rows = [row for group in groups for row in _rows(group, trainer.processing_class.eos_token_id)]
    return {key: [row[key] for row in rows] for key in rows[0]}


def check_exact(run: TrlRun, temperature: float) -> None:
    """Check that the rollouts keep tokens, sampled at the trainer's temperature.

    Raises:
        UsageError: the spec has no agent.
        ConfigError: the temperatures differ: the trainer would compute other logprobs.
    """
    if not run.exact:
        raise UsageError(
            "the spec names no model, and rollout_func samples by itself",
            hint="give HermesSpec agent={'base_url': …, 'tokenizer_name': …}, or use environment_factory",
        )
    settings = run.session.settings
    if settings is not None and settings.temperature != temperature:
        raise ConfigError(
            f"the agent samples at temperature {settings.temperature:g}, and the trainer computes logprobs at "
            f"{temperature:g}",
            hint="set both to the same: agent={'temperature': …} and temperature of the trainer's config",
        )


def ids_and_mask(sequence: TokenSequence) -> tuple[list[int], list[int], list[float]]:
    """Return the tokens of a sequence, 1 for each that the model wrote and else 0, and the logprobs, 0.0 for others."""
    mask = [int(own) for own in sequence.own]
    return sequence.tokens.tolist(), mask, [own * each for own, each in zip(mask, sequence.logprobs, strict=True)]


def _rows(group: Group, filler: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each rollout that the group should have."""
    for rolled in group.kept:
        yield _row(rolled)
    for rolled in group.failed[-(group.size - len(group.kept)) :] if not group.whole else ():
        missing = {"prompt_ids": [filler], "completion_ids": [filler], "logprobs": [0.0], "env_mask": [0]}
        yield {**missing, "reward": None, "failure": rolled.refused, **rolled.notes}


def _row(rolled: Rolled) -> dict[str, Any]:
    # TRL has room for one sequence. If the conversation's past was changed, there are several: the largest is taken.
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
