"""The sequences of a trace to train on. This module relies on the shape of verifiers' traces, and does not import
verifiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Branch(NamedTuple):
    """One sequence to train on: three lists of equal length."""

    tokens: list[int]
    mask: list[bool]
    """Whether the token is trained on."""
    logprobs: list[float]
    """For a token that the model sampled, the sampler's logprob; 0.0 for other tokens."""


def branches(trace: Any) -> Iterator[Branch]:
    """Yield the branches of a trace, with masks by which every sampled token is trained on once.

    Branches share nodes up to the node after which they differ. As in prime-rl, a shared node is trained on in the
    first branch that has it, and is only context in later branches. A branch without a token to train on is left out.
    """
    trained: set[int] = set()
    for branch in trace.branches:
        mask = [sampled and id(node) not in trained for node in branch.nodes for sampled in node.mask]
        trained.update(id(node) for node in branch.nodes)
        if any(mask):
            yield Branch(branch.token_ids, mask, branch.logprobs)
