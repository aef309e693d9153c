"""Compares a session's start and a command of hermes-agent in its own docker environment and in our slots on docker.

    .venv-hermes/bin/python -m benchmarks.hermes_agent_slots [rounds]

Both make an environment by hermes-agent's own `_create_environment`, with the same image, and run commands by its own
`execute`. They take turns, so that both have the same load of the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

IMAGE = "hermes-test-python:bookworm"
THEIRS, OURS = "docker", "slots-docker"
COMMANDS = 10
"""Commands of each session."""

P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """Seconds of what was done, by name."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def time(self, what: str, where: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the work, and note how long it took."""
        began = time.perf_counter()
        done = work(*args, **kwargs)
        self.seconds[what, where].append(time.perf_counter() - began)
        return done


def opened(where: str, session: str) -> Any:
    """A session's environment, made by hermes-agent."""
    from tools import terminal_tool

    container = {"container_persistent": False, "docker_persist_across_processes": False}
    return terminal_tool._create_environment(
        where, IMAGE, "/root", 60, container_config=container, task_id=session, host_cwd=None
    )


def run(environment: Any) -> None:
    """A command of a session."""
    done = environment.execute("echo done")
    assert (done["returncode"], done["output"].strip()) == (0, "done"), done


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as home:
        Path(home, "config.yaml").write_text("plugins: {enabled: [hermes-rl]}\n")
        os.environ.update(HERMES_HOME=home, TERMINAL_ENV=OURS, TERMINAL_DOCKER_IMAGE=IMAGE)
        import model_tools  # noqa: F401 - loads the plugin

        measure(rounds)


def measure(rounds: int) -> None:
    clock = Clock()
    for where in (THEIRS, OURS):
        clock.time("first session", where, opened, where, "first").cleanup()
    for turn in range(rounds):
        for where in (THEIRS, OURS):
            environment = clock.time("session", where, opened, where, f"session-{turn}")
            for _ in range(COMMANDS):
                clock.time("command", where, run, environment)
            clock.time("end", where, environment.cleanup)
            if where == THEIRS:
                environment.wait_for_cleanup()
    print(f"{rounds} sessions with {COMMANDS} commands each, in ms; load {os.getloadavg()[0]:.1f}")
    for what in ("first session", "session", "command"):
        for name, of in (("median", statistics.median), ("least", min)):
            theirs, ours = (of(clock.seconds[what, where]) * 1000 for where in (THEIRS, OURS))
            print(
                f"{what:14} {name:7} {THEIRS} {theirs:8.1f}   {OURS} {ours:8.1f}   {theirs / ours:6.1f} times as fast"
            )


if __name__ == "__main__":
    main()
