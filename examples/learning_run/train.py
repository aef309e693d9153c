"""A tiny model learns `boxes`: a GRPO trainer on one side of Atropos' API, hermes-rl on the other.

    python examples/learning_run/train.py --out runs/learning

Three processes: this one, which trains the model and serves it as vLLM would; `run-api`; and `hermes-rl atropos serve
boxes`, in which every command of the model runs in a sandbox.
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import json
import sys
import time
from pathlib import Path

import grpo
import httpx
import torch
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer
from warm_up import FORMS, tokenizer_of, warm_up

GROUP_SIZE = 8
BATCH_SIZE = 64
MAX_TOKENS = 2048
BASELINE = 4
"""Batches that are only looked at: what the warm-up alone is worth."""
TOKENIZER = "tokenizer"
"""Its folder, among the other files of the run."""
PARTS = ("tokens", "masks", "inference_logprobs", "scores")
"""What Atropos sends of a group: a list each, with one entry for each sequence."""


@contextlib.asynccontextmanager
async def process(*command, log):
    """A process that ends with the block, its output in a file."""
    with log.open("wb") as output:
        running = await asyncio.create_subprocess_exec(*map(str, command), stdout=output, stderr=output)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.terminate()
        await running.wait()


def api_command(port):
    return [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", port]


def environment_command(api, server, out, agent):
    """The environment, as anybody would start it."""
    options = {
        "env.rollout_server_url": api,
        "env.agent": agent,
        "env.agent_options": json.dumps(FORMS[agent].settings),
        "env.tokenizer_name": out / TOKENIZER,
        "env.group_size": GROUP_SIZE,
        "env.max_token_length": MAX_TOKENS,
        "env.max_agent_turns": 3,
        "env.ensure_scores_are_not_same": False,  # or the curve would leave out the groups that are all right
        "env.max_turn_tokens": 48,
        "env.max_num_workers": 4,
        "env.max_batches_offpolicy": 1,
        "env.include_messages": False,
        "env.trajectories_path": out / "trajectories.jsonl",
        "env.tool_call_parser": "hermes",
        "openai.server_type": "vllm",
        "openai.base_url": server,
        "openai.model_name": "tiny",
        "openai.tokenizer_name": out / TOKENIZER,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "hermes_core", "atropos", "serve", "boxes", *flags]


async def register(client):
    """Tell the API who trains, once it answers."""
    details = {
        "wandb_group": "learning-run",
        "wandb_project": "boxes",
        "batch_size": BATCH_SIZE,
        "max_token_len": MAX_TOKENS,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 1_000_000,
    }
    while True:
        with contextlib.suppress(httpx.TransportError):
            (await client.post("/register", json=details)).raise_for_status()
            return
        await asyncio.sleep(0.2)


async def batches(client, environment):
    """Batches of groups, as they come."""
    while environment.returncode is None:
        if groups := (await client.get("/batch")).raise_for_status().json()["batch"]:
            yield [[grpo.Rollout(*each) for each in zip(*map(group.get, PARTS), strict=True)] for group in groups]
        else:
            await asyncio.sleep(0.1)
    raise RuntimeError("the environment has ended: see environment.log")


def of_record(groups, sampled):
    """How many tokens to train on the server's own record has, in the same answers after the same prompts, with these
    logprobs; and how many it does not have."""
    record = {(each.prompt, each.tokens, each.logprobs) for each in sampled}
    counts = {"recorded": 0, "unrecorded": 0}
    for rollout in itertools.chain.from_iterable(groups):
        begin = 0
        for masked, masks in itertools.groupby(rollout.masks, lambda mask: mask == grpo.MASKED):
            end = begin + len(list(masks))
            answer = tuple(rollout.tokens[:begin]), tuple(rollout.tokens[begin:end]), tuple(rollout.logprobs[begin:end])
            if not masked:
                counts["recorded" if answer in record else "unrecorded"] += end - begin
            begin = end
    return counts


def learn(engine, reference, optimizer, groups):
    """Two steps, each on half of the batch, while nothing is sampled. Gives the largest change of a logprob."""
    half = len(groups) // 2
    with engine.weights() as model:
        return max(grpo.step(model, reference, optimizer, part) for part in (groups[:half], groups[half:]))


async def run(settings):
    """Warm up, then train until the steps are done."""
    torch.set_num_threads(1)  # the other processor has the sandboxes
    settings.out.mkdir(parents=True, exist_ok=True)
    form = FORMS[settings.agent]
    tokenizer = tokenizer_of(settings.out / TOKENIZER, form)
    model = make_model(tokenizer, width=64, layers=1, context=MAX_TOKENS, seed=settings.seed)
    loss = await asyncio.to_thread(warm_up, model, tokenizer, settings.warm_up, form)
    print(f"warmed up: {sum(each.numel() for each in model.parameters())} weights, loss {loss:.3f}", flush=True)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)
    api = f"http://127.0.0.1:{settings.port}"
    async with contextlib.AsyncExitStack() as open_:
        engine = open_.enter_context(Engine(model))
        server = await open_.enter_async_context(TinyModelServer(engine, tokenizer))
        await open_.enter_async_context(process(*api_command(settings.port), log=settings.out / "api.log"))
        client = await open_.enter_async_context(httpx.AsyncClient(base_url=api, trust_env=False, timeout=60))
        await register(client)
        await client.get("/batch")  # the API lets environments in once the trainer has asked
        command = environment_command(api, server.base_url, settings.out, settings.agent)
        environment = await open_.enter_async_context(process(*command, log=settings.out / "environment.log"))
        figures = open_.enter_context((settings.out / "figures.jsonl").open("w"))
        began, number = time.monotonic(), 0
        async with contextlib.aclosing(batches(client, environment)) as incoming:
            async for groups in incoming:
                scores = [each.score for group in groups for each in group]
                row = {"step": number, "rollouts": len(scores), "reward": sum(scores) / len(scores)}
                row |= of_record(groups, engine.sampled.copy())
                if number >= BASELINE:
                    row["moved"] = await asyncio.to_thread(learn, engine, reference, optimizer, groups)
                row["seconds"] = round(time.monotonic() - began, 3)
                print(json.dumps(row), file=figures, flush=True)
                print(f"step {number:3d}  {row['seconds']:6.0f} s  reward {row['reward']:.3f}", flush=True)
                number += 1
                if number == settings.steps:
                    break


def main():
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/learning"), help="where the figures and logs go")
    options.add_argument("--agent", choices=FORMS, default="model", help="`program` is examples/agent_program/agent.py")
    options.add_argument("--steps", type=int, default=80, help="batches")
    options.add_argument("--warm-up", type=int, default=400, help="supervised steps before the training")
    options.add_argument("--rate", type=float, default=1e-3, help="of the optimizer")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--port", type=int, default=8000, help="of the API, on the loopback interface")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
