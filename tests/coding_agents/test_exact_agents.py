"""What real coding agents are trained on is, token for token and logprob for logprob, what the server gave."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hermes_agents
import pytest

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.coding_agents.test_real_agents import ALWAYS, ROW, TOOLS, stressed
from tests.coding_agents.wild import FORM, MARK, WildModel
from tests.support.token_server import TokenServer, continued, differences
from tests.tiny_model.token_exactness import TrainedSequence, spans

pytestmark = [pytest.mark.full, pytest.mark.loop_stall(2.0)]

STEPS = [
    ["cat calc.py", "ls"],
    ["sed -i 's/a - b/a + b/' calc.py  # naïve"],
    ["PYTHONPATH=. python3 -c 'import calc; print(calc.add(2, 3))'"],
]
"""The commands of each turn, in parallel."""

CONTINUED = 0.95
"""The share of the requests after the first that must go on from a known path."""

LEAVES_OUT = {"mini-swe-agent": 0.9}
"""That share for an agent that goes on without an answer that it can't use: the wild model writes many of them."""


def script(agent: str) -> Callable[[str], str]:
    """Return a model that thinks, and does the steps with this agent's tool. No two of its answers are the same."""
    name, argument, others = TOOLS[agent]
    numbers = itertools.count()

    def answer(prompt: str) -> str:
        turn = prompt.count(MARK) - 1
        if turn < 0:
            return "Hello"  # it is tried out
        thought = f"<think>\nThis is answer {next(numbers)}.\n</think>\n\n"
        if turn >= len(STEPS):
            return f"{thought}I fixed it."
        calls = [json.dumps({"name": name, "arguments": {argument: each, **others}}) for each in STEPS[turn]]
        return thought + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)

    return answer


def chat_template(tokenizer: Any) -> str:
    """Return the tokenizer's, which also writes system messages after the first, as that of the true Qwen3 does."""
    template: str = tokenizer.chat_template
    user = "{%- if message.role == 'user' -%}\n        {{- '<|im_start|>user\\n' + message.content"
    assert user in template
    both = "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}"
    return template.replace(user, f"{both}\n        {{{{- '<|im_start|>' + message.role + '\\n' + message.content")


@pytest.mark.long
@pytest.mark.parametrize("agent", [name if name in ALWAYS else stressed(name) for name in TOOLS])
async def test_a_real_agent_is_trained_on_what_was_sampled(
    tmp_path: Path,
    isolates: None,
    indexes: None,
    tokenizers: Callable[[str], Any],
    agent: str,
    record_property: Callable[[str, object], None],
) -> None:
    tokenizer, rollouts = tokenizers(FORM), 3
    async with TokenServer(tokenizer, script(agent)) as server:
        records = await recorded(tmp_path, agent, rollouts, settings_with(server))
    assert [(record["reward"], record["failure"]) for record in records] == [(1.0, None)] * rollouts
    trained = [[TrainedSequence(**lists) for lists in record["sequences"]] for record in records]
    for (own, *others), record in zip(trained, records, strict=True):
        assert not others
        assert ROW["prompt"] in tokenizer.decode(own.tokens)
        assert len(list(spans(own.masks))) == len(record["turns"]) == len(STEPS) + 1
    found = compared(agent, records, server, record_property)
    assert not any(found.values())


ROLLOUTS = {
    **dict.fromkeys(("codex", "claude-code", "pi", "kimi-code", "mini-swe-agent", "gemini-cli", "hermes"), 200),
    **dict.fromkeys(("opencode", "qwen-coder"), 20),
}
"""How many rollouts of each agent are compared: few of those that take long to start. aider writes all of its prompt
anew for each request."""


@pytest.mark.stress
@pytest.mark.parametrize("agent", ROLLOUTS)
async def test_a_real_agent_is_trained_on_what_a_wild_model_wrote(
    tmp_path: Path,
    isolates: None,
    indexes: None,
    tokenizers: Callable[[str], Any],
    agent: str,
    record_property: Callable[[str, object], None],
) -> None:
    """It calls all of the agent's tools, also wrongly and several at once, and writes bytes that are no text."""
    tokenizer = tokenizers(FORM)
    async with TokenServer(tokenizer, WildModel(tokenizer, agent)) as server:
        records = await recorded(tmp_path, agent, ROLLOUTS[agent], settings_with(server))
    compared(agent, records, server, record_property)


def compared(
    agent: str, records: Sequence[Mapping[str, Any]], server: TokenServer, tell: Callable[[str, object], None]
) -> Counter[str]:
    """Check that records have the tokens of a server, and nearly all requests went on from others. Return the forks."""
    assert {record["failure"] for record in records} == {None}
    own = [each for each in server.log if ROW["prompt"] in server.tokenizer.decode(each.prompt)]
    sequences = [TrainedSequence(**lists) for record in records for lists in record["sequences"]]
    found = differences(sequences, own)
    forks = sum((Counter(record.get("forks") or {}) for record in records), Counter[str]())
    share = continued(own) / (len(own) - len(records)) if len(own) > len(records) else 1.0
    tokens, sampled = sum(len(each.tokens) for each in sequences), sum(len(each.tokens) for each in own)
    version = records[0]["versions"][agent]
    tell(
        "figure",
        f"{agent} {version}: {len(records)} trajectories, {len(own)} answers: {tokens} tokens, {sampled} of them "
        f"sampled; {len(found)} differences from the server's own record; {share:.1%} of the requests after the first "
        f"went on from a known path; forks: {dict(forks) or 0}; requests aside: {len(server.log) - len(own)}",
    )
    assert found == []
    assert share >= LEAVES_OUT.get(agent, CONTINUED)
    return forks


def settings_with(server: TokenServer) -> dict[str, Any]:
    """The agent's settings with this model."""
    return {
        "model": "scripted",
        "base_url": server.base_url,
        "server_type": "vllm",
        "tokenizer_name": server.tokenizer.name_or_path,
        "chat_template": chat_template(server.tokenizer),
        "tool_call_parser": "auto",
        "max_token_length": 200_000,
        "max_tokens": 400,
    }


async def recorded(
    tmp_path: Path, agent: str, rollouts: int, settings: Mapping[str, Any], *, concurrency: int = 2
) -> list[Mapping[str, Any]]:
    """Return the records of a run of one task."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    records: list[Mapping[str, Any]] = []
    async with Runtime(
        Settings(state_dir=tmp_path / "state"), load_entry_points=False, plugins=[hermes_agents]
    ) as runtime:
        await run_rollouts(
            runtime,
            "tasks",
            agent,
            env={"dataset_name": str(tmp_path / "tasks.jsonl")},
            settings=settings,
            isolation="user",
            backend_config={"network": "none"},
            group_size=rollouts,
            concurrency=concurrency,
            on_record=lambda record: records.append(dict(record)),
        )
    return records
