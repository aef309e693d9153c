"""The tokens of a trajectory, from the record of a token-exact server, and the check that they can be trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MASKED = -100
"""The mask of a token that the model did not write."""


@dataclass(frozen=True)
class Tokens:
    """Three lists of one length, as a record carries them; or the reason why there are none."""

    tokens: list[int] | None = None
    masks: list[int] | None = None
    logprobs: list[float] | None = None
    refused: str | None = None
    """Why what the server kept can't be trained on; None if it can, or if it kept nothing."""


def tokens_of(managed_state: Mapping[str, Any] | None) -> Tokens:
    """The server's tokens as they are, never made again from text.

    Args:
        managed_state: `AgentResult.managed_state`: its `nodes` each have `tokens`, `masked_tokens` (the token where the
            model wrote it, else -100) and `logprobs`.
    """
    if managed_state is None:
        return Tokens()
    nodes = managed_state.get("nodes")
    if not isinstance(nodes, Sequence) or len(nodes) != 1:
        count = len(nodes) if isinstance(nodes, Sequence) else 0
        return Tokens(refused=f"the server kept {count} sequences for one conversation, not 1")
    tokens, masks, logprobs = (list(_field(nodes[0], name)) for name in ("tokens", "masked_tokens", "logprobs"))
    reason = _refuse(tokens, masks, logprobs)
    return Tokens(refused=reason) if reason else Tokens(tokens, masks, logprobs)


def _field(node: Any, name: str) -> Sequence[Any]:
    value = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
    return value if isinstance(value, Sequence) else ()


def _refuse(tokens: list[int], masks: list[int], logprobs: list[float]) -> str | None:
    """Why these can't be trained on, or None."""
    if not tokens or not len(tokens) == len(masks) == len(logprobs):
        return f"{len(tokens)} tokens, {len(masks)} masks and {len(logprobs)} logprobs are not one sequence"
    written = [index for index, mask in enumerate(masks) if mask != MASKED]
    if not written:
        return "no token is the model's"
    for index in written:
        if masks[index] != tokens[index]:
            return f"mask {index} is {masks[index]}, and the token there is {tokens[index]}"
        if not (math.isfinite(logprobs[index]) and logprobs[index] <= 0):
            return f"the logprob of token {index} is {logprobs[index]}"
    return None
