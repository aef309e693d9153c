"""The cookbook's environments: its own loop and strategies over our rollouts, with a script in the policy's place."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_core import InfraError, ModelError, VerifierError
from tests.trl.conftest import ISOLATION

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("cookbook_extra", "leak_check"),
]

WRITE = '<tool_call>{"name": "terminal", "arguments": {"command": "echo %s > %s"}}</tool_call>'


@pytest.fixture
def tokenizer(cookbook_extra: None, example: Callable[[str], Any], tmp_path: Path) -> Any:
    made = example("warm_up").tokenizer_of(tmp_path / "tokenizer")
    made.name_or_path = str(tmp_path / "tokenizer")
    return made


@pytest.fixture
def policy(tokenizer: Any) -> Any:
    """What the cookbook asks for actions: one that writes what the prompt asks for, or always `ant`."""
    from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs

    class Script(TokenCompleter):  # type: ignore[misc]
        def __init__(self) -> None:
            self.prompts: list[list[int]] = []
            self.word: str | None = None
            self.before: Callable[[], None] | None = None

        async def __call__(self, model_input: Any, stop: Any, **_: Any) -> Any:
            prompt = model_input.to_ints()
            self.prompts.append(prompt)
            text = tokenizer.decode(prompt)
            word, _, box = text.partition("Write ")[2].partition(".")[0].partition(" to ")
            said = "Done." if "exit_code" in text else WRITE % (self.word or word, box)
            tokens = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
            assert tokens[-1] in stop
            return TokensWithLogprobs(tokens, [-1.0] * len(tokens))

    return Script()


@pytest.fixture
def rollouts(troubled: Callable[..., Any], tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """Makes what the environments share, with this trouble."""
    from hermes_tinker.stepped import Rollouts

    made: list[Any] = []

    def make(where: str = "", times: int = 1000, *, max_length: int = 2048, **options: Any) -> Any:
        agent = {"tokenizer_name": tokenizer.name_or_path, "max_token_length": max_length, "max_turns": 3}
        made.append(Rollouts(troubled(where, times), agent=agent, concurrency=8, **ISOLATION, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_a_group_is_rolled_out_by_the_cookbook(rollouts: Callable[..., Any], policy: Any, tokenizer: Any) -> None:
    from hermes_tinker.cookbook import HermesGroupBuilder
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.rollouts import do_group_rollout

    builder = HermesGroupBuilder(rollouts(), "boxes-0", 4)
    group = await do_group_rollout(builder, policy)
    assert group.get_total_rewards() == [1.0] * 4
    for trajectory in group.trajectories_G:
        first, last = trajectory.transitions
        assert last.ob.to_ints()[: first.ob.length + len(first.ac.tokens)] == [*first.ob.to_ints(), *first.ac.tokens]
        assert trajectory.stop_reason == "completed"
        assert len(trajectory_to_data(trajectory, 1.0)) == 1, (
            "the tokens of a turn are the beginning of the next prompt"
        )
    policy.word = "nothing"
    assert (await do_group_rollout(builder, policy)).get_total_rewards() == [0.5] * 4


@pytest.mark.parametrize(("where", "error"), [("infra", InfraError), ("verifier", VerifierError)])
async def test_a_failure_is_an_error_and_no_reward(
    rollouts: Callable[..., Any], policy: Any, where: str, error: type[Exception]
) -> None:
    from hermes_tinker.cookbook import HermesGroupBuilder
    from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
    from tinker_cookbook.rl.rollouts import do_group_rollout

    builder = HermesGroupBuilder(rollouts(where, times=1), "boxes-0", 4)
    with pytest.raises(error):
        await do_group_rollout(builder, policy)
    again = HermesGroupBuilder(rollouts(where, times=1), "boxes-0", 4)
    group = await do_group_rollout(again, policy, strategy=RetryOnFailure(max_retries=1))
    assert group.get_total_rewards() == [1.0] * 4
    assert [each.error_type for each in group.rollout_errors] == [error.__name__]


async def test_a_sandbox_that_dies_under_the_policy_is_an_error(rollouts: Callable[..., Any], policy: Any) -> None:
    from hermes_tinker.cookbook import HermesGroupBuilder

    shared = rollouts()
    builder = HermesGroupBuilder(shared, "boxes-0", 1)
    (env,) = await builder.make_envs()
    observation, stop = await env.initial_observation()

    async def kill() -> None:
        backend = (await shared.run.context()).backend.backend
        for sandbox in await backend.list():
            if f"-{os.getpid()}-" in sandbox.owner:  # the others are of other tests and programs
                await backend.terminate_id(sandbox.sandbox_id)

    await shared.run.run(kill())
    action = await policy(observation, stop)
    with pytest.raises(InfraError):
        await env.step(action.tokens)
    await builder.cleanup()


async def test_a_prompt_that_is_too_long_is_an_error(rollouts: Callable[..., Any], policy: Any) -> None:
    from hermes_tinker.cookbook import HermesGroupBuilder
    from tinker_cookbook.rl.rollouts import do_group_rollout

    with pytest.raises(ModelError, match="23 tokens, of 20 tokens at most"):
        await do_group_rollout(HermesGroupBuilder(rollouts(max_length=20), "boxes-0", 2), policy)
    assert not policy.prompts


async def test_cleanup_ends_what_was_begun(rollouts: Callable[..., Any]) -> None:
    from hermes_tinker.cookbook import HermesGroupBuilder

    shared = rollouts()
    builder = HermesGroupBuilder(shared, "boxes-0", 2)
    first, _ = await builder.make_envs()
    await first.initial_observation()
    await builder.cleanup()
    await builder.cleanup()
    assert not shared.run._tasks


async def test_a_dataset_has_each_item_once_and_its_copies_share_the_run(tokenizer: Any, tmp_path: Path) -> None:
    from hermes_tinker.cookbook import HermesDatasetBuilder

    rows = [{"id": f"task-{number}", "prompt": "Do it.", "check": ["true"]} for number in range(5)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    builder = HermesDatasetBuilder(
        environment="tasks",
        tokenizer=tokenizer.name_or_path,
        max_length=1024,
        env={"dataset_name": str(tmp_path / "tasks.jsonl")},
        options={"concurrency": 2, **ISOLATION},
        groups_per_batch=2,
        group_size=3,
    )
    dataset, tests = await builder()
    assert tests is None
    batches = [dataset.get_batch(index) for index in range(len(dataset))]
    assert [each.item_id for batch in batches for each in batch] == [f"task-{number}" for number in range(5)]
    copy = pickle.loads(pickle.dumps(batches[0][0]))
    assert copy.rollouts.run is batches[0][0].rollouts.run
    copy.rollouts.close()
