"""A typed function as a tool, called by a model that answers from a script: a whole rollout without a model."""

import asyncio
import json
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

from hermes_core import CallContext, Runtime, ToolRegistrar, function_tool, hookimpl, run_rollouts


async def count_words(ctx: CallContext, path: str) -> dict[str, int]:
    """Count the words of a file."""
    content = await ctx.require_commands().read_file(path, limit=1_000_000)
    return {"words": len(content.data.split())}


class Plugin:
    """What an entry point of the group `hermes_core` names in a package."""

    @hookimpl
    def hermes_register_tools(self, registry: ToolRegistrar) -> None:
        registry.add(function_tool(count_words, toolsets="words"))


def script(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """What the model does: it yields calls and receives their answers."""
    answer = yield call("count_words", path="text.txt")
    yield call("terminal", command=f"echo {answer['words']} > count.txt")
    return f"There are {answer['words']} words."


async def main() -> None:
    task = {
        "id": "count",
        "prompt": "How many words has text.txt? Write the number to count.txt.",
        "setup": "echo to be or not to be > text.txt",
        "check": "grep -qx 6 count.txt",
    }
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "tasks.jsonl"
        dataset.write_text(json.dumps(task))
        async with Runtime(plugins=[Plugin()]) as runtime, ScriptedServer(ToolScript(script)) as server:
            summary = await run_rollouts(
                runtime,
                "tasks",
                "model",
                env={"dataset_name": str(dataset), "enabled_toolsets": ["terminal", "words"]},
                settings={"model": "scripted", "base_url": server.base_url},
                on_record=lambda record: print(*(each["name"] for each in record["calls"])),
            )
    print("mean reward", summary.mean_reward)


asyncio.run(main())
