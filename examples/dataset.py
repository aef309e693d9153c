"""Two tasks of shell commands, each solved by its own solution, and then left alone: what the checks are worth."""

import asyncio
import json
import tempfile
from pathlib import Path

from hermes_core import Runtime, run_rollouts

TASKS = [
    {
        "id": "greet",
        "prompt": "Write 'hello' to greeting.txt.",
        "check": "grep -qx hello greeting.txt",
        "solution": "echo hello > greeting.txt",
    },
    {
        "id": "sort",
        "prompt": "Sort words.txt in place.",
        "setup": "printf 'pear\\nfig\\n' > words.txt",
        "check": "printf 'fig\\npear\\n' | cmp - words.txt",
        "solution": "sort -o words.txt words.txt",
    },
]


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "tasks.jsonl"
        dataset.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
        async with Runtime() as runtime:
            for agent in ("oracle", "nop"):
                summary = await run_rollouts(runtime, "tasks", agent, env={"dataset_name": str(dataset)}, group_size=2)
                print(f"{agent}: {summary.scored} rollouts, mean reward {summary.mean_reward}")


asyncio.run(main())
