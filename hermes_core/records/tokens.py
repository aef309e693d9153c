"""The tokens of a trajectory, as a token-exact server recorded them, and checks that they can be trained on."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import core_schema

from hermes_core.agents.base import MASKED

__all__ = ["MASKED", "SPELT", "TokenSequence", "Tokens", "tokens_of"]

SPELT = "a secret was removed from the messages, and the tokens spell it"
"""Why the tokens of a conversation with a secret are left out: without the secret, they would not be exact."""


@dataclass(frozen=True)
class TokenSequence:
    """Three arrays of one length, not shifted: token ids; masks (the token id if the model wrote it, else -100);
    logprobs.

    Arrays take a tenth of the memory of lists, which matters while a rollout waits for the others of its group.
    """

    tokens: array[int]
    masks: array[int]
    logprobs: array[float]

    @classmethod
    def of(cls, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float]) -> TokenSequence:
        """Return a sequence made from any three sequences. Raise TypeError, ValueError or OverflowError for invalid
        numbers."""
        return cls(array("i", tokens), array("i", masks), array("d", logprobs))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Let pydantic read a sequence from a mapping with the three lists."""
        return core_schema.no_info_plain_validator_function(lambda lists: cls.of(**lists))

    @property
    def own(self) -> list[bool]:
        """Return for each token whether the model wrote it."""
        return [mask != MASKED for mask in self.masks]

    @property
    def trained(self) -> int:
        """Return the number of tokens that the model wrote."""
        return len(self.masks) - self.masks.count(MASKED)

    def lists(self) -> dict[str, list[Any]]:
        """Return the arrays as lists, for JSON."""
        return {"tokens": self.tokens.tolist(), "masks": self.masks.tolist(), "logprobs": self.logprobs.tolist()}


@dataclass(frozen=True)
class Tokens:
    """The sequences of one trajectory; or the reason why there are none."""

    sequences: tuple[TokenSequence, ...] = ()
    """One sequence for each sampled path of the conversation: several if the agent left a part of it behind. An answer
    that is in several sequences is trained on in only one of them."""
    refused: str | None = None
    """The reason why the server's tokens can't be trained on; None if they can be, or if the server kept none."""
    forks: Mapping[str, int] = field(default_factory=dict)
    """Number of requests that left a part of the conversation behind, by cause
    (`hermes_core.agents.exact.token_tree.Step`)."""

    @property
    def only(self) -> TokenSequence | None:
        """Return the sequence of a trajectory with exactly one sequence; else None."""
        return self.sequences[0] if len(self.sequences) == 1 else None


def tokens_of(managed_state: Mapping[str, Any] | None) -> Tokens:
    """Check and return the tokens that the server recorded. Tokens are never reconstructed from text.

    Args:
        managed_state: `AgentResult.managed_state`. Each of its `nodes` has `tokens`, `masked_tokens` (the token if the
            model wrote it, else -100) and `logprobs`. A node with `turns`, such as one from
            `hermes_core.agents.exact.agent`, is also checked against the tokens that the server sampled; this needs
            `end_tokens` in the state. A node is left out if its `metadata` says that it is not the agent's `own`
            conversation.
    """
    if managed_state is None:
        return Tokens()
    forks = dict(managed_state.get("forks") or {})
    return replace(_own_sequences(managed_state), forks=forks)


def _own_sequences(managed_state: Mapping[str, Any]) -> Tokens:
    nodes = managed_state.get("nodes")
    if not isinstance(nodes, Sequence) or not nodes:
        return Tokens(refused="the server kept no sequence for this conversation")
    sequences = []
    nodes = [node for node in nodes if _is_own(node)]
    if not nodes:
        return Tokens(refused="no conversation begins with the text of the task")
    for number, node in enumerate(nodes):
        fields = [_field(node, name) for name in ("tokens", "masked_tokens", "logprobs")]
        try:
            sequence = TokenSequence.of(*fields)
            reason = _refuse(sequence) or _find_change(node, sequence, managed_state)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"its tokens, masks and logprobs are not all numbers: {error}"
        if reason is not None:
            return Tokens(refused=f"sequence {number}: {reason}" if len(nodes) > 1 else reason)
        sequences.append(sequence)
    return Tokens(tuple(sequences))


def _is_own(node: Any) -> bool:
    metadata = node.get("metadata") if isinstance(node, Mapping) else getattr(node, "metadata", None)
    return not isinstance(metadata, Mapping) or bool(metadata.get("own", True))


def _field(node: Any, name: str) -> Sequence[Any]:
    value = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
    return value if isinstance(value, Sequence) else ()


def _refuse(sequence: TokenSequence) -> str | None:
    """Return the reason why the sequence can't be trained on, or None."""
    tokens, masks, logprobs = sequence.tokens, sequence.masks, sequence.logprobs
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


def _has_two_ends(last: int, following: int, end_tokens: Collection[int]) -> bool:
    """Return whether an answer is ended twice: its last token and the next one are the same, or both only end answers.

    If an answer does not end with an end token, the text after it begins with one. So two in a row are one too many.
    """
    return last == following or (last in end_tokens and following in end_tokens)


def _find_change(node: Any, sequence: TokenSequence, state: Mapping[str, Any]) -> str | None:
    """Compare the sequence, turn by turn, with the tokens that were requested and sampled. Return a text on the first
    difference, or None. Without turns, nothing is checked."""
    turns = _field(node, "turns")
    if not turns:
        return None
    tokens, masks = sequence.tokens, sequence.masks
    end_tokens: Collection[int] = state.get("end_tokens", ())
    expected = array("i", [MASKED]) * len(tokens)
    whole, checked, checksum = memoryview(tokens), 0, 0
    for number, turn in enumerate(turns, 1):
        checksum = zlib.crc32(whole[checked : turn.start], checksum)
        checked = turn.start
        if tokens[turn.start : turn.stop] != turn.sampled:
            return f"the tokens of answer {number} are not those that the server sampled"
        if checksum != turn.prompt_checksum:
            return f"the tokens before answer {number} are not those that the server was asked with"
        if turn.stop < len(tokens) and _has_two_ends(tokens[turn.stop - 1], tokens[turn.stop], end_tokens):
            return f"answer {number} ends with two end tokens"
        expected[turn.start : turn.stop] = turn.sampled
    if masks != expected:
        place = next(index for index, mask in enumerate(masks) if mask != expected[index])
        return f"mask {place} is {masks[place]}, and should be {expected[place]}"
    return None
