"""What a trainer may train on of a trace. Knows nothing of verifiers but the shape of its traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Branch(NamedTuple):
    """One sequence to train on: three lists of equal length."""

    tokens: list[int]
    mask: list[bool]
    """Whether the token is trained on."""
    logprobs: list[float]
    """The sampler's logprob of a token that the model sampled; 0.0 for others."""


def branches(trace: Any) -> Iterator[Branch]:
    """Yield the branches of a trace, so that every sampled token is trained on once.

    Branches share the nodes before they part. As in prime-rl, these are trained on in the first branch, and are only
    context in the others. A branch in which nothing is left to train on is left out.
    """
    trained: set[int] = set()
    for branch in trace.branches:
        mask = [own and id(node) not in trained for node in branch.nodes for own in node.mask]
        trained.update(id(node) for node in branch.nodes)
        if any(mask):
            yield Branch(branch.token_ids, mask, branch.logprobs)
