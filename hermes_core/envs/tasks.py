"""The environment `tasks`: a JSONL file of commands that set a task up, check it and solve it. It needs no code.

A check runs where the agent worked, and reads what the agent left there: that is what such tasks are about. It must not
read more of it than its author wrote down. So a check has a home and a temporary directory that the agent never saw, a
PATH without the agent's directories, and a Python that imports nothing from the workspace unless told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hermes_core.environment import Environment, EnvironmentConfig, Item, Need
from hermes_core.envs.rollout import Rollout
from hermes_core.envs.rows import load_rows
from hermes_core.errors import CommandError, SetupFailed
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.sandbox.commands import CommandResult

OUTPUT_KEPT = 4000
"""Number of characters of a check's output that the details keep."""


# The agent is dead. Its directories are not used to make new ones. Prints the values for the check's variables, one per
# line.
_ROOM = """set -e
ifs=$IFS IFS=: path=
for part in $PATH; do
  case $part in
    "${HOME:-/}"|"${HOME:-/}"/*|"${TMPDIR:-/tmp}"|"${TMPDIR:-/tmp}"/*|"$PWD"|"$PWD"/*) ;;
    /tmp|/tmp/*|/var/tmp|/var/tmp/*|/dev/shm|/dev/shm/*) ;;
    /*) path=$path${path:+:}$part ;;
  esac
done
IFS=$ifs PATH=$path
room=$(mktemp -d)
mkdir "$room/home" "$room/tmp"
printf '%s\\n' "$room" "$path" "$HOME" "$TMPDIR"
"""

_PYTHON = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONPATH": ""}


class TasksConfig(EnvironmentConfig):
    """The settings of `tasks`."""

    dataset_name: str
    """The JSONL file."""
    setup_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of each setup command, and of each command of the solution."""
    needs: tuple[Need, ...] = ()
    """What each slot must have to itself: `network` if tasks name a port, `tmp` if they name a file in /tmp."""
    check_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of each command of the check; after it, the task counts as not done."""


def _commands(value: object) -> tuple[str, ...]:
    commands = value if isinstance(value, list | tuple) else [value]
    for command in commands:
        if not isinstance(command, str) or not command.strip():
            raise ValueError("must be a shell command or a list of shell commands")
        if "\0" in command:
            raise ValueError("holds a NUL byte, which no command can")
    return tuple(commands)


def _files(value: object) -> object:
    for name in value if isinstance(value, Mapping) else ():
        path = PurePosixPath(str(name))
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in str(name):
            raise ValueError(f"has {str(name)!r}, which is not the path of a file below the check's home")
    return value


Commands = Annotated[tuple[str, ...], BeforeValidator(_commands)]
Files = Annotated[dict[str, str], BeforeValidator(_files)]


class TaskRow(BaseModel):
    """One line of the file. Commands are run by the slot's shell in its workspace, one after the other, until one
    fails."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(min_length=1)
    """The row's name, unique in the file."""
    prompt: str = Field(min_length=1)
    """The user message that tells the agent what to do."""
    check: Commands = Field(min_length=1)
    """Commands that check the task. It is done if all of them exit with 0."""
    files: Files = Field(default_factory=dict)
    """Text files for the check, by path below its home `~`. The agent never sees them."""
    setup: Commands = ()
    """Commands that prepare the workspace before the agent begins."""
    solution: Commands = ()
    """The reference solution, for the agent `oracle`."""
    image: str | None = Field(default=None, min_length=1)
    """An image for its sandboxes, instead of the profile's image."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Other data of the row. Not used."""


class TasksEnvironment(Environment):
    """Shell commands as tasks. The check runs in the agent's own slot, after the agent's processes are dead.

    The contents of the workspace are the agent's: a check that runs or imports something from there trusts the agent.
    """

    name = "tasks"
    config_class = TasksConfig
    config: TasksConfig

    def __init__(self, config: TasksConfig) -> None:
        super().__init__(config)
        self.needs = frozenset(config.needs)
        self._items: Sequence[Item] = ()

    async def setup(self) -> None:
        """Read the file.

        Raises:
            DatasetError: it can't be read, or a line of it is no task; names the file, the line and the field.
        """
        rows = await asyncio.to_thread(load_rows, TaskRow, self.config.dataset_name)
        self._items = tuple(row.model_dump() for row in rows)
        self.item_images = bool(self._items) and all(item["image"] for item in self._items)

    def items(self) -> Sequence[Item]:
        """Return the tasks, in the file's order."""
        return self._items

    def format_prompt(self, item: Item) -> str:
        """Return the task's prompt as it is."""
        return str(item["prompt"])

    def image(self, item: Item) -> str | None:
        """Return the row's own image, if it has one."""
        named: str | None = item["image"]
        return named

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: Rollout) -> dict[str, Any]:
        """Run the set-up commands in the agent's slot."""
        failed = await self._run(rollout, item["setup"], self.config.setup_timeout_s)
        if failed is not None:
            raise SetupFailed(f"a set-up command of task {item['id']!r} failed with {_described(failed)}")
        return {}

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: Rollout) -> None:
        """Run the reference solution in the agent's slot."""
        if not item["solution"]:
            raise SetupFailed(f"task {item['id']!r} has no solution", hint="give its row the field `solution`")
        failed = await self._run(rollout, item["solution"], self.config.setup_timeout_s)
        if failed is not None:
            raise SetupFailed(f"the solution of task {item['id']!r} failed with {_described(failed)}")

    @hookimpl
    async def verify_and_score_trajectory(self, item: Item, rollout: Rollout) -> tuple[float, dict[str, Any]]:
        """Return 1.0 if every command of the check exits with 0, else 0.0 and the output of the failing one.

        A workspace in which no check can run is the agent's doing, so it gets 0.0 too.
        """
        try:
            env = await self._furnish(item, rollout)
            failed = await self._run(rollout, item["check"], self.config.check_timeout_s, env)
        except CommandError as error:
            return 0.0, {"reason": f"the check can't be run: {error.message}"}
        if failed is None:
            return 1.0, {}
        return 0.0, {"exit_code": failed.returncode, "timed_out": failed.timed_out, "output": _tail(failed)}

    async def _furnish(self, item: Item, rollout: Rollout) -> dict[str, str]:
        """Make the check's home, with the task's files in it, and its temporary directory. Return the variables of the
        check.

        Raises:
            CommandError: the agent's work makes that impossible.
        """
        commands = rollout.commands
        made = await commands.run(["/bin/sh", "-c", _ROOM], timeout_s=self.config.check_timeout_s)
        lines = made.text.splitlines()
        if not made.ok or len(lines) != 4:
            raise CommandError(f"it can't be given a home: {made.error_text.strip()[-OUTPUT_KEPT:]}")
        room, path, agent_home, agent_tmp = lines
        home = f"{room}/home"
        for name, text in item["files"].items():
            await commands.write_file(f"{home}/{name}", text.encode())
        own = {"HOME": home, "TMPDIR": f"{room}/tmp", "PATH": path}
        return {**own, "AGENT_HOME": agent_home, "AGENT_TMPDIR": agent_tmp, **_PYTHON}

    async def _run(
        self, rollout: Rollout, commands: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> CommandResult | None:
        """Run the commands in order. Return the result of the first that fails, or None."""
        for command in commands:
            done = await rollout.commands.run(command, env=env, timeout_s=timeout_s, merge_stderr=True)
            if not done.ok:
                return done
        return None


def _tail(result: CommandResult) -> str:
    return result.text.strip()[-OUTPUT_KEPT:]


def _described(result: CommandResult) -> str:
    how = "a time-out" if result.timed_out else f"status {result.returncode}"
    return f"{how}: {_tail(result)}"
