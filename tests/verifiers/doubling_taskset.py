"""A taskset of verifiers for tests: double a number; `kind` makes tasks that fail, or that don't fit."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.types import AssistantMessage, UserMessage


class DoublingConfig(vf.TasksetConfig):
    count: int = 2
    kind: str = "plain"


class DoublingData(vf.TaskData):
    number: int
    kind: str


class DoublingState(vf.State):
    given: str = ""


class DoublingTask(vf.Task[DoublingData, DoublingState]):
    async def setup(self, runtime: vf.Runtime, trace: vf.Trace) -> None:
        if self.data.kind == "setup fails":
            raise ValueError("the setup is broken")
        await runtime.write("given", str(self.data.number).encode())
        trace.state.given = (await runtime.read("given")).decode()

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["listed"] = (await runtime.run(["ls"], {})).stdout

    @vf.reward
    async def doubled(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        if self.data.kind == "reward fails":
            raise ValueError("the reward is broken")
        assert trace.state.given == str(self.data.number)
        done = await runtime.run(
            ["sh", "-c", 'test "$(cat answer)" = "$WANTED"'], {"WANTED": str(2 * int(trace.state.given))}
        )
        return float(done.exit_code == 0)

    @vf.reward(weight=0.5)
    async def spoken(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "Done." and trace.num_turns == 2)

    @vf.metric
    async def listed(self, trace: vf.Trace) -> float:
        return float("answer" in trace.info["listed"])

    def runtime_env(self) -> dict[str, str]:
        return {"KEY": "1"} if self.data.kind == "environment" else {}


class DoublingTaskset(vf.Taskset[DoublingTask, DoublingConfig]):
    def load(self) -> Iterator[DoublingTask]:
        more = {
            "user first": {"prompt": None},
            "network": {"network_block": ["example.org"]},
            "talk": {
                "prompt": [UserMessage(content="Hi"), AssistantMessage(content="Hi."), UserMessage(content="Double")]
            },
            "image": {"image": "python:3.12", "workdir": "/work"},
        }.get(self.config.kind, {})
        for number in range(1, self.config.count + 1):
            given = {
                "id": f"double-{number}",
                "prompt": "Double it",
                "number": number,
                "kind": self.config.kind,
                **more,
            }
            yield DoublingTask(DoublingData(**given), self.config.task)


__all__ = ["DoublingTaskset"]
