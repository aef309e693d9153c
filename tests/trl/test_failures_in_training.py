"""Sandboxes that die, endpoints that end and verifiers that hang while TRL trains: what the trainer gets, and no leak.

Each training has three steps, and something breaks in the second. The third needs every slot, so none was lost. A
verification that hangs once is done again, so it costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hermes_trl import HermesSpec

from hermes_core import ModelError
from tests.trl.conftest import ISOLATION, Notes, Served, call, kill_sandboxes, scripted

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("trl_extra", "offline", "leak_check")]

ROLLOUTS = 4

Batches = list[list[float | None]]


def options(sandboxes: Path) -> dict[str, Any]:
    """The options of a run in which nothing is tried again, and with a folder for its sandboxes."""
    never = {"infra_retries": 0, "refills": 0}
    place = {"state_dir": str(sandboxes)}
    return {"concurrency": ROLLOUTS, "verify_timeout": 5.0, "backend_config": place, **never, **ISOLATION}


def noting(spec: HermesSpec, batches: Batches) -> Callable[..., list[float | None]]:
    """The reward function, which notes what TRL gets for each batch."""
    (function,) = spec.reward_funcs

    def environment_reward(**given: Any) -> list[float | None]:
        batches.append(function(**given))
        return batches[-1]

    return environment_reward


@pytest.mark.parametrize(("breaks", "lost"), [("sandbox", ROLLOUTS), ("verifier", 0)])
def test_with_an_environment_factory(
    breaks: str, lost: int, new_trainer: Callable[..., Any], tokenizer: Any, sandboxes: Path
) -> None:
    environment, batches, broken = Notes(), Batches(), []
    with HermesSpec(environment, **options(sandboxes)) as spec:
        trainer = new_trainer(
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=noting(spec, batches),
            config={"max_steps": 3},
        )

        def say(prompt: str, row: int) -> str:
            if trainer.state.global_step == 1 and not broken:
                broken.append(breaks)
                if breaks == "sandbox":
                    kill_sandboxes(spec)
                environment.hanging = breaks == "verifier"
            return "Done." if "<tool_response>" in prompt else call(f"echo {['ant', 'fox'][row % 2]} > note.txt")

        scripted(trainer, tokenizer, say)
        trainer.train()
    assert [batch.count(None) for batch in batches] == [0, lost, 0]
    assert batches[0] == batches[2] == [0.0, 1.0, 0.0, 1.0]
    assert not list(sandboxes.iterdir())


@pytest.mark.few(0, 1)
@pytest.mark.parametrize("breaks", ["sandbox", "verifier", "endpoint"])
def test_with_a_rollout_func(breaks: str, served: Served, new_trainer: Callable[..., Any], sandboxes: Path) -> None:
    environment, batches, broken, plan = Notes(), Batches(), [], served.engine.plan
    with HermesSpec(environment, agent=served.agent, **options(sandboxes)) as spec:
        trainer = new_trainer(
            served.model,
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=noting(spec, batches),
            config={"max_steps": 3},
        )

        def breaking(prompt: Any, chance: Any) -> Any:
            if trainer.state.global_step == 1 and not broken:
                broken.append(breaks)
                if breaks == "sandbox":
                    kill_sandboxes(spec)
                elif breaks == "endpoint":
                    threading.Thread(target=served.stop).start()  # not in the server's own thread
                environment.hanging = breaks == "verifier"
            return plan(prompt, chance)

        served.engine.plan = breaking
        if breaks == "endpoint":
            with pytest.raises(ModelError):
                trainer.train()
        else:
            trainer.train()
    lost = [batch.count(None) for batch in batches]
    if breaks == "sandbox":
        assert lost[::2] == [0, 0]
        assert lost[1] > 0  # those that had no slot yet get one in the next sandbox
    else:
        assert lost == {"verifier": [0, 0, 0], "endpoint": [0]}[breaks]
    assert not list(sandboxes.iterdir())
