"""Rollouts an hour by verifiers: in our slots, and in its own subprocess runtime, on the same tasks in one run.

    .venv-verifiers/bin/python -m benchmarks.verifiers_rollouts [rollouts] [at a time]

Both sides have the same Env machinery, interception server, client and scripted endpoint, and the same conversation:
three answers, two commands, a check. Ours isolates the rollouts from each other and from this host (`user`), and resets
the slots. The subprocess runtime isolates nothing: a directory each. Its harness is the least that can do the work, a
program of the standard library, which starts faster than those that verifiers ships.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hermes_rl
import verifiers.v1 as vf
from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call
from hermes_verifiers.adapter import HermesEnvConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig

TASKS = 16

PROGRAM = """
import json, subprocess, sys, urllib.request
base, key, prompt = sys.argv[1:]
tool = {"type": "function", "function": {"name": "terminal", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}}}}
messages = [{"role": "user", "content": prompt}]
while True:
    body = json.dumps({"model": "scripted", "messages": messages, "tools": [tool]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        content = json.dumps({"output": done.stdout, "exit_code": done.returncode})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
"""


def solver(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """The model: does what the prompt asks for."""
    number = prompt.split()[1]
    yield call("terminal", command=f"echo {number} > out.txt")
    yield call("terminal", command="cat out.txt")
    return "Done."


class PeerData(vf.TaskData):
    check: str


class PeerTask(vf.Task[PeerData, vf.State]):
    @vf.reward
    async def reward(self, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["sh", "-c", self.data.check], {})).exit_code == 0)


class PeerTaskset(vf.Taskset[PeerTask, vf.TasksetConfig]):
    def load(self) -> Iterator[PeerTask]:
        for row in rows():
            yield PeerTask(PeerData(name=row["id"], prompt=row["prompt"], check=row["check"]), self.config.task)


class PeerHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt], {})


def rows() -> list[dict[str, str]]:
    """The tasks of both."""
    return [
        {"id": f"task-{n}", "prompt": f"Write {n} into out.txt", "check": f"grep -qx {n} out.txt"} for n in range(TASKS)
    ]


def peer() -> Any:
    """The Env of verifiers' own parts. Its loader finds them by a module's name."""
    module: Any = types.ModuleType("peer_of_hermes_rl")
    module.PeerTaskset, module.PeerHarness, module.__all__ = PeerTaskset, PeerHarness, ["PeerTaskset", "PeerHarness"]
    sys.modules[module.__name__] = module
    agent = {"runtime": {"type": "subprocess"}}
    return SingleAgentEnv(SingleAgentEnvConfig.model_validate({"taskset": {"id": module.__name__}, "agent": agent}))


def ours(folder: Path, at_a_time: int) -> Any:
    """The Env of ours."""
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    taskset = {"id": "hermes_rl", "env": {"dataset_name": str(path)}, "run": {"concurrency": at_a_time}}
    return hermes_rl.HermesEnv(HermesEnvConfig.model_validate({"taskset": taskset}))


async def rate(env: Any, ctx: ModelContext, rollouts: int, at_a_time: int) -> tuple[float, float]:
    """Return rollouts an hour from the first begun to the last ended, and the seconds that opening and closing took."""
    room, opened = asyncio.Semaphore(at_a_time), time.monotonic()
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, rollouts // TASKS)]
        began = time.monotonic()
        episodes = await asyncio.gather(*(env.run_slot(slot, ctx, semaphore=room) for slot in slots))
        ended = time.monotonic()
    rewards = [episode.traces[0].reward for episode in episodes]
    assert rewards == [1.0] * len(slots), [episode.traces[0].errors for episode in episodes if not episode.ok][:1]
    return len(slots) / (ended - began) * 3600, time.monotonic() - ended + began - opened


async def main(rollouts: int, at_a_time: int) -> None:
    """Print the figures of both, in turns: ours, theirs, ours, theirs."""
    async with ScriptedServer(ToolScript(solver)) as server:
        client = vf.EvalClientConfig(base_url=server.base_url, api_key_var="NONE")
        ctx = ModelContext(model="scripted", client=client)
        for turn in range(2):
            for name in ("slots of hermes-rl, isolation user", "subprocess runtime, no isolation"):
                with tempfile.TemporaryDirectory() as folder:
                    env = ours(Path(folder), at_a_time) if name.startswith("slots") else peer()
                    found, aside_s = await rate(env, ctx, rollouts, at_a_time)
                print(
                    f"{turn + 1}. {name}: {found:,.0f} rollouts/h ({rollouts} rollouts, {at_a_time} at a time; ", end=""
                )
                print(f"opening and closing {aside_s:.1f} s)", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*(int(given) for given in [*sys.argv[1:], "256", "64"][:2])))
