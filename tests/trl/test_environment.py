"""`environment_factory` with TRL's own trainer: tools as methods, slots for rollouts, rewards, and every failure."""

from __future__ import annotations

import inspect
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hermes_trl import HermesSpec

from hermes_core import RolloutEnded, UsageError
from tests.trl.conftest import ISOLATION, Notes, call, kill_sandboxes, scripted

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_extra", "offline", "leak_check")]

ROOT = Path(__file__).resolve().parents[2]


def prompts(spec: HermesSpec) -> list[Any]:
    return [row["prompt"] for row in spec.train_dataset]


def write(word: str) -> str:
    return call(f"echo {word} > note.txt")


def writer(words: Sequence[str]) -> Callable[[str, int], str]:
    """A model that writes each row's word, and then is done."""
    return lambda prompt, row: "Done." if "<tool_response>" in prompt else write(words[row])


def train(spec: HermesSpec, trainer: Any, tokenizer: Any, say: Callable[[str, int], str]) -> dict[str, list[Any]]:
    """Train one step with the script as the model. Return what the trainer got."""
    scripted(trainer, tokenizer, say)
    trainer.train()
    logs = trainer._logs
    return {"rewards": list(logs["rewards"]["environment_reward"]), "advantages": list(logs["advantages"])}


def test_the_trainer_trains_on_what_happened_in_the_slots(new_trainer: Callable[..., Any], tokenizer: Any) -> None:
    environment = Notes()
    with HermesSpec(environment, concurrency=4, **ISOLATION) as spec:
        trainer = new_trainer(
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
        )
        got = train(spec, trainer, tokenizer, writer(["fox", "ant", "fox", "cow"]))
    assert got["rewards"] == [1.0, 0.0, 1.0, 0.0]
    assert [advantage > 0 for advantage in got["advantages"]] == [True, False, True, False]
    assert trainer._metrics["train"] or trainer.state.log_history
    assert environment.verified_at_once == 4, "rollouts are verified one after the other"


def test_the_methods_have_the_schemas_of_the_tools(tokenizer: Any) -> None:
    from transformers.utils import get_json_schema

    class AllTools(Notes):
        default_toolsets = ("terminal", "file")

    with HermesSpec(AllTools(), concurrency=1, **ISOLATION) as spec:
        made = spec.environment_factory()
        methods = dict(inspect.getmembers(type(made), predicate=inspect.isfunction))
        schemas = {schema["function"]["name"]: schema["function"] for schema in spec.run.tools()}
        assert set(schemas) == {name for name in methods if not name.startswith("_") and name != "reset"}
        for name, ours in schemas.items():
            theirs = get_json_schema(getattr(made, name))["function"]
            assert theirs["description"].split() == ours["description"].split()
            properties = ours["parameters"]["properties"]
            assert theirs["parameters"].get("required", []) == ours["parameters"].get("required", [])
            assert set(theirs["parameters"]["properties"]) == set(properties)
            for key, their in theirs["parameters"]["properties"].items():
                assert their.get("type") == properties[key].get("type"), (name, key)
                assert their.get("enum") == properties[key].get("enum"), (name, key)
                assert their["description"].split() == properties[key].get("description", key).split()


def test_an_instance_is_reused_and_each_rollout_has_a_clean_slot() -> None:
    with HermesSpec(Notes(), concurrency=1, **ISOLATION) as spec:
        (prompt,) = prompts(spec)
        made = spec.environment_factory()
        with pytest.raises(RolloutEnded, match="reset"):
            made.terminal(command="ls")
        for _ in range(2):  # the rollout that nobody scores is ended by the next reset
            made.reset(prompt=prompt)
            assert json.loads(made.terminal(command="cat note.txt"))["exit_code"] == 1
            made.terminal(command="echo fox > note.txt")
        assert "comand" in json.loads(made.terminal(comand="ls"))["error"]
        (reward,) = spec.reward_funcs
        assert reward(completions=[[{"role": "assistant", "content": "Done."}]], environments=[made]) == [1.0]
        assert made.record is not None
        assert made.record.messages[-1]["content"] == "Done."
        with pytest.raises(RolloutEnded):
            made.terminal(command="ls")
        made.reset(prompt=prompt)


def test_more_rollouts_than_slots_are_refused_and_not_waited_for() -> None:
    with HermesSpec(Notes(), concurrency=2, **ISOLATION) as spec:
        (prompt,) = prompts(spec)
        first, second, third = (spec.environment_factory() for _ in range(3))
        first.reset(prompt=prompt)
        second.reset(prompt=prompt)
        began = time.monotonic()
        with pytest.raises(UsageError, match="per_device_train_batch_size"):
            third.reset(prompt=prompt)
        assert time.monotonic() - began < 30


def test_a_prompt_of_somebody_else_is_refused() -> None:
    with HermesSpec(Notes(), concurrency=1, **ISOLATION) as spec:
        made = spec.environment_factory()
        with pytest.raises(UsageError, match="item_id"):
            made.reset(prompt=[{"role": "user", "content": "Write."}])
        with pytest.raises(UsageError, match="unknown item 'x'"):
            made.reset(prompt=[{"role": "user", "content": "Write.", "item_id": "x"}])


BROKEN = {"breaks": "infra"}, {"breaks": "setup"}, {"breaks": "verifier"}


@pytest.mark.parametrize("item", BROKEN, ids=lambda item: item["breaks"])
def test_a_rollout_that_failed_has_no_reward_and_moves_nothing(
    new_trainer: Callable[..., Any], tokenizer: Any, item: dict[str, Any]
) -> None:
    # Of four rollouts the first one fails: of the others, two are right.
    failing = {"infra": 3, "setup": 1, "verifier": 1}[item["breaks"]]
    environment = Notes({**item, "times": failing})
    with HermesSpec(environment, concurrency=4, **ISOLATION) as spec:
        trainer = new_trainer(
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
        )
        got = train(spec, trainer, tokenizer, writer(["fox", "fox", "ant", "fox"]))
        failures = list(trainer._logs["extra"]["failure"])
    lost = [math.isnan(reward) for reward in got["rewards"]]
    assert sum(lost) == 1, got
    place = lost.index(True)
    assert got["advantages"][place] == 0.0
    assert failures[place].startswith(f"{item['breaks']}: ")
    left = [advantage for number, advantage in enumerate(got["advantages"]) if number != place]
    assert sum(left) == pytest.approx(0.0, abs=1e-4), "the mean of the group is not that of the rollouts that count"


def test_a_broken_host_is_tried_again_before_the_model_notices() -> None:
    with HermesSpec(Notes({"breaks": "infra", "times": 2}), concurrency=1, **ISOLATION) as spec:
        made = spec.environment_factory()
        made.reset(prompt=prompts(spec)[0])
        made.terminal(command="echo fox > note.txt")
        assert spec.reward_funcs[0](completions=["Done."], environments=[made]) == [1.0]
        assert made.record is not None
        assert made.record.infra_retries == 2


def test_a_group_that_failed_as_a_whole_moves_nothing(new_trainer: Callable[..., Any], tokenizer: Any) -> None:
    with HermesSpec(Notes({"breaks": "setup"}), concurrency=4, **ISOLATION) as spec:
        trainer = new_trainer(
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
        )
        before = [each.detach().clone() for each in trainer.model.parameters()]
        got = train(spec, trainer, tokenizer, writer(["fox"] * 4))
    assert all(math.isnan(reward) for reward in got["rewards"])
    assert got["advantages"] == [0.0] * 4
    assert all(bool((old == new).all()) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_a_sandbox_that_dies_under_the_model_gives_no_reward(new_trainer: Callable[..., Any], tokenizer: Any) -> None:
    with HermesSpec(Notes(), concurrency=4, **ISOLATION) as spec:
        trainer = new_trainer(
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
        )

        killed: list[bool] = []

        def say(prompt: str, row: int) -> str:
            if not killed:
                killed.append(True)
                kill_sandboxes(spec)
            return "Done." if "<tool_response>" in prompt else write("fox")

        got = train(spec, trainer, tokenizer, say)
        assert all(failure.startswith("infra: ") for failure in trainer._logs["extra"]["failure"])
        assert all(math.isnan(reward) for reward in got["rewards"])
        made = spec.environment_factory()
        made.reset(prompt=prompts(spec)[0])
        assert json.loads(made.terminal(command="echo up"))["output"].strip() == "up", "later rollouts work"


def test_a_rollout_whose_time_is_up_is_scored(tokenizer: Any) -> None:
    with HermesSpec(Notes(), concurrency=1, rollout_timeout=1.0, **ISOLATION) as spec:
        made = spec.environment_factory()
        made.reset(prompt=prompts(spec)[0])
        made.terminal(command="echo fox > note.txt")
        with pytest.raises(RolloutEnded, match="time is up"):
            made.terminal(command="sleep 60")
        assert spec.reward_funcs[0](completions=["Done."], environments=[made]) == [1.0]


def test_other_rewards_do_not_count_for_a_rollout_that_failed() -> None:
    def brevity(completions: Any, **_: Any) -> list[float | None]:
        return [0.25] * len(completions)

    with HermesSpec(Notes({}, {"breaks": "setup"}), rewards=[brevity], concurrency=2, **ISOLATION) as spec:
        made = [spec.environment_factory() for _ in range(2)]
        for each, prompt in zip(made, prompts(spec), strict=True):
            each.reset(prompt=prompt)
        rewards = [function(completions=["", ""], environments=made) for function in spec.reward_funcs]
    assert rewards == [[0.0, None], [0.25, None]]
    assert spec.reward_funcs[1].__name__ == "brevity"


def test_copies_of_a_spec_share_its_run() -> None:
    with HermesSpec(Notes(), concurrency=1, **ISOLATION) as spec:
        factory = pickle.loads(pickle.dumps(spec.environment_factory))
        assert factory()._run is spec.run


def test_a_closed_spec_says_so() -> None:
    spec = HermesSpec(Notes(), concurrency=1, **ISOLATION)
    made = spec.environment_factory()
    made.reset(prompt=prompts(spec)[0])
    spec.close()
    spec.close()
    with pytest.raises(UsageError, match="has ended"):
        made.terminal(command="ls")


def test_wrong_options_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(UsageError, match="concurency"):
        HermesSpec(Notes(), concurency=4)
    with pytest.raises(UsageError, match="unknown environment"):
        HermesSpec("nothing-of-the-kind").train_dataset  # noqa: B018


@pytest.mark.parametrize(
    "ending", ["pass", "raise KeyboardInterrupt", pytest.param("raise ValueError", marks=pytest.mark.stress)]
)
def test_a_program_that_closes_nothing_leaves_nothing(ending: str, tmp_path: Path) -> None:
    program = (
        "from hermes_trl import HermesSpec\n"
        "from tests.trl.conftest import ISOLATION, Notes\n"
        "spec = HermesSpec(Notes(), concurrency=2, **ISOLATION)\n"
        "made = spec.environment_factory()\n"
        "made.reset(**spec.train_dataset[0])\n"
        "made.terminal(command='sleep 1000 & echo up')\n"
        f"{ending}\n"
    )
    environment = {**os.environ, "HERMES_STATE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == {"pass": 0, "raise KeyboardInterrupt": -signal.SIGINT, "raise ValueError": 1}[ending]
    assert ending.removeprefix("raise ") in done.stderr or ending == "pass", done.stderr


def test_ctrl_c_in_a_call_ends_the_call() -> None:
    with HermesSpec(Notes(), concurrency=1, **ISOLATION) as spec:
        made = spec.environment_factory()
        made.reset(prompt=prompts(spec)[0])
        timer = threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            made.terminal(command="sleep 60")
        assert time.monotonic() - began < 30
        timer.join()
