"""A tiny model learns `boxes` over Tinker's SDK, on the open server of SkyRL.

    python examples/learning_run/with_tinker.py --out runs/tinker --skyrl .venv-skyrl/bin/python

`learn` is all that a user of Tinker writes. The rest makes a model that can write calls, serves it, and notes the
figures.
"""

import argparse
import json
import time
from pathlib import Path

import tinker
import torch
from boxes import Boxes
from hermes_testing.tiny_model.folder import make_model
from hermes_tinker import TinkerRun, grpo
from hermes_tinker.testing import skyrl_server
from warm_up import tokenizer_of, warm_up

GROUPS, SIZE = 8, 8
AGENT = {"max_token_length": 512, "max_tokens": 48, "max_turns": 3}


def learn(url, folder, *, batches, rate):
    """Train the model in this folder, and yield each step."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-none")
    training = service.create_lora_training_client(base_model=str(folder), rank=32)
    with TinkerRun(Boxes(), training, agent=AGENT, concurrency=GROUPS * SIZE) as run:
        yield from grpo(run, steps=batches, groups=GROUPS, size=SIZE, learning_rate=rate, loss="ppo", substeps=2)


def warmed_up(folder, steps, seed):
    """Save a tiny model that can write calls."""
    tokenizer = tokenizer_of(folder)
    model = make_model(tokenizer, width=64, layers=1, context=2048, seed=seed)
    warm_up(model, tokenizer, steps)
    model.save_pretrained(folder)


def main():
    """Read the options and train."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/tinker"), help="where the figures and the model go")
    options.add_argument("--skyrl", required=True, help="a Python with SkyRL's server, see docs/guides/tinker.md")
    options.add_argument("--batches", type=int, default=80)
    options.add_argument("--warm-up", type=int, default=400, help="supervised steps before the training")
    options.add_argument("--rate", type=float, default=3e-3, help="of the optimizer")
    options.add_argument("--seed", type=int, default=0)
    settings = options.parse_args()
    torch.set_num_threads(1)  # the other processor has the sandboxes
    settings.out.mkdir(parents=True, exist_ok=True)
    folder = (settings.out / "model").resolve()
    warmed_up(folder, settings.warm_up, settings.seed)
    with (
        (settings.out / "figures.jsonl").open("w") as figures,
        skyrl_server(settings.skyrl, folder, settings.out / "server") as url,
    ):
        began = time.monotonic()
        for step in learn(url, folder, batches=settings.batches, rate=settings.rate):
            seconds = round(time.monotonic() - began, 3)
            row = {"step": step.number, "rollouts": GROUPS * SIZE, "reward": step.reward, "seconds": seconds}
            print(json.dumps({**row, "drift": step.drift}), file=figures, flush=True)
            print(f"step {step.number:3d}  {seconds:6.0f} s  reward {step.reward:.3f}", flush=True)


if __name__ == "__main__":
    main()
