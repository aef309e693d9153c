"""What a rollout of each coding agent takes: `python -m benchmarks.coding_agents [NAME…]`.

It fetches the agents, and runs each once on a small task with three model calls that a script answers at once. What it
measures is the program with all that it starts, and hardly depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hermes_agents
from hermes_agents.program import ProgramAgent, ProgramSettings
from hermes_testing.scripted_server import FEWEST, Reply, ScriptedServer, call

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

NAMES = (
    *("codex", "claude-code", "pi", "mini-swe-agent", "kimi-code", "hermes", "opencode", "qwen-coder", "aider"),
    *("gemini-cli", "terminus-2"),
)
ROW = {
    "id": "calc",
    "prompt": "Fix the sum in calc.py.",
    "setup": ["printf 'def add(a, b):\\n    return a - b\\n' >calc.py"],
    "check": "PYTHONPATH=. python3 -c 'import calc; assert calc.add(2, 3) == 5'",
}
MEND = "sed -i 's/a - b/a + b/' calc.py"
STEPS = (f"cat calc.py; {MEND}", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
"""The commands. The last one is how mini-swe-agent ends."""
WHOLE = "calc.py\n```\ndef add(a, b):\n    return a + b\n```\n"
"""What is answered to an agent without tools that takes files as text."""

MEASURED = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\ntook", used.ru_utime + used.ru_stime, used.ru_maxrss, flush=True)
sys.exit(status)
"""
"""Runs a command, and says the processor time of all its processes and the memory of the largest."""


def answer(request: dict[str, Any]) -> Reply:
    """Play the model, with whichever tool runs commands."""
    if request.get("max_tokens") in FEWEST:
        return Reply("Hello")
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    tools = [tool["function"] for tool in request.get("tools") or ()]
    if not tools:
        return _as_text(request, turn)
    if turn == len(STEPS):
        return Reply("I fixed it.", usage=(100, 5))
    name, arguments = next(found for found in map(_to_run, tools) if found is not None)
    argument, *others = arguments
    return Reply(None, [call(name, **{argument: STEPS[turn]}, **dict(others))], usage=(100, 5))


def _to_run(tool: Mapping[str, Any]) -> tuple[str, Sequence[Any]] | None:
    """Return a tool that runs commands: its name, the argument for them, and other arguments that it wants."""
    parameters = tool["parameters"]
    argument = next((each for each in ("cmd", "command") if each in parameters["properties"]), None)
    if argument is None or re.search(r"file|edit|list|task_tracker", tool["name"]):
        return None
    others = [(each, _ANY[parameters["properties"][each]["type"]]) for each in parameters["required"]]
    return tool["name"], [argument, *(other for other in others if other[0] != argument)]


_ANY = {"string": "Run it", "boolean": False}


def _as_text(request: Mapping[str, Any], turn: int) -> Reply:
    """Play the model for agents without tools."""
    if "keystrokes" not in str(request["messages"][0]["content"]):
        return Reply(WHOLE, usage=(100, 5))
    keys = [{"keystrokes": f"{STEPS[0]}\n", "duration": 0.5}] if turn == 0 else []
    said = {"analysis": "I look.", "plan": "I fix it.", "commands": keys, "task_complete": not keys}
    return Reply(json.dumps(said), usage=(100, 5))


async def measure(runtime: Runtime, folder: Path, name: str) -> str:
    """Return what one rollout takes, as a line."""
    plain: type[ProgramAgent] = runtime.agents.entry(name).load()
    program = dataclasses.replace(plain.program, argv=("python3", "-c", MEASURED, *plain.program.argv))
    records: list[Mapping[str, Any]] = []
    async with ScriptedServer(answer) as server:
        given = {"model": "scripted", "base_url": server.base_url, "api_key": "none"}
        settings = ProgramSettings.model_validate(given)
        await run_rollouts(
            runtime,
            "tasks",
            type("Measured", (plain,), {"program": program})(settings),
            env={"dataset_name": str(folder / "tasks.jsonl")},
            isolation="namespace",
            on_record=records.append,
        )
    [record] = records
    took = re.search(r"^took (\S+) (\d+)$", record.get("program", {}).get("output", ""), re.MULTILINE)
    if record["reward"] != 1.0 or took is None:
        return f"{name} {program.version}: {record['failure'] or record['stop_reason']}"
    return f"{name} {program.version}: {float(took[1]):.1f} s of a processor, {int(took[2]) / 1000:.0f} MB"


async def main(names: Sequence[str]) -> None:
    """Measure these agents, one after the other."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tasks.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
        async with Runtime(
            Settings(state_dir=folder / "state"), load_entry_points=False, plugins=[hermes_agents]
        ) as runtime:
            for name in names:
                print(await measure(runtime, folder, name), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or NAMES))
