"""Turns a group of rollouts into groups for Atropos: all of one size, with every sequence once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hermes_core import MASKED, Group, Rolled, TokenSequence, UsageError

_OF_ITEM = ("tokens", "masks", "scores", "messages", "overrides", "inference_logprobs")
"""The fields of a `ScoredDataGroup` that a `ScoredDataItem` has, too."""

NOT_TRAINABLE = "an openai server gives no tokens: nothing here can be trained on"


def make_scored_groups(group: Group) -> list[dict[str, Any]]:
    """Return a group as Atropos' `ScoredDataGroup`s, each with one sequence of every rollout.

    All groups need the registered size: run-api holds back a group of another size until the sizes add up, and trainers
    compare the scores within a group. So the k-th sequences of all rollouts make a group. If a rollout has no k-th
    sequence, the first two tokens of its last one fill the gap, masked, and `overrides` marks them as not trainable.
    """
    parts = max(len(rolled.sequences) for rolled in group.kept) or 1
    return [_make_scored_group(group, part, parts) for part in range(parts)]


def _make_scored_group(group: Group, part: int, parts: int) -> dict[str, Any]:
    rows = [_row(rolled, part) for rolled in group.kept]
    scored: dict[str, Any] = {
        "tokens": [sequence.tokens.tolist() for sequence, _ in rows],
        "masks": [sequence.masks.tolist() for sequence, _ in rows],
        "scores": [rolled.reward for rolled in group.kept],
        "advantages": None,
        "ref_logprobs": None,
        "messages": [rolled.record.messages for rolled in group.kept],
        "overrides": [about for _, about in rows],
        # Never None, because Atropos reads this field without a check.
        "group_overrides": {"group_id": group.group_id, "item_id": group.item_id, "part": part, "parts": parts},
        "images": None,
    }
    if group.kept[0].sequences:
        scored["inference_logprobs"] = [sequence.logprobs.tolist() for sequence, _ in rows]
    return scored


def _row(rolled: Rolled, part: int) -> tuple[TokenSequence, dict[str, Any]]:
    about: dict[str, Any] = {**rolled.notes, "sequence": part, "sequences": len(rolled.sequences)}
    if not rolled.sequences:
        return TokenSequence.of([], [], []), {**about, "trainable": False, "reason": NOT_TRAINABLE}
    if part < len(rolled.sequences):
        return rolled.sequences[part], about
    return _filler(rolled.sequences[-1]), {**about, "trainable": False, "set_advantage_to_zero": True}


def _filler(sequence: TokenSequence) -> TokenSequence:
    """Return the first two tokens of a sequence, masked. Trainers shift by one token, so they need at least two."""
    tokens = sequence.tokens[:2]
    return TokenSequence.of(tokens, [MASKED] * len(tokens), [1.0] * len(tokens))


def make_scored_item(group: Group) -> dict[str, Any]:
    """Return a group of one rollout as Atropos' `ScoredDataItem`.

    Raises:
        UsageError: the rollout has several sequences, but an item holds only one.
    """
    first, *others = make_scored_groups(group)
    if others:
        raise UsageError(
            f"a rollout of item {group.item_id} has {1 + len(others)} sequences, and collect_trajectory gives one",
            hint="use collect_trajectories, which gives them all",
        )
    return {key: first[key][0] for key in _OF_ITEM if key in first}


def longest(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of tokens of the longest sequence of the groups; 0 if there is none."""
    return max((len(tokens) for group in groups for tokens in group["tokens"]), default=0)
