"""GRPO in one page: groups of rollouts in, one step of the optimizer out."""

from dataclasses import dataclass

import torch

MASKED = -100
CLIP = 0.2
KL = 0.1
"""How firmly the policy is held near the warmed-up one, which knows how calls are written."""


@dataclass
class Rollout:
    """One sequence of a group, as Atropos sends it."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    """The server's, from when each token was sampled."""
    score: float


def advantages(scores):
    """How much better each rollout is than its group, in standard deviations; 0 for all where all are alike."""
    scores = torch.tensor(scores)
    return ((scores - scores.mean()) / (scores.std() + 1e-4)).tolist()


def padded(rows, fill):
    """Rows as one tensor, filled up on the right: a causal model never looks there."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def trained_logprobs(model, ids, trained):
    """The logprobs of the tokens at `trained`, each under all that stands before it; flat."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    logits = model.lm_head(hidden[trained[:, 1:]])
    return torch.log_softmax(logits.float(), -1).gather(1, ids[trained][:, None])[:, 0]


def step(model, reference, optimizer, groups):
    """One step on groups of rollouts, held near `reference`. Gives the largest change of a logprob since sampling."""
    judged = [pair for group in groups for pair in zip(group, advantages([each.score for each in group]), strict=True)]
    ids = padded([rollout.tokens for rollout, _ in judged], 0)
    trained = padded([rollout.masks for rollout, _ in judged], MASKED) != MASKED
    sampled = padded([rollout.logprobs for rollout, _ in judged], 0.0)[trained]
    advantage = torch.tensor([advantage for _, advantage in judged])[:, None].expand_as(ids)[trained]
    with torch.no_grad():
        held = trained_logprobs(reference, ids, trained)
    now = trained_logprobs(model, ids, trained)
    ratio = (now - sampled).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    away = (held - now).clamp(max=10)
    divergence = away.exp() - away - 1  # never negative, and the Kullback-Leibler divergence in the mean
    optimizer.zero_grad()
    ((KL * divergence - gain).sum() / len(judged)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (now - sampled).abs().max().item()
