"""Rollouts of a program in the slot, for Tinker: tokens, masks and logprobs as its sampler gave them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_core import UsageError
from tests.support.exactness import COMMAND
from tests.support.token_server import TokenServer, differences
from tests.tinker.conftest import AGENT
from tests.tiny_model.token_exactness import TrainedSequence

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tinker_extra")]

PROGRAM = {"name": "program", "command": COMMAND, "tool_call_parser": "hermes", "max_token_length": 8192}


class Training:
    """A training client whose sampling client is a scripted token server."""

    model_id = "scripted"

    def __init__(self, server: TokenServer) -> None:
        self._server = server

    async def get_info_async(self) -> Any:
        folder = self._server.tokenizer.name_or_path
        return SimpleNamespace(model_data=SimpleNamespace(model_name="scripted", tokenizer_id=folder))

    def save_weights_and_get_sampling_client(self, **_: Any) -> Any:
        return self

    async def sample(self, *, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        await asyncio.sleep(0)
        given = self._server.given(prompt.to_ints(), sampling_params.max_tokens)
        sequence = SimpleNamespace(tokens=given.tokens, logprobs=given.logprobs, stop_reason=given.finish_reason)
        return SimpleNamespace(sequences=[sequence])


def writes(prompt: str) -> str:
    """Do what the tasks ask for, with the program's own tool."""
    if "<tool_response>" in prompt:
        return "Done."
    task = re.search(r"user\nWrite (\w+) to (\w+)\.", prompt)
    command = f"echo {task[1]} > {task[2]}" if task else "true"  # the first is a trial
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_the_trainer_gets_what_was_sampled_for_a_program(
    tokenizers: Callable[[str], Any], troubled: Callable[..., Any], program_agents: None
) -> None:
    from hermes_tinker import TinkerRun

    server = TokenServer(tokenizers("chatml"), writes)
    with TinkerRun(troubled(), Training(server), agent=PROGRAM, concurrency=4) as run:
        groups = run.roll(2, 2)
    rolled = [each for group in groups for each in group.kept]
    assert [each.reward for each in rolled] == [1.0] * 4
    assert {each.record.agent for each in rolled} == {"program"}
    sequences = [TrainedSequence(**sequence.lists()) for each in rolled for sequence in each.sequences]
    assert (len(sequences), len(server.log)) == (4, 8)
    assert differences(sequences, server.log) == []


def test_a_program_can_not_be_played_step_by_step(troubled: Callable[..., Any], program_agents: None) -> None:
    from hermes_tinker.stepped import Rollouts

    rollouts = Rollouts(troubled(), agent={**AGENT, **PROGRAM})
    with pytest.raises(UsageError, match="can't be stepped"):
        _ = rollouts.run
