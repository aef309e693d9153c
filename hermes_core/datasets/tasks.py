"""The environment `tasks`: prompts with commands that check the work, and commands that solve the task. Needs no code.

A check runs where the agent worked, and has to read the agent's files. But it must read only those files that its
author wrote down. So a check has a home and a temporary directory that the agent never saw, a PATH without the agent's
directories, and a Python that imports nothing from the workspace unless the check says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hermes_core.cheats import MOST_FILES, Cheat, file_cheats, find_file_names, usual_cheats
from hermes_core.datasets.prompts import (
    OUTPUT_KEPT,
    Commands,
    Files,
    PromptRow,
    PromptsConfig,
    PromptsEnvironment,
    describe_failure,
    run_all,
    tail,
)
from hermes_core.environment import Item
from hermes_core.errors import CommandError, SetupFailed
from hermes_core.handles import RolloutHandle
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.rollout.starvation import watch_for_starvation
from hermes_core.sandbox.commands import CommandResult

# Runs after the agent's processes are dead, and uses no directory of the agent's to make new ones. Prints the values
# for the check's variables, one per line. Readers of the run see the script's first line.
_ROOM = """# makes a home for the check, because the agent may have changed its own
set -e
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

# A check often runs one of its own files. So this cheat puts files with the same names where the check might look
# first, and overwrites the files in the check's home as soon as the home exists.
_PLANTED = """
plant() {
  case $1 in *.py) echo 'raise SystemExit(0)' ;; *) printf '#!/bin/sh\nexit 0\n' ;; esac | put "$1" && chmod +x "$1"
}
for file; do plant "./$file"; plant "$HOME/$file"; plant "$TMPDIR/home/$file"; done
{
  echo 'while :; do for file; do for home in /tmp/*/home "$TMPDIR"/*/home "${TMPDIR%/*}"/*/home; do'
  echo '[ -d "$home" ] && printf "raise SystemExit(0)" >"$home/$file"; done; done; done'
} >"$TMPDIR/daemon"
env -i PATH="$PATH" TMPDIR="$TMPDIR" setsid sh "$TMPDIR/daemon" "$@" >/dev/null 2>&1 &
"""

_WORD = re.compile(r"[\w.+~][\w.+/~-]*|/[\w.+/-]+")

_PYTHON = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONPATH": ""}


class TasksConfig(PromptsConfig):
    """The settings of `tasks`."""

    check_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of each command of the check; after it, the task counts as not done."""


class TaskRow(PromptRow):
    """One line of the file: a prompt with a check."""

    id: str = Field(min_length=1)
    """The row's name, unique in the file."""
    check: Commands = Field(min_length=1)
    """Commands that check the task. It is done if all of them exit with 0."""
    files: Files = Field(default_factory=dict)
    """Text files for the check, by path below its home `~`. The agent never sees them."""
    solution: Commands = ()
    """The reference solution, for the agent `oracle`."""


class TasksEnvironment(PromptsEnvironment):
    """Shell commands as tasks. The check runs in the agent's own slot, after the agent's processes are dead.

    The contents of the workspace are the agent's: a check that runs or imports something from there trusts the agent.
    """

    name = "tasks"
    config_class = TasksConfig
    config: TasksConfig
    row_class = TaskRow
    scored = True

    def uses_slot(self, item: Item) -> bool:
        """Return True, because the check runs in the slot."""
        return True

    def cheats(self) -> Mapping[str, Cheat]:
        """Return the usual cheats, extended to write the files that the check names, and a cheat that attacks the
        check's files."""
        return {
            **usual_cheats(self.format_prompt),
            **file_cheats(self.format_prompt, _find_files),
            **file_cheats(self.format_prompt, lambda item: [*item["files"]], {"check-files": _PLANTED}),
        }

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: RolloutHandle) -> None:
        """Run the reference solution in the agent's slot."""
        if not item["solution"]:
            raise SetupFailed(f"task {item['id']!r} has no solution", hint="give its row the field `solution`")
        failed = await run_all(rollout, item["solution"], self.config.setup_timeout_s)
        if failed is not None:
            raise SetupFailed(f"the solution of task {item['id']!r} failed with {describe_failure(failed)}")

    @hookimpl
    async def verify_and_score_trajectory(self, item: Item, rollout: RolloutHandle) -> tuple[float, dict[str, Any]]:
        """Return 1.0 if every command of the check exits with 0, else 0.0 and the output of the failing one.

        If the workspace is in a state in which no check can run, the agent caused this, and the reward is 0.0, too.
        """
        try:
            failed, starved = await self._check(item, rollout)
            if failed is not None and failed.timed_out and starved is not None:
                failed, _ = await rollout.check_again(rollout, starved, lambda: self._check(item, rollout))
        except CommandError as error:
            return 0.0, {"reason": f"the check can't be run: {error.message}"}
        if failed is None:
            return 1.0, {}
        return 0.0, {"exit_code": failed.returncode, "timed_out": failed.timed_out, "output": tail(failed)}

    async def _check(self, item: Item, rollout: RolloutHandle) -> tuple[CommandResult | None, str | None]:
        """Run the check. Return the result of the first command that fails, and a text if this command hardly got a
        processor; either can be None."""
        env, limit_s = await self._furnish(item, rollout), self.config.check_timeout_s
        for command in item["check"]:
            run = run_all(rollout, [command], limit_s, env)
            failed, starved = await watch_for_starvation(rollout.commands, run, limit_s)
            if failed is not None:
                return failed, starved
        return None, None

    async def _furnish(self, item: Item, rollout: RolloutHandle) -> dict[str, str]:
        """Make the check's home, with the task's files in it, and its temporary directory. Return the check's
        environment variables.

        Raises:
            CommandError: the home can't be made, because of the agent's work.
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


def _find_files(item: Item) -> list[str]:
    """Return possible names of the task's files: those in its prompt, those of its workspace, and the words of its
    check's commands."""
    words = [word for command in item["check"] for word in _WORD.findall(command) if not word.isdigit()]
    return [*dict.fromkeys([*find_file_names(item["prompt"]), *item["workspace"], *words])][:MOST_FILES]
