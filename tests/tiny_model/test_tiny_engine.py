"""The engine: the tokens it says are those it drew, with the logprobs of the weights that it drew them from."""

from __future__ import annotations

import math
import queue
from collections import Counter
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model

from hermes_core.errors import UsageError
from tests.tiny_model.plans import Gap, letters, make_plan, ordinary
from tests.tiny_model.token_exactness import TOLERANCE, recomputed_logprobs


def worst(model: Any, sampled: Any) -> float:
    """How far its logprobs are from those computed anew."""
    anew = recomputed_logprobs(model, sampled.prompt + sampled.tokens, len(sampled.prompt), sampled.temperature)
    return max(abs(one - other) for one, other in zip(sampled.logprobs, anew, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_logprobs_are_those_of_each_sequence_by_itself(tiny: Any, temperature: float) -> None:
    with Engine(tiny.model) as engine:
        prompts = [list(range(5, 5 + length)) for length in (1, 3, 200, 40, 7)]
        asked = [engine.submit(prompt, max_tokens=30, temperature=temperature) for prompt in prompts]
        done = [each.result(60) for each in asked]
    assert [list(each.prompt) for each in done] == prompts
    assert max(worst(tiny.model, each) for each in done) <= TOLERANCE
    assert not any(any(each.forced) for each in done)


def test_tokens_are_drawn_as_often_as_their_logprobs_say(tiny: Any) -> None:
    draws = 4000
    with Engine(tiny.model, max_batch=500) as engine:
        asked = [engine.submit([7, 8, 9], max_tokens=1, temperature=0.5) for _ in range(draws)]
        done = [each.result(60) for each in asked]
    said = {each.tokens[0]: math.exp(each.logprobs[0]) for each in done}
    seen = Counter(each.tokens[0] for each in done)
    common = [token for token, chance in said.items() if chance * draws >= 5]
    chi_square = sum((seen[token] - said[token] * draws) ** 2 / (said[token] * draws) for token in common)
    assert len(common) > 100
    assert chi_square < len(common) + 6 * math.sqrt(2 * len(common))


def test_a_completion_ends_with_the_end_of_turn_or_at_its_limit(tiny: Any) -> None:
    end = tiny.tokenizer.eos_token_id
    with Engine(tiny.model, plan=lambda prompt, rng: [(5,)] * (prompt[0] - 1) + [(end,)]) as engine:
        short, long = engine.submit([3], max_tokens=8), engine.submit([20], max_tokens=8)
        assert short.result(60).tokens == (5, 5, end)
        assert short.result().finish_reason == "stop"
        assert long.result(60).tokens == (5,) * 8
        assert long.result().finish_reason == "length"


def test_a_plan_narrows_what_is_drawn_and_not_the_logprobs(tiny: Any) -> None:
    words, cuts = letters(tiny.tokenizer), []

    def plan(prompt: Any, rng: Any) -> Any:
        cuts.append(make_plan(tiny.tokenizer, ["<tool_call>\nrm ", Gap(4, words), "\n"], rng))
        return cuts[-1]

    with Engine(tiny.model, plan=plan) as engine:
        done = [each.result(60) for each in [engine.submit([9], max_tokens=200) for _ in range(20)]]
    texts = [tiny.tokenizer.decode(each.tokens) for each in done]
    assert all(text.startswith("<tool_call>\nrm ") and text.endswith("\n<|im_end|>") for text in texts)
    assert all(text[15:-11].isalpha() for text in texts)
    assert len(set(texts)) == len(texts)
    assert len({each.tokens[: each.forced.index(False)] for each in done}) > 5, "the text is always cut alike"
    assert all(each.forced.count(False) == 4 for each in done)
    assert max(worst(tiny.model, each) for each in done) <= TOLERANCE
    assert all(min(each.logprobs) < -3 for each in done), "a forced token's logprob is the model's own"


def test_ordinary_tokens_are_all_but_the_special_ones(tiny: Any) -> None:
    some = ordinary(tiny.tokenizer)
    assert tiny.tokenizer.eos_token_id not in some
    assert len(some) == len(tiny.tokenizer) - 3
    assert letters(tiny.tokenizer) < some


def test_new_weights_are_used_from_the_next_batch_on(tiny: Any) -> None:
    other = make_model(tiny.tokenizer, seed=1)
    with Engine(make_model(tiny.tokenizer)) as engine:
        before = engine.submit([5, 6], max_tokens=20).result(60)
        with engine.weights() as model:
            model.load_state_dict(other.state_dict())
        after = engine.submit([5, 6], max_tokens=20).result(60)
    assert (before.version, after.version) == (0, 1)
    assert worst(tiny.model, before) <= TOLERANCE < worst(tiny.model, after)
    assert worst(other, after) <= TOLERANCE


def test_the_same_seed_gives_the_same_weights_and_disturbs_no_other_draw(tiny: Any) -> None:
    import torch

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    again = make_model(tiny.tokenizer)
    assert torch.rand(1) == expected
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), tiny.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("prompt", "limit"), [([], 5), ([-1], 5), ([10**6], 5), ([5], 4096), ([5] * 4096, 1), ([5], 0)]
)
def test_what_can_t_be_completed_is_refused(engine: Engine, prompt: list[int], limit: int) -> None:
    with pytest.raises(UsageError):
        engine.submit(prompt, max_tokens=limit)


def test_a_failing_plan_is_the_caller_s(tiny: Any) -> None:
    def plan(prompt: Any, rng: Any) -> Any:
        raise RuntimeError("no plan")

    with Engine(tiny.model, plan=plan) as engine, pytest.raises(RuntimeError, match="no plan"):
        engine.submit([5], max_tokens=3)


def test_a_batch_that_fails_fails_its_prompts_and_no_others(tiny: Any) -> None:
    plans = iter([[(10**9,)], []])
    with Engine(tiny.model, plan=lambda prompt, rng: next(plans), max_batch=1) as engine:
        wrong, right = engine.submit([5], max_tokens=3), engine.submit([5], max_tokens=3)
        with pytest.raises(IndexError):
            wrong.result(60)
        assert right.result(60).tokens


def test_what_waits_is_bounded_and_cancelled_at_the_end(tiny: Any) -> None:
    asked = []
    with Engine(tiny.model, max_waiting=3, max_batch=1) as engine:
        with engine.weights(), pytest.raises(queue.Full):
            for _ in range(10):
                asked.append(engine.submit([5], max_tokens=1))
        assert asked[-1].cancel() or asked[-1].done()
    assert all(each.done() for each in asked)
