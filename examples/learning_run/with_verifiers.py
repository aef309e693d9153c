"""A tiny model learns `boxes` with verifiers' environments, interception server and tokens, and the steps of `grpo`.

    .venv-verifiers/bin/python examples/learning_run/with_verifiers.py --out runs/verifiers

verifiers has no trainer of its own, and prime-rl, which trains with it, needs GPUs. `batches` does what prime-rl does
with an environment: it rolls out groups with a `TrainClient`, whose tokens and logprobs are the server's. The rest is
as in `train.py`.
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import json
import time
from pathlib import Path

import grpo
import torch
import verifiers.v1 as vf
from hermes_rl import HermesEnv
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer
from hermes_verifiers.adapter import HermesEnvConfig
from hermes_verifiers.branches import branches
from train import BASELINE, BATCH_SIZE, GROUP_SIZE, MAX_TOKENS, learn
from verifiers.v1.clients import ModelContext
from warm_up import FORMS, tokenizer_of, warm_up


async def batches(base_url, tokenizer, agent):
    """Batches of groups, for ever, from an environment of verifiers."""
    taskset = {"id": "hermes_rl", "environment": "boxes", "run": {"concurrency": BATCH_SIZE}}
    harness = {"id": "hermes_rl", "agent": agent, "settings": {"max_turns": 3, **FORMS[agent].settings}}
    env = HermesEnv(HermesEnvConfig.model_validate({"taskset": taskset, "agent": {"harness": harness}}))
    client = vf.TrainClientConfig(
        base_url=base_url,
        api_key_var="NONE",
        renderer={"name": "default", "tool_parser": "qwen3"},
        renderer_model_name=tokenizer,
    )
    context = ModelContext("tiny", client, vf.SamplingConfig(temperature=1.0, max_tokens=48))
    tasks = itertools.cycle(env.taskset)
    async with env.serving():
        while True:
            some = itertools.islice(tasks, BATCH_SIZE // GROUP_SIZE)
            groups = await asyncio.gather(*(group(env, task, context) for task in some))
            yield [each for each in groups if len(each) > 1]  # one alone has nothing to be compared with


async def group(env, task, context):
    """Roll out a task, and return the sequences of its rollouts. Those that failed are left out."""
    episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in env.slots(task, GROUP_SIZE)))
    traces = [trace for episode in episodes for trace in episode.traces if trace.ok]
    return [rollout(branch, trace.reward) for trace in traces for branch in branches(trace)]


def rollout(branch, reward):
    """Return one sequence of a trace as `grpo` takes it."""
    masks = [token if own else grpo.MASKED for token, own in zip(branch.tokens, branch.mask, strict=True)]
    return grpo.Rollout(branch.tokens, masks, branch.logprobs, reward)


async def run(settings):
    """Warm up, then train until the steps are done."""
    torch.set_num_threads(1)  # the other processor has the sandboxes
    settings.out.mkdir(parents=True, exist_ok=True)
    folder = settings.out / "tokenizer"
    form = FORMS[settings.agent]
    tokenizer = tokenizer_of(folder, form)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # one token each, as in Qwen: verifiers' parser wants it
    tokenizer.save_pretrained(folder)
    model = make_model(tokenizer, width=64, layers=1, context=MAX_TOKENS, seed=settings.seed)
    await asyncio.to_thread(warm_up, model, tokenizer, settings.warm_up, form)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)
    async with contextlib.AsyncExitStack() as open_:
        engine = open_.enter_context(Engine(model))
        server = await open_.enter_async_context(TinyModelServer(engine, tokenizer, wires=["tokens"]))
        figures = open_.enter_context((settings.out / "figures.jsonl").open("w"))
        endless = batches(server.base_url, str(folder), settings.agent)
        incoming = await open_.enter_async_context(contextlib.aclosing(endless))
        began = time.monotonic()
        for number in range(settings.steps):
            groups = await anext(incoming)
            scores = [each.score for group in groups for each in group]
            row = {"step": number, "rollouts": len(scores), "reward": sum(scores) / len(scores)}
            if number >= BASELINE:
                row["moved"] = await asyncio.to_thread(learn, engine, reference, optimizer, groups)
            row["seconds"] = round(time.monotonic() - began, 3)
            print(json.dumps(row), file=figures, flush=True)
            print(f"step {number:3d}  {row['seconds']:6.0f} s  reward {row['reward']:.3f}", flush=True)


def main():
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/verifiers"), help="where the figures go")
    options.add_argument("--agent", choices=FORMS, default="model", help="`program` is examples/agent_program/agent.py")
    options.add_argument("--steps", type=int, default=80, help="batches")
    options.add_argument("--warm-up", type=int, default=400, help="supervised steps before the training")
    options.add_argument("--rate", type=float, default=1e-3, help="of the optimizer")
    options.add_argument("--seed", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
