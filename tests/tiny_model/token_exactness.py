"""Proves that a trainer's sequences are, token for token, what an engine sampled from its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hermes_testing.tiny_model.engine import SampledCompletion

from hermes_core.records.tokens import MASKED

TOLERANCE = 1e-5
"""How far a logprob may be from the recomputed one: only as far as float32 sums in another order differ."""


@dataclass(frozen=True)
class TrainedSequence:
    """One sequence as a trainer gets it: three lists of equal length."""

    tokens: Sequence[int]
    masks: Sequence[int]
    """The token if it is trained on, else -100."""
    logprobs: Sequence[float]
    """The server's logprob if the token is trained on; any value elsewhere."""


@dataclass
class Exactness:
    """What `check_exactness` found."""

    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    """How many tokens are trained on."""
    drawn: int = 0
    """How many of them the model could choose."""
    worst: float = 0.0
    """The largest difference between a logprob and the one recomputed from the weights."""
    problems: list[str] = field(default_factory=list)
    """What is not exact; empty if everything is exact."""


def check_exactness(
    model: Any,
    sequences: Iterable[TrainedSequence],
    sampled: Iterable[SampledCompletion],
    *,
    tolerance: float = TOLERANCE,
) -> Exactness:
    """Compare each sequence with what was sampled, and its logprobs with those computed anew.

    Every stretch of trained tokens has to be one completion, whole, under the very tokens that stand before it; every
    completion has to be trained on exactly once. Logprobs have to be those that the server gave, to the last bit, and
    within `tolerance` those that the model gives to the sequence by itself: with no batch, no padding and no cache.

    Args:
        model: the weights that sampled.
        sampled: all completions of these rollouts (`Engine.sampled`).
    """
    known: dict[_Key, list[SampledCompletion]] = {}
    for each in sampled:
        known.setdefault((each.prompt, each.tokens), []).append(each)
    found = Exactness()
    used: Counter[_Key] = Counter()
    for sequence in sequences:
        used.update(_check_sequence(model, sequence, known, tolerance, found))
    for key, same in known.items():
        if used[key] != len(same):
            prompt, tokens = map(len, key)
            found.problems.append(
                f"{tokens} tokens after {prompt}: sampled {len(same)} times, trained on {used[key]} times"
            )
    return found


_Key = tuple[tuple[int, ...], tuple[int, ...]]


def _check_sequence(
    model: Any,
    sequence: TrainedSequence,
    known: dict[_Key, list[SampledCompletion]],
    tolerance: float,
    found: Exactness,
) -> list[_Key]:
    """Check one sequence, write down what is wrong, and give the completions that it trains on."""
    where = f"sequence {found.sequences}"
    found.sequences += 1
    found.tokens += len(sequence.tokens)
    if not len(sequence.tokens) == len(sequence.masks) == len(sequence.logprobs):
        found.problems.append(f"{where}: its tokens, masks and logprobs are not of one length")
        return []
    tokens, used = tuple(sequence.tokens), []
    passes: dict[float, list[float]] = {}
    for begin, end in spans(sequence.masks):
        place = f"{where}, tokens {begin} to {end}"
        key = (tokens[:begin], tokens[begin:end])
        found.trained += end - begin
        if tuple(sequence.masks[begin:end]) != key[1]:
            found.problems.append(f"{place}: the mask is not the tokens")
        if key not in known:
            found.problems.append(f"{place}: never sampled like this")
            continue
        used.append(key)
        said = tuple(sequence.logprobs[begin:end])
        given = next((each for each in known[key] if each.logprobs == said), None)
        if given is None:
            found.problems.append(f"{place}: the logprobs are not those that the server gave")
        sampled = given or known[key][0]
        found.drawn += sampled.forced.count(False)
        if sampled.temperature not in passes:
            passes[sampled.temperature] = recomputed_logprobs(model, tokens, 1, sampled.temperature)
        anew = passes[sampled.temperature][begin - 1 : end - 1]
        off = [abs(one - other) for one, other in zip(said, anew, strict=True)]
        found.worst = max(found.worst, *off)
        if not all(each <= tolerance for each in off):  # also true for NaN
            found.problems.append(f"{place}: a logprob is {max(off):.2e} from what the weights give")
    if not used:
        found.problems.append(f"{where}: nothing in it can be trained on")
    return used


def recomputed_logprobs(model: Any, tokens: Sequence[int], begin: int, temperature: float = 1.0) -> list[float]:
    """Return the logprobs of `tokens[begin:]`, each given all tokens before it, by one plain pass of the model. What
    comes after its logits is computed in float64.

    Args:
        begin: at least 1, as nothing comes before the first token.
        temperature: 0 means the same as 1.
    """
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, begin - 1 : -1].double()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    given: list[float] = logprobs.gather(1, torch.tensor(tokens[begin:])[:, None])[:, 0].tolist()
    return given


def spans(masks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each stretch of trained tokens begins and ends."""
    marks = pairwise([False, *(mask != MASKED for mask in masks), False])
    edges = [index for index, (before, here) in enumerate(marks) if before != here]
    return zip(edges[::2], edges[1::2], strict=True)
