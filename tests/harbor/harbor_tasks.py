"""Task folders of Harbor for the tests, each from a few lines, and runs of them on Docker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime

BUSYBOX = "hermes-test-busybox:latest"
PYTHON = "hermes-test-python:bookworm"

SOLVE = "echo hello > /app/out\n"
"""A solution of the usual task."""

TEST = """
if grep -qx hello /app/out; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
"""The tests of the usual task."""


def write_task(
    folder: Path,
    toml: str = "",
    *,
    test: str | None = TEST,
    solve: str | None = SOLVE,
    instruction: str | None = "Write hello to /app/out.\n",
    image: str | None = BUSYBOX,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a task: a `task.toml` of these lines, the scripts, and more files by path. None leaves a file out."""
    named = f'docker_image = "{image}"\n' if image else ""
    if image in (BUSYBOX, PYTHON) and "workdir" not in toml:  # whose programs start in /
        named += 'workdir = "/app"\n'
    if "[environment]" in toml:
        toml = toml.replace("[environment]\n", f"[environment]\n{named}", 1)
    else:
        toml = f"{toml}\n[environment]\n{named}"
    scripts = {"tests/test.sh": test, "solution/solve.sh": solve}
    parts: dict[str, str | None] = {"task.toml": toml, "instruction.md": instruction, **(files or {})}
    parts |= {name: None if script is None else f"#!/bin/sh\n{script}" for name, script in scripts.items()}
    for name, text in parts.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


class Shell:
    """An agent that runs shell commands, one after the other. At None it says that it is done, and hears more."""

    name = "shell"

    def __init__(self, *commands: str | None) -> None:
        self.commands = commands
        self.answers: list[dict[str, Any]] = []

    async def run(self, task: AgentTask) -> AgentResult:
        task.result.messages.extend(task.messages)
        for command in self.commands:
            if command is None:
                task.result.messages.append({"role": "assistant", "content": "Done."})
                if (message := await task.follow_up()) is None:
                    break
                task.result.messages.append(message)
                continue
            answer = await task.tool_handler("terminal", {"command": command, "timeout": 60}, task.trajectory_id)
            self.answers.append(json.loads(answer))
        task.result.messages.append({"role": "assistant", "content": "Done."})
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        return


async def roll_out_here(
    runtime: Runtime, dataset: Path, agent: Any = "oracle", *, env: Any = (), **options: Any
) -> dict[str, Mapping[str, Any]]:
    """Return the records by item, of rollouts that have this host's system in place of images."""
    return await roll_out(
        runtime, dataset, agent, env={"accept": ["image"], **dict(env)}, **{"backend": "local", **options}
    )


async def roll_out(
    runtime: Runtime,
    dataset: Path,
    agent: Any = "oracle",
    *,
    environment: str = "harbor",
    env: Any = (),
    **options: Any,
) -> dict[str, Mapping[str, Any]]:
    """Return the records by item."""
    records: dict[str, Mapping[str, Any]] = {}
    await run_rollouts(
        runtime,
        environment,
        agent,
        env={"dataset_name": str(dataset), **dict(env)},
        on_record=lambda record: records.update({record["item_id"]: record}),
        **{"backend": "docker", "concurrency": 2, **options},
    )
    return records
