"""Several models in one run, and messages that are sent and not kept."""

import json
from collections import Counter

import pytest
from hermes_testing.scripted_server import Reply, ScriptedServer
from pydantic import SecretStr

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.model import ModelAgent, ModelSettings
from hermes_core.errors import ConfigError, UsageError
from hermes_core.records.store import read_records
from hermes_core.runs.runner import run_rollouts

MODELS = ("small", "large")


def prompts(tmp_path, count):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Question {number}"}) + "\n" for number in range(count)))
    return {"dataset_name": str(path), "enabled_toolsets": ()}


async def drawn(runtime, env, server, folder, **options):
    """Return the model of each rollout."""
    settings = {"models": {"small": 3, "large": {"weight": 1, "temperature": 0.5}}, "base_url": server.base_url}
    settings |= options.pop("settings", {})
    await run_rollouts(runtime, "prompts", env=env, settings=settings, out_dir=folder, group_size=2, **options)
    return {(one["item_id"], one["rollout_index"]): one["model"] for one in read_records(folder)}


async def test_each_rollout_draws_a_model_by_weight_and_again_the_same_one(runtime, tmp_path):
    async with ScriptedServer([Reply("ok")], models=MODELS) as server:
        env = prompts(tmp_path, 40)
        first = await drawn(runtime, env, server, tmp_path / "one", seed=7)
        again = await drawn(runtime, env, server, tmp_path / "two", seed=7, concurrency=1)
        other = await drawn(runtime, env, server, tmp_path / "three", seed=8)
        # The missing half of a run is drawn as it would have been.
        lines = (tmp_path / "one" / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / "one" / "trajectories.jsonl").write_bytes(b"".join(lines[::2]))
        resumed = await drawn(runtime, env, server, tmp_path / "one", seed=7, resume=True)
    assert first == again == resumed
    assert first != other
    assert 10 <= Counter(first.values())["large"] <= 30  # of 80, at a quarter
    sent = [(request["model"], request["temperature"]) for request in server.requests if "temperature" in request]
    assert set(sent) == {("small", 1.0), ("large", 0.5)}


def test_a_key_is_never_sent_to_another_endpoint():
    settings = AgentSettings(
        base_url="http://here/v1",
        api_key="the-main-key",
        models={"a": 1, "b": {"base_url": "http://there/v1"}, "c": {"base_url": "http://x/v1", "api_key": "its-own"}},
    )
    found = {name: (own.base_url, own.api_key) for name, own in settings.each_model().items()}
    assert found == {
        "a": ("http://here/v1", SecretStr("the-main-key")),
        "b": ("http://there/v1", None),
        "c": ("http://x/v1", SecretStr("its-own")),
    }


async def test_keys_of_models_are_kept_nowhere(runtime, tmp_path):
    async with ScriptedServer([Reply("Your key is sk-of-the-large-one.")], models=MODELS) as server:
        large = {"base_url": server.base_url, "api_key": "sk-of-the-large-one"}
        await drawn(runtime, prompts(tmp_path, 5), server, tmp_path / "out", settings={"models": {"large": large}})
    kept = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert b"sk-of-the-large-one" not in kept
    assert b"[redacted: large's api_key]" in kept


@pytest.mark.parametrize("models", [{"a": 0}, {"a": -1}, {"a": {"wait": 1}}, {"a": "much"}])
async def test_a_choice_that_can_not_be_is_refused(runtime, tmp_path, models):
    with pytest.raises((UsageError, ConfigError), match="models"):
        await run_rollouts(runtime, "prompts", env=prompts(tmp_path, 1), settings={"models": models})


PRIMED = {
    "ephemeral_system_prompt": "Think like a sailor.",
    "prefill_messages": [{"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": "Aye"}],
}


@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_what_primes_the_model_is_sent_and_not_recorded(runtime, tmp_path, system):
    env = {**prompts(tmp_path, 1), "system_prompt": system}
    async with ScriptedServer(lambda request: Reply("ok")) as server:
        settings = {"model": "scripted", "base_url": server.base_url, **PRIMED}
        await run_rollouts(runtime, "prompts", env=env, settings=settings, out_dir=tmp_path / "out")
    sent = server.requests[-1]["messages"]
    assert sent == [
        {"role": "system", "content": f"{system}\n\nThink like a sailor." if system else "Think like a sailor."},
        *PRIMED["prefill_messages"],
        {"role": "user", "content": "Question 0"},
    ]
    (record,) = read_records(tmp_path / "out")
    assert record["failure"] is None, record["failure"]
    kept = [{"role": "system", "content": system}] if system else []
    assert record["messages"][:-1] == [*kept, {"role": "user", "content": "Question 0"}]
    assert "sailor" not in json.dumps(record) and "Ahoy" not in json.dumps(record)


async def test_a_record_of_every_token_can_not_leave_messages_out():
    class Exact:
        async def chat_completion(self, **request):
            raise NotImplementedError

        def get_state(self):
            return {}

    with pytest.raises(UsageError, match="records every token"):
        ModelAgent(ModelSettings(model="m", base_url="http://x/v1", **PRIMED), Exact())
    with pytest.raises(ValueError, match="every token sent is recorded"):
        ModelSettings(model="m", base_url="http://x/v1", tool_call_parser="hermes", **PRIMED)
    with pytest.raises(ValueError, match="the role of message 1"):
        ModelSettings(prefill_messages=[{"content": "x"}])
