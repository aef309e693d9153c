"""What the tests of exact tokens share: long conversations of which many are summarised, and what is told of a run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hermes_testing.tiny_model.engine import SampledCompletion

from hermes_core.agents.exact.probe import TRIAL
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.tiny_model.token_exactness import TOLERANCE, Exactness, TrainedSequence, check_exactness

TURNS = 4
"""The turns of `WildPlans` in these conversations. Summaries come on top."""

GROWTH = {"qwen3": 230, "chatml": 230, "llama3": 190}
"""The number of tokens beyond the first prompt that most conversations reach, by chat template."""

FORMS = tuple(GROWTH)

COMMAND = shlex.join(
    ["python3", "-c", (Path(__file__).parents[2] / "examples/agent_program/agent.py").read_text("utf-8")]
)
"""The command line of an agent that is a program: it holds the program itself. Its tool is `bash`."""

MANY = 100
"""The number of trajectories from which the share of them that was summarised is no chance."""


def long_conversations(tokenizer: Any, form: str, task: str, system: str = "", *, rollouts: int) -> dict[str, Any]:
    """Return settings of the agent by which about half of the conversations about this task are summarised; of few,
    nearly all."""
    schemas = Runtime(Settings(), load_entry_points=False).tools.schemas(("terminal", "process"))
    before = [{"role": "system", "content": system}] if system else []
    prompt = tokenizer.apply_chat_template(
        [*before, {"role": "user", "content": task}], tools=schemas, add_generation_prompt=True, return_dict=False
    )
    many = rollouts >= MANY
    return {
        "compact_at": len(prompt) + GROWTH[form] // (1 if many else 2),
        "max_turns": TURNS * (2 if many else 1),
        "max_tokens": 160,
    }


def without_trial(sampled: Iterable[SampledCompletion], tokenizer: Any) -> list[SampledCompletion]:
    """Return the completions of the rollouts: the others tried the server out."""
    trial = tuple(tokenizer.encode(TRIAL, add_special_tokens=False))
    return [each for each in sampled if each.prompt != trial]


def check_run(
    what: str,
    model: Any,
    sequences: Iterable[TrainedSequence],
    sampled: Iterable[SampledCompletion],
    *,
    summaries: Sequence[int],
    tell: Callable[[str, object], None],
) -> Exactness:
    """Check that a run is exact, and tell the figures.

    Args:
        summaries: how many of them each trajectory has.
        tell: the fixture `record_property`.
    """
    began = time.monotonic()
    found = check_exactness(model, sequences, sampled)
    total, split = len(summaries), sum(map(bool, summaries))
    tell(
        "figure",
        f"{what}: {total} trajectories, {split} of them with {sum(summaries)} summaries: {found.tokens} tokens, "
        f"{found.trained} of them sampled; {len(found.problems)} differences from the server's own record, and "
        f"logprobs within {found.worst:.1e} of those of the weights, checked in {time.monotonic() - began:.0f} s",
    )
    assert found.problems == []
    assert found.worst <= TOLERANCE
    return found


def check_share(summaries: Sequence[int]) -> None:
    """Check that some of few trajectories were summarised, or of many more than a third, and not nearly all."""
    share = sum(map(bool, summaries)) / len(summaries)
    assert (1 / 3 < share < 0.95) if len(summaries) >= MANY else share > 0
