"""What the interception server of verifiers needs for the programs of `agent_programs.py`, which starts this in
`.venv-verifiers`. Its argument is the URL of the endpoint; it prints a JSON object.

Each program runs in verifiers' subprocess runtime, which isolates nothing, and its answers are not streamed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig

from benchmarks.agent_programs import AT_ONCE, PROGRAM, TASK, TURNS, measured


class ProgramTask(vf.Task[vf.TaskData, vf.State]):
    """The only one."""


class ProgramTaskset(vf.Taskset[ProgramTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ProgramTask]:
        yield ProgramTask(vf.TaskData(name="notes", prompt=TASK), self.config.task)


class ProgramHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        env = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret, "OPENAI_MODEL": "scripted"}
        return await runtime.run_program([sys.executable, "-c", PROGRAM, data.prompt], env)


def environment() -> Any:
    """Return the Env, whose loader finds its parts by a module's name."""
    module: Any = types.ModuleType("agent_programs_of_hermes_rl")
    module.ProgramTaskset, module.ProgramHarness = ProgramTaskset, ProgramHarness
    module.__all__ = ["ProgramTaskset", "ProgramHarness"]
    sys.modules[module.__name__] = module
    agent = {"runtime": {"type": "subprocess"}}
    return SingleAgentEnv(SingleAgentEnvConfig.model_validate({"taskset": {"id": module.__name__}, "agent": agent}))


async def main(url: str) -> None:
    """Do one round, after a single rollout."""
    env = environment()
    ctx = ModelContext(model="scripted", client=vf.EvalClientConfig(base_url=url, api_key_var="NONE"))
    async with env.serving():

        async def some(count: int) -> None:
            slots = [slot for task in env.taskset for slot in env.slots(task, count)]
            episodes = await asyncio.gather(*(env.run_slot(slot, ctx) for slot in slots))
            for episode in episodes:
                assert episode.ok, episode.traces[0].errors
                assert episode.traces[0].num_turns == TURNS + 1, episode.traces[0]

        await some(1)
        gc.collect()
        gc.freeze()
        print(json.dumps(asdict(await measured(lambda: some(AT_ONCE), AT_ONCE)())))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
