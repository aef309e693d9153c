"""A run in a folder, its records read again, and a dataset made of the rollouts that solved their task."""

import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

from hermes_core import ExportFilters, Runtime, export_run, read_records, run_rollouts

TASKS = [
    {"id": word, "prompt": f"Write {word} to out.txt.", "check": f"grep -qx {word} out.txt"} for word in ("yes", "no")
]


def script(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """A model that always writes the same."""
    yield call("write_file", path="out.txt", content="yes\n")
    return "Done."


async def roll_out(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    async with Runtime() as runtime, ScriptedServer(ToolScript(script)) as server:
        await run_rollouts(
            runtime,
            "tasks",
            env={"dataset_name": str(folder / "tasks.jsonl")},
            settings={"model": "scripted", "base_url": server.base_url},
            out_dir=folder / "run",
            group_size=2,
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(roll_out(folder))
        rewards = defaultdict(list)
        for record in read_records(folder / "run"):
            if record["failure"] is None:  # a failure has no reward: it says nothing about the agent
                rewards[record["item_id"]].append(record["reward"])
        print(dict(sorted(rewards.items())))
        done = export_run(folder / "run", "openai", folder / "dataset", filters=ExportFilters(solved=True, per_item=1))
        print("rows:", done.rows, "files:", *sorted(path.name for path in (folder / "dataset").iterdir()))


main()
