"""A real vLLM: conversations of several turns, token for token, also when it dies in the middle of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.exact.generate import GenerateServer
from hermes_core.agents.model import ModelSettings, OpenAIServer
from hermes_core.environment import Environment
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.tiny_model.token_exactness import recomputed_logprobs
from tests.vllm.conftest import Server

TURNS = 3
TOLERANCE = 1e-3
"""How far a logprob of vLLM may be from the weights' own: its kernels sum in another order."""


class Talk(Environment):
    """Says something after each answer, and scores nothing."""

    name = "talk"
    scored = False

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def items(self) -> list[dict[str, Any]]:
        return [{"id": f"talk-{number}"} for number in range(self.count)]

    def toolsets(self, item: Mapping[str, Any]) -> tuple[str, ...]:
        return ()

    def uses_slot(self, item: Mapping[str, Any]) -> bool:
        return False

    def format_prompt(self, item: Mapping[str, Any]) -> str:
        return f"This is {item['id']}."

    async def continue_trajectory(self, item: Any, result: Any) -> str | None:
        return f"And {len(result.turns)}?" if len(result.turns) < TURNS else None


async def talks(server: Server, runtime: Runtime, count: int, out: Path, *, dies_after: int) -> list[dict[str, Any]]:
    """The records of a run during which the server is killed once, and started again."""
    records: list[dict[str, Any]] = []
    again: list[asyncio.Task[None]] = []

    def on_record(record: Mapping[str, Any]) -> None:
        records.append(dict(record))
        if len(records) == dies_after:
            server.kill()
            again.append(asyncio.create_task(server.start("--enable-scale-out")))

    settings = ModelSettings(
        model=server.model,
        base_url=server.base_url,
        tool_call_parser="auto",
        max_tokens=100,
        endpoint_patience_s=600,
        check_patience_s=60,
    )
    await run_rollouts(
        runtime, Talk(count), "model", settings=settings, out_dir=out, on_record=on_record, concurrency=8
    )
    await asyncio.gather(*again)
    return records


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.stress)])
async def test_a_server_that_dies_costs_no_token(
    server: Server, model: tuple[Path, Any], count: int, tmp_path: Path, record_property: Any
) -> None:
    began = time.monotonic()
    await server.start()
    started = time.monotonic() - began
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
        records = await talks(server, runtime, count, tmp_path / "run", dies_after=count // 3)
    assert [(record["failure"], record.get("tokens_refused")) for record in records] == [(None, None)] * count
    assert len({record["item_id"] for record in records}) == count
    turns = [len(record["turns"]) for record in records]
    assert sum(each == TURNS for each in turns) > count / 2
    trained, worst = 0, 0.0
    for record in records:
        (sequence,) = record["sequences"]
        places = [place for place, mask in enumerate(sequence["masks"]) if mask != -100]
        assert len(places) == sum(turn["completion_tokens"] for turn in record["turns"])
        anew = recomputed_logprobs(model[1], sequence["tokens"], 1)
        trained += len(places)
        worst = max(worst, *(abs(sequence["logprobs"][place] - anew[place - 1]) for place in places))
    assert worst <= TOLERANCE
    record_property(
        "figure",
        f"vLLM: {count} trajectories of {sum(turns)} answers, killed once: {trained} tokens, none lost, logprobs "
        f"within {worst:.1e}; {time.monotonic() - began:.0f} s, {started:.0f} s of them the first start",
    )
    await _other_routes(server)


async def _other_routes(server: Server) -> None:
    """The server that was started again has the scale-out endpoints; and it answers chats with tools."""
    given = AgentSettings(model=server.model, base_url=server.base_url)
    tokens = GenerateServer(given, None)
    sampled = await tokens.sample([5, 6, 7], max_tokens=4, temperature=1.0)
    assert len(sampled.tokens) == len(sampled.logprobs) <= 4
    assert tokens.wire is not None
    assert tokens.wire.path == "/inference/v1/generate"
    await tokens.aclose()
    chat = OpenAIServer(given)
    schemas = Runtime(Settings(), load_entry_points=False).tools.schemas(("terminal",))
    answers = await asyncio.gather(
        *(
            chat.chat_completion(messages=[{"role": "user", "content": f"{n}"}], tools=schemas, max_tokens=8)
            for n in range(8)
        )
    )
    assert all(answer.usage.completion_tokens <= 8 for answer in answers)
    await chat.aclose()
