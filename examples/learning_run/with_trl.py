"""A tiny model learns `boxes` with TRL's GRPOTrainer, whose tool calls run in hermes-rl's sandboxes.

    python examples/learning_run/with_trl.py --out runs/trl

`learn` is all that TRL needs of a user. The rest makes a model that can write calls, and notes the figures.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from boxes import Boxes
from hermes_testing.tiny_model.folder import make_model
from hermes_trl import HermesSpec
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template
from warm_up import tokenizer_of, warm_up

BATCH_SIZE = 64


def learn(folder, tokenizer, notes, *, batches, rate, seed):
    """Train the model in this folder."""
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH_SIZE // 2,
        steps_per_generation=2,
        num_generations=8,
        max_completion_length=160,
        max_steps=2 * batches,
        learning_rate=rate,
        lr_scheduler_type="constant",
        beta=0.1,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=seed,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
    )
    with HermesSpec(Boxes(), concurrency=BATCH_SIZE) as spec:
        GRPOTrainer(
            model=str(folder),
            args=config,
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            environment_factory=spec.environment_factory,
            reward_funcs=spec.reward_funcs,
            callbacks=[notes],
        ).train()


def warmed_up(folder, steps, seed):
    """Save a tiny model that can write calls, and return its tokenizer, which tells TRL how to read them."""
    tokenizer = tokenizer_of(folder)
    model = make_model(tokenizer, width=64, layers=1, context=2048, seed=seed)
    warm_up(model, tokenizer, steps)
    model.save_pretrained(folder)
    tokenizer.response_template = qwen3_template
    return tokenizer


class Figures(TrainerCallback):
    """Writes the mean reward of each batch to a file, as `plot.py` reads it."""

    def __init__(self, path):
        self._file = path.open("w")
        self._began = time.monotonic()
        self._number = 0

    def on_log(self, args, state, control, logs, **_):
        """Write a line. TRL logs the reward of a batch with the first of its steps."""
        if "reward" not in logs or state.global_step % 2 == 0:
            return
        seconds = round(time.monotonic() - self._began, 3)
        row = {"step": self._number, "rollouts": BATCH_SIZE, "reward": logs["reward"], "seconds": seconds}
        print(json.dumps(row), file=self._file, flush=True)
        print(f"step {self._number:3d}  {seconds:6.0f} s  reward {logs['reward']:.3f}", flush=True)
        self._number += 1


def main():
    """Read the options and train."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/trl"), help="where the figures and the model go")
    options.add_argument("--batches", type=int, default=80)
    options.add_argument("--warm-up", type=int, default=400, help="supervised steps before the training")
    options.add_argument("--rate", type=float, default=1e-3, help="of the optimizer")
    options.add_argument("--seed", type=int, default=0)
    settings = options.parse_args()
    torch.set_num_threads(1)  # the other processor has the sandboxes
    settings.out.mkdir(parents=True, exist_ok=True)
    tokenizer = warmed_up(settings.out / "model", settings.warm_up, settings.seed)
    notes = Figures(settings.out / "figures.jsonl")
    learn(
        settings.out / "model",
        tokenizer,
        notes,
        batches=settings.batches,
        rate=settings.rate,
        seed=settings.seed,
    )


if __name__ == "__main__":
    main()
