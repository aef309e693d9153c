"""OpenEnv's own harness on our sessions: rewards, failures, time limits, slots and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from hermes_core import ConfigError, LoopThread, TokenSequence, UnknownNameError, UsageError
from tests.support.token_server import TokenServer
from tests.trl.conftest import ISOLATION, Notes

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("openenv_extra", "leak_check")]

Say = Callable[[Sequence[dict[str, Any]]], str | dict[str, Any]]


@pytest.fixture
def factory_of() -> Any:
    from hermes_openenv import HermesSessionFactory

    return lambda *items, **options: HermesSessionFactory(Notes(*items), **{"concurrency": 2, **ISOLATION, **options})


def write(word: str) -> dict[str, Any]:
    return {"command": f"echo {word} > note.txt"}


def model(say: Say) -> Callable[..., Any]:
    """OpenEnv's model step: a command, or a last word."""
    from openenv.core.harness import ModelStepResult
    from openenv.core.llm_client import LLMResponse, ToolCall

    def step(messages: list[dict[str, Any]], tools: list[Any], sampling: dict[str, Any]) -> Any:
        assert {tool.name for tool in tools} == {"terminal", "process"}
        said = say(messages)
        if isinstance(said, str):
            return ModelStepResult(LLMResponse(content=said, tool_calls=[]))
        return ModelStepResult(LLMResponse(content="", tool_calls=[ToolCall(id="1", name="terminal", args=said)]))

    return step


def rolled_out(session: Any, say: Say) -> Any:
    """What `verify` gives after OpenEnv's loop."""
    from openenv.core.harness import MCPHarnessAdapter

    result = MCPHarnessAdapter().run_white_box(model(say), session)
    return session.verify(result.messages)


def first(said: str | dict[str, Any]) -> Say:
    """Say this first, and then that it is done."""
    return lambda messages: "Done." if messages[-1]["role"] == "tool" else said


def test_openenvs_loop_gets_the_reward_of_what_happened(factory_of: Any) -> None:
    with factory_of({"word": "fox"}, {"word": "ant"}) as factory:
        assert factory.item_ids == ["0", "1"]
        for word, reward in (("fox", 1.0), ("ant", 0.0)):
            session = factory.create("0")
            assert "Write fox to note.txt." in session.initial_messages()[-1]["content"]
            verified = rolled_out(session, first(write(word)))
            assert (verified.env_reward, verified.done) == (reward, True)
            assert verified.metrics["failure_kind"] is None
            assert verified.artifacts["record"]["messages"][-1]["content"] == "Done."
            assert session.verify([]) is verified
            session.close()


def test_its_rollout_function_for_trl(factory_of: Any) -> None:
    from openenv.core.harness import MCPHarnessAdapter, build_harness_rollout_func

    with factory_of({"word": "fox"}, {"word": "ant"}) as factory:
        rollout = build_harness_rollout_func(
            session_factory=factory,
            harness_adapter=MCPHarnessAdapter(),
            model_step_builder=lambda trainer, session: model(first(write("fox"))),
        )
        prompts = [[{"role": "user", "content": "Go.", "item_id": "0"}], {"item_id": "1"}]
        assert rollout(prompts, None)["env_reward"] == [1.0, 0.0]


@pytest.mark.parametrize("where", ["infra", "setup", "verifier"])
def test_a_failure_is_no_reward(factory_of: Any, where: str) -> None:
    from openenv.core.harness import HarnessRolloutResult, _resolve_env_reward

    with factory_of({"breaks": where}, concurrency=1, infra_retries=0) as factory:
        for _ in range(2):
            session = factory.create("0")
            verified = rolled_out(session, first(write("fox")))
            assert (verified.env_reward, verified.metrics["failure_kind"]) == (None, where)
            assert verified.metrics["mask_sample"] is True
            with pytest.raises(ValueError, match="did not produce"):
                _resolve_env_reward(HarnessRolloutResult(), verified)
            session.close()


def test_a_sandbox_that_dies_under_the_model_ends_its_session(factory_of: Any) -> None:
    with factory_of({}, concurrency=1) as factory:
        session = factory.create("0")

        async def kill() -> None:
            backend = (await factory.run.context()).backend.backend
            for sandbox in await backend.list(factory.run.session.runtime.owner):
                await backend.terminate_id(sandbox.sandbox_id)

        assert json.loads(session.call_tool("terminal", write("fox")).data)["exit_code"] == 0
        factory.run.call(kill())
        answer = session.call_tool("terminal", write("fox"))
        assert answer.done and "rollout has ended" in str(answer.error)
        verified = session.verify([])
        assert (verified.env_reward, verified.metrics["failure_kind"]) == (None, "infra")
        session.close()
        assert rolled_out(factory.create("0"), first(write("fox"))).env_reward == 1.0


def test_what_a_command_prints_is_never_a_reward(factory_of: Any) -> None:
    with factory_of({}) as factory:
        verified = rolled_out(factory.create("0"), first({"command": """echo '{"reward": 1.0}'"""}))
        assert verified.env_reward == 0.0


def test_a_rollout_whose_time_is_up_is_scored(factory_of: Any) -> None:
    with factory_of({}, rollout_timeout=1.5) as factory:
        session = factory.create("0")
        session.call_tool("terminal", write("fox"))
        assert session.call_tool("terminal", {"command": "sleep 20"}).done
        verified = session.verify([])
        assert (verified.env_reward, verified.metrics["stop_reason"]) == (1.0, "time_limit")


def test_a_session_holds_its_slot_until_it_is_closed(factory_of: Any) -> None:
    with factory_of({}, concurrency=1) as factory:
        session = factory.create("0")
        with pytest.raises(UsageError, match="close the sessions"):
            factory.create("0")
        session.close()
        session.close()
        again = factory.create("0")
        assert json.loads(again.call_tool("terminal", {"command": "cat note.txt"}).data)["exit_code"] == 1


def test_a_task_that_names_no_item_is_an_error(factory_of: Any) -> None:
    with factory_of({}) as factory:
        for task in (None, [], 3, {"id": "0"}, [{"role": "user", "content": "Go."}]):
            with pytest.raises(ConfigError, match="names no item"):
                factory.create(task)
        with pytest.raises(UnknownNameError):
            factory.create("9")
        with pytest.raises(UsageError, match="bakend"):
            factory_of({}, bakend="local")


def test_our_agent_rolls_out_by_itself_and_keeps_its_tokens(factory_of: Any, tokenizers: Callable[[str], Any]) -> None:
    tokenizer = tokenizers("chatml")
    written = json.dumps({"name": "terminal", "arguments": write("fox")})
    server = TokenServer(
        tokenizer, lambda prompt: "Done." if "exit_code" in prompt else f"<tool_call>\n{written}\n</tool_call>"
    )
    loop = LoopThread("token server", partial(server.__aexit__, None, None, None))
    try:
        loop.call(server.__aenter__())
        agent = {
            "base_url": server.base_url,
            "server_type": "vllm",
            "tokenizer_name": tokenizer.name_or_path,
            "max_token_length": 8192,
            "endpoint_patience_s": 0.5,
        }
        with factory_of({}, {"breaks": "setup"}, agent=agent) as factory:
            good, bad = (factory.create(item_id) for item_id in factory.item_ids)
            assert [good.wait_for_completion(), bad.wait_for_completion()] == [0, 1]
            assert (good.verify([]).env_reward, bad.verify([]).env_reward) == (1.0, None)
            turns = good.fetch_training_trace().turns
            assert [tuple(turn.completion_token_ids) for turn in turns] == [each.tokens for each in server.log]
            assert [tuple(turn.prompt_token_ids) for turn in turns] == [each.prompt for each in server.log]
            assert not bad.fetch_training_trace().turns
            server.trouble = "hang"
            slow = factory.create("0")
            with pytest.raises(TimeoutError):
                slow.wait_for_completion(0.5)
            for session in (good, bad, slow):
                session.close()
    finally:
        loop.close()


def test_each_answer_of_the_model_is_a_turn() -> None:
    from hermes_openenv import sessions
    from openenv.core.harness import TrainingTrace

    masks, logprobs = [-100, -100, 7, 8, -100, 9], [1.0, 1.0, -0.5, -0.25, 1.0, -2.0]
    sequence = TokenSequence.of([5, 6, 7, 8, 4, 9], masks, logprobs)
    turns = [{"node_id": str(n), **turn} for n, turn in enumerate(sessions._turns(sequence))]
    one, two = TrainingTrace.model_validate({"turns": turns}).turns
    assert (one.prompt_token_ids, one.completion_token_ids, one.per_token_logps) == ([5, 6], [7, 8], [-0.5, -0.25])
    assert (two.prompt_token_ids, two.completion_token_ids, two.per_token_logps) == ([5, 6, 7, 8, 4], [9], [-2.0])
    assert two.loss_mask == [0, 0, 0, 0, 0, 1]
