"""What tokens cost: the table and its file, the price of each answer, and what the endpoint itself reports."""

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, call

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.endpoint.prices import TokenPrices
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.agents.model import OpenAIServer
from hermes_core.errors import ConfigError
from hermes_core.validation import validate_data

CACHED = {"prompt_tokens_details": {"cached_tokens": 800_000}}
ECHO = [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}]


def test_cached_tokens_have_their_own_price():
    prices = TokenPrices(prompt=2, cached=0.5, completion=10)
    assert prices.cost(1_000_000, 100_000) == pytest.approx(3.0)
    assert prices.cost(1_000_000, 100_000, 800_000) == pytest.approx(0.4 + 0.4 + 1.0)
    assert prices.cost(10, 0, 1_000_000) == pytest.approx(5e-6), "an endpoint that reports more than there are"
    assert TokenPrices(prompt=2, completion=10).cost(1_000_000, 0, 800_000) == pytest.approx(2.0)


@pytest.mark.parametrize("text", ["m:\n  prompt: 2\n  completion: 10\n", '{"m": {"prompt": 2, "completion": 10}}'])
def test_prices_are_read_from_a_file(tmp_path, text):
    (tmp_path / "prices.yaml").write_text(text)
    settings = AgentSettings(model="m", prices=str(tmp_path / "prices.yaml"))
    assert settings.price == TokenPrices(prompt=2, completion=10)
    assert settings.model_copy(update={"model": "other"}).price is None
    assert AgentSettings(model="m").price is None


def test_wrong_prices_are_refused_in_words(tmp_path):
    for prices, says in (
        ({"m": {"prompt": -1, "completion": 1}}, "prices.m.prompt"),
        ({"m": {"prompt": 1, "completion": float("nan")}}, "prices.m.completion"),
        ({"m": {"prompt": 1}}, "prices.m.completion"),
        ({"m": 3}, "prices.m"),
        (str(tmp_path / "none.yaml"), "none.yaml"),
    ):
        with pytest.raises(ConfigError, match=says):
            validate_data(AgentSettings, {"prices": prices}, "the agent")


async def ran(script, price, **fields):
    """Let a loop run against a server, and return its result."""

    async def echo(name, arguments, task_id):
        return "{}"

    async with ScriptedServer(script, **fields) as server:
        endpoint = OpenAIServer(AgentSettings(model="scripted", base_url=server.base_url))
        loop = HermesAgentLoop(endpoint, ECHO, ["echo"], tool_handler=echo, price=price)
        result = await loop.run([{"role": "user", "content": "hello"}])
        await endpoint.aclose()
    return result


TWO = [
    Reply(tool_calls=[call("echo")], usage=(1_000_000, 100_000)),
    Reply("done", usage=(1_000_000, 0), usage_extra={**CACHED, "cost": 0.25}),
]


async def test_each_turn_and_all_together_have_their_cost():
    result = await ran(TWO, TokenPrices(prompt=2, cached=0.5, completion=10))
    assert [turn.cost for turn in result.turns] == pytest.approx([3.0, 0.8])
    assert result.usage.cost == pytest.approx(3.8)
    assert (result.usage.requests, result.usage.cached_tokens) == (2, 800_000)


async def test_without_prices_the_endpoints_own_cost_is_taken():
    result = await ran(TWO, None)
    assert [turn.cost for turn in result.turns] == [None, 0.25]
    assert result.usage.cost == 0.25


@pytest.mark.parametrize("cost", ["0.25", True, -1, float("inf"), float("nan"), {"total": 1}, None])
async def test_a_cost_that_makes_no_sense_is_not_known(cost):
    result = await ran([Reply("done", usage_extra={"cost": cost})], None)
    assert (result.turns[0].cost, result.usage.cost) == (None, None)


async def test_waits_are_in_the_turn_that_had_them_and_in_all():
    result = await ran(TWO, None, faults=[Fault(429, headers={"Retry-After": "0.6"})])
    first, second = result.turns
    assert first.waited_s > 0.5
    assert second.waited_s < first.waited_s
    assert first.ended - first.started >= first.waited_s
    assert result.waited_s == pytest.approx(first.waited_s + second.waited_s, abs=1e-3)
