"""TRL's own `AsyncGRPOTrainer` on this processor, with our worker and a server that gets the trainer's weights.

What needs a GPU is replaced: NCCL, which sends the weights to vLLM, the attention kernel, and the GPU's name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_trl import HermesSpec

from tests.trl.conftest import ISOLATION, Notes, Served, kill_sandboxes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("trl_extra", "offline", "leak_check"),
    pytest.mark.long,
]


class EngineWeights:
    """Loads the trainer's weights into the server's model: TRL's `WeightTransferProtocol` without NCCL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._paused = ExitStack()

    def init_weight_transfer(self) -> None:
        """There is no group to join."""

    def pause(self) -> None:
        """Wait for the answers that are being sampled."""
        self._paused.enter_context(self._engine.weights())

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Copy them."""
        for name, weights in iterator:
            self._engine.model.get_parameter(name).data.copy_(weights)

    def resume(self) -> None:
        """Let the server go on."""
        self._paused.close()

    def destroy(self) -> None:
        """There is no group to leave."""
        self._paused.close()


def attend(query: Any, key: Any, value: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """Attention of each segment of queries to its own keys, the last ones of which are its own: the kernel's promise.

    Only for `causal` and without a window.
    """
    import torch

    parts = []
    for begin_q, end_q, begin_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        seen = end_k - begin_k - (end_q - begin_q)
        mask = torch.ones(end_q - begin_q, end_k - begin_k, dtype=torch.bool).tril(int(seen))
        q, k, v = (each.transpose(0, 1) for each in (query[begin_q:end_q], key[begin_k:end_k], value[begin_k:end_k]))
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


class Train(Protocol):
    def __call__(self, spec: HermesSpec, *, steps: int, after: Callable[[int], None] = ...) -> list[dict[str, float]]:
        """Train the served model for so many steps, and return what TRL logged of each."""
        ...


@pytest.fixture
def train(served: Served, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """TRL's trainer, with a server that gets its weights."""
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    kernels = SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks for the GPU's name
    dataset = async_grpo_trainer.RolloutQueueDataset
    monkeypatch.setattr(dataset, "_drain_traces", lambda self: None)  # it would wait for ever

    class AfterStep(TrainerCallback):
        def __init__(self, do: Callable[[int], None]) -> None:
            self._do = do

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._do(state.global_step)

    def run(
        spec: HermesSpec, *, steps: int, after: Callable[[int], None] = lambda step: None
    ) -> list[dict[str, float]]:
        served.model.save_pretrained(tmp_path / "model")
        config = AsyncGRPOConfig(
            output_dir=str(tmp_path / "trained"),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            num_generations=4,
            max_steps=steps,
            learning_rate=1e-3,
            vllm_server_base_url=served.agent["base_url"].removesuffix("/v1"),
            token_budget=-1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = AsyncGRPOTrainer(
            str(tmp_path / "model"),
            args=config,
            train_dataset=spec.train_dataset,
            processing_class=tokenizer,
            rollout_worker=spec.rollout_worker(4, groups=2, queue_size=8),
            weight_transfer=EngineWeights(served.engine),
            callbacks=[AfterStep(after)],
        )
        trainer.train()
        assert trainer.model_version == served.engine.version == steps + 1
        for one, other in zip(trainer.model.parameters(), served.model.parameters(), strict=True):
            assert bool((one == other).all()), "the server has other weights than the trainer"
        return [row for row in trainer.state.log_history if "ratio" in row]

    return run


@pytest.mark.parametrize("agent", ["model", pytest.param("program", marks=pytest.mark.stress)], indirect=True)
def test_it_trains_on_the_tokens_of_the_server_which_gets_its_weights(
    agent: dict[str, Any], served: Served, train: Train
) -> None:
    before = copy.deepcopy(served.model)
    with HermesSpec(Notes(), concurrency=8, **agent) as spec:
        log = train(spec, steps=4)
    assert len(log) == 4
    # Nothing had changed since the rollouts of the first step: TRL computed the logprobs that the server had given.
    assert log[0]["sample/staleness_max"] == 0
    assert log[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert log[-1]["sample/staleness_max"] > 0
    pairs = zip(before.parameters(), served.model.parameters(), strict=True)
    assert not all(bool((one == other).all()) for one, other in pairs), "the weights did not move"


@pytest.mark.parametrize("breaks", ["sandbox", pytest.param("verifier", marks=pytest.mark.stress)])
def test_what_fails_in_the_middle_is_left_out(breaks: str, served: Served, train: Train, sandboxes: Path) -> None:
    environment = Notes()

    def after(step: int) -> None:
        if step == 2 and breaks == "sandbox":
            kill_sandboxes(spec)
        elif step == 2:
            environment.hanging = 1

    options = {"verify_timeout": 5.0, "infra_retries": 0, "refills": 0, "concurrency": 8, **ISOLATION}
    with HermesSpec(environment, agent=served.agent, backend_config={"state_dir": str(sandboxes)}, **options) as spec:
        log = train(spec, steps=8, after=after)
    unscored = [row["hermes/unscored"] for row in log if row.get("hermes/unscored") is not None]
    assert max(unscored) > 0
    assert unscored[0] == unscored[-1] == 0
    assert not list(sandboxes.iterdir())


def test_a_server_that_ends_in_the_middle_ends_the_training(served: Served, train: Train, sandboxes: Path) -> None:
    def after(step: int) -> None:
        if step == 2:
            served.stop()

    options = {"concurrency": 8, "backend_config": {"state_dir": str(sandboxes)}, **ISOLATION}
    with (
        HermesSpec(Notes(), agent=served.agent, **options) as spec,
        pytest.raises(RuntimeError, match="the rollouts ended"),
    ):
        train(spec, steps=100, after=after)
    assert not list(sandboxes.iterdir())
