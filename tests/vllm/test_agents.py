"""Coding agents in slots without a network, their model a real vLLM: what they are trained on is what it has sampled.

.venv-vllm/bin/python -m pytest -n 0 -m stress tests/vllm/test_agents.py
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.coding_agents.conftest import indexes  # noqa: F401
from tests.coding_agents.test_exact_agents import CONTINUED, LEAVES_OUT, chat_template, recorded
from tests.coding_agents.test_real_agents import END, TOOLS
from tests.support.exactness import without_trial
from tests.support.token_server import differences
from tests.tiny_model.token_exactness import TrainedSequence, spans
from tests.vllm.conftest import Server
from tests.vllm.test_vllm import TOLERANCE
from tests.vllm.writer import CONTEXT, make_writer


@pytest.mark.stress
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("agent", ["codex", "pi", "claude-code", "mini-swe-agent", "kimi-code", "hermes"])
async def test_an_agent_is_trained_on_what_a_real_server_sampled(
    vllm_extra: None,
    isolates: None,
    indexes: None,  # noqa: F811
    tmp_path: Path,
    agent: str,
    record_property: Callable[[str, object], None],
) -> None:
    rollouts = 200
    tokenizer, weights = make_writer(tmp_path / "model", TOOLS[agent], END.get(agent))
    server = Server(tmp_path / "model", tmp_path)
    try:
        await server.start("--max-model-len", str(CONTEXT))
        began = time.monotonic()
        settings = {
            "model": server.model,
            "base_url": server.base_url,
            "chat_template": chat_template(tokenizer),
            "tool_call_parser": "auto",
            "max_tokens": 300,
            "max_turns": 8,
        }
        records = await recorded(tmp_path, agent, rollouts, settings, concurrency=4)
        seconds = time.monotonic() - began
    finally:
        server.kill()
    assert [record["failure"] for record in records] == [None] * rollouts
    sampled = without_trial(server.sampled(), tokenizer)
    trained = [TrainedSequence(**lists) for record in records for lists in record["sequences"]]
    found = differences(trained, sampled)
    continued = sum(record["program"]["requests"].get("continues", 0) for record in records)
    share = continued / (len(sampled) - rollouts)
    forks = sum((Counter(record.get("forks") or {}) for record in records), Counter[str]())
    calls = sum(len(record["calls"]) for record in records)
    worst = max(deviations(weights, trained))
    record_property(
        "figure",
        f"{agent} with vLLM: {rollouts} trajectories of {len(sampled)} answers and {calls} calls in {seconds:.0f} s: "
        f"{sum(len(each.tokens) for each in trained)} tokens, {sum(len(each.tokens) for each in sampled)} of them "
        f"sampled; {len(found)} differences from the server's own record; logprobs within {worst:.1e} of those of the "
        f"weights; {share:.1%} of the requests after the first went on from a known path; forks: {dict(forks) or 0}",
    )
    assert found == []
    assert calls > rollouts
    assert worst <= TOLERANCE
    assert share >= LEAVES_OUT.get(agent, CONTINUED)


def deviations(weights: Any, sequences: Sequence[TrainedSequence]) -> Iterator[float]:
    """How far each logprob is from the one that the weights give. What two sequences in a row begin with is computed
    once: in order, those of one slot follow each other, and an agent tells its model where it works."""
    import torch
    from transformers import DynamicCache

    cache, before = DynamicCache(), tuple[int, ...]()
    for tokens, each in sorted(((tuple(each.tokens), each) for each in sequences), key=lambda pair: pair[0]):
        same = sum(1 for _ in itertools.takewhile(bool, map(int.__eq__, before, tokens)))
        begin = min(same, next(spans(each.masks))[0] - 1)
        if begin < len(before):
            cache.crop(begin - len(before))
        with torch.inference_mode():
            logits = weights(torch.tensor([tokens[begin:]]), past_key_values=cache, use_cache=True).logits[0]
            logprobs = torch.log_softmax(logits.double(), -1)
        before = tokens
        for place in itertools.chain.from_iterable(itertools.starmap(range, spans(each.masks))):
            yield abs(each.logprobs[place] - float(logprobs[place - begin - 1, tokens[place]]))
