"""The version of the policy's weights: from servers that name it, into the record, and to a trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes_core.agents.base import TurnRecord
from hermes_core.agents.exact.wires import WIRES, AtroposVllm, Sglang, VllmCompletions, VllmTokens, Wire
from hermes_core.agents.replies import read_reply
from hermes_core.records.record import Record

ANSWERS: dict[type[Wire], dict[str, Any]] = {
    Sglang: {"meta_info": {"output_token_logprobs": [[-0.5, 7]], "finish_reason": {"type": "stop"}}},
    VllmTokens: {
        "choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}]
    },
    VllmCompletions: {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}]},
    AtroposVllm: {"logprobs": [[[{"7": -0.5}]]], "finish_reasons": ["stop"]},
}


@pytest.mark.parametrize(
    "wire", [wire for wires in WIRES.values() for wire in wires], ids=lambda wire: type(wire).__name__
)
@pytest.mark.parametrize(("named", "read"), [("step-4", "step-4"), (12, "12"), (None, None), ([], None)])
def test_every_wire_reads_the_version_that_its_server_names(wire: Wire, named: Any, read: str | None) -> None:
    answer = ANSWERS[type(wire)]
    assert wire.read(answer).weight_version is None
    if isinstance(wire, Sglang):
        answer = {"meta_info": {**answer["meta_info"], "weight_version": named}}
    else:
        answer = {**answer, "weight_version": named}
    assert wire.read(answer).weight_version == read


@pytest.mark.parametrize("place", ["metadata", "sglext"])
def test_an_openai_endpoint_names_it_beside_the_answer(place: str) -> None:
    completion = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    assert read_reply(completion, 1).weight_version is None
    assert read_reply({**completion, place: {"weight_version": "w1"}}, 1).weight_version == "w1"
    made = SimpleNamespace(**completion, **{place: {"weight_version": "w1"}})
    assert read_reply(made, 1).weight_version == "w1"


def test_a_rollout_may_have_been_answered_by_several_versions() -> None:
    turns = tuple(TurnRecord(n, weight_version=version) for n, version in enumerate(["w1", None, "w1", "w2"]))
    assert Record("t", "e", "i", "g", 0, "a", "b", turns=turns).weight_versions == ["w1", "w2"]
