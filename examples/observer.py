"""A plugin that watches: it counts the tools that were called, and how the rollouts ended."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

from hermes_core import Runtime, hookimpl, run_rollouts


class Counts:
    """Observers are plain functions. They are called on the event loop, so they must be quick."""

    def __init__(self) -> None:
        self.tools: Counter[str] = Counter()
        self.rewards: list[float | None] = []

    @hookimpl
    def hermes_tool_called(self, tool_name: str) -> None:
        self.tools[tool_name] += 1

    @hookimpl
    def hermes_trajectory_finished(self, record: Mapping[str, Any]) -> None:
        self.rewards.append(record["reward"])


def script(prompt: str) -> Generator[ScriptedCall, Any, str]:
    yield call("write_file", path="out.txt", content="1\n")
    yield call("terminal", command="cat out.txt")
    return "Done."


async def main() -> None:
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "tasks.jsonl"
        dataset.write_text(json.dumps({"id": "one", "prompt": "Write 1 to out.txt.", "check": "grep -qx 1 out.txt"}))
        async with Runtime(plugins=[counts]) as runtime, ScriptedServer(ToolScript(script)) as server:
            await run_rollouts(
                runtime,
                "tasks",
                env={"dataset_name": str(dataset)},
                settings={"model": "scripted", "base_url": server.base_url},
                group_size=3,
            )
    print(dict(counts.tools), counts.rewards)


asyncio.run(main())
