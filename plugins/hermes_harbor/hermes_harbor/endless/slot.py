"""Steps in a task's slot before and after the agent: the initial state, the agent's user, and the tests.

The slot is root, and the agent is another user. So the agent can't change programs and libraries that only root can
write, and the tests can use the slot's own Python and pytest.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping
from pathlib import Path

from hermes_core import CommandError, DatasetError, PytestReport, RolloutHandle, SetupFailed, SlotCommands, run_pytest
from hermes_harbor.container import pack_for_root
from hermes_harbor.endless.config import EndlessConfig
from hermes_harbor.endless.definition import PATH
from hermes_harbor.endless.tasks import EndlessTask, Tests

STEP_TIMEOUT_S = 120.0
SHOWN = 2000
"""Number of last characters of a script's output in a message."""

# $1: the user. An empty home is removed, because `useradd -m` would not fill a home that exists.
_BEGIN = """
id -u "$1" >/dev/null 2>&1 || rmdir "/home/$1" 2>/dev/null
[ "$(id -u)" = 0 ] || { echo 'the slot is not root'; exit 1; }
"""

# $1: the shell, $2: the script, which runs as in a build of the definition.
_POST = 'umask 022; cd /; exec "$1" -e "$2"'

# $1: the user. Prints the path of Python.
_USER = """
umask 022
home=/home/$1
if ! id -u "$1" >/dev/null 2>&1; then
  mkdir -p "$home"
  useradd -d "$home" -s /bin/sh "$1" 2>/dev/null || adduser -D -h "$home" "$1" >/dev/null 2>&1 || {
    echo "$1:x:1000:1000::$home:/bin/sh" >>/etc/passwd && echo "$1:x:1000:" >>/etc/group
  } || exit 1
  chown -R "$1" "$home" || exit 1
fi
[ "$(id -u "$1")" != 0 ] || { echo "$1 is root"; exit 1; }
[ -d "$home" ] || { mkdir -p "$home" && chown "$1" "$home"; } || exit 1
echo "python $(command -v python3)"
"""

# $1: the user. Kills all of the user's processes, and prints a process that is left.
_KILL = """
uid=$(id -u "$1") round=0
while [ "$round" -lt 100 ]; do
  round=$((round + 1)) found=
  for each in /proc/[0-9]*; do
    state= theirs=
    { while read -r key first rest; do
      case $key in State:) state=$first ;; Uid:) theirs="$first $rest"; break ;; esac
    done <"$each/status"; } 2>/dev/null
    mine=
    for id in $theirs; do [ "$id" != "$uid" ] || mine=1; done
    [ -n "$mine" ] && [ "$state" != Z ] || continue
    found=${each#/proc/}
    kill -KILL "$found" 2>/dev/null
  done
  [ -n "$found" ] || exit 0
done
echo "process $found can't be killed"
exit 1
"""


async def _as_root(commands: SlotCommands, script: str, *args: str, timeout_s: float = STEP_TIMEOUT_S) -> str:
    """Run a script as root, with a PATH in which only root can write. Return its output.

    Raises:
        SetupFailed: the script failed, or took too long; the message has its output.
    """
    env = {"PATH": PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
    argv = ["/bin/sh", "-c", script, "sh", *args]
    result = await commands.run(argv, cwd="/", env=env, timeout_s=timeout_s, merge_stderr=True)
    if not result.ok:
        reason = f"no end after {timeout_s:g} s" if result.timed_out else f"status {result.returncode}"
        raise SetupFailed(f"{reason}: {result.text.strip()[-SHOWN:]}")
    return result.text


async def make_initial_state(commands: SlotCommands, task: EndlessTask, config: EndlessConfig) -> str:
    """Copy the task's files, run its `%post` as root, and make the agent's user. Return the path of Python.

    Raises:
        SetupFailed: a step failed; the message has the end of its output.
    """
    await _step("the slot", _as_root(commands, _BEGIN, config.user))
    for source, target in task.definition.files:
        await _copy(commands, task.folder / source, target, config.max_upload_bytes)
    if task.definition.post.strip():
        script = f"{commands.workspace_dir}/.post-{secrets.token_hex(8)}"
        await commands.write_file(script, task.definition.post.encode(), mode=0o700)
        shell = task.definition.shell
        await _step("%post", _as_root(commands, _POST, shell, script, timeout_s=config.post_timeout_s))
        await commands.remove(script)
    output = await _step(f"the user {config.user!r}", _as_root(commands, _USER, config.user))
    python = config.python or output.strip().rpartition("python ")[2].strip()
    if not python.startswith("/"):
        raise SetupFailed(
            f"task {task.id!r}: there is no python3 for its tests",
            hint="use an image with python3 and pytest (--env.image), or install them in %post",
        )
    return python


async def _step(what: str, work: Awaitable[str]) -> str:
    try:
        return await work
    except SetupFailed as error:
        raise SetupFailed(f"{what} failed: {error.message}", hint="see what it printed") from error


async def _copy(commands: SlotCommands, source: Path, target: str, max_bytes: int) -> None:
    """Copy a file or a folder of a task to a path of the slot. The copies belong to root."""
    try:
        folder, archive = await asyncio.to_thread(_pack, source, target, max_bytes)
    except (OSError, DatasetError) as error:
        raise SetupFailed(f"%files: {source} can't be copied: {error}") from error
    await commands.tar_in(folder, archive)


def _pack(source: Path, target: str, max_bytes: int) -> tuple[str, bytes]:
    """Return the folder in which to unpack, and a tar of the files."""
    if source.is_dir():
        return target, pack_for_root([(source, ".")], max_bytes)
    place = Path(target)
    name, folder = (source.name, target) if target.endswith("/") else (place.name, str(place.parent))
    return folder, pack_for_root([(source, name)], max_bytes)


async def end_agent(commands: SlotCommands, user: str) -> str | None:
    """Kill every process of the agent's user. Return the reason if that fails, or None."""
    try:
        await _as_root(commands, _KILL, user)
    except SetupFailed as error:
        return error.message
    return None


async def run_tests(
    rollout: RolloutHandle, tests: Tests, python: str, config: EndlessConfig, variables: Mapping[str, str]
) -> PytestReport:
    """Run a file of tests as the agent's user, in the user's home. Only root can write the file and its directory.

    Raises:
        VerifierError, Disturbed: pytest can't be started.
    """
    commands = rollout.commands
    folder = f"/.hermes-tests-{secrets.token_hex(8)}"
    try:
        await commands.write_file(f"{folder}/{tests.name}", tests.source.encode(), mode=0o644)
        return await run_pytest(
            rollout.as_user(config.user),
            tests.node_ids,
            python=python,
            root=folder,
            cwd=f"/home/{config.user}",
            timeout_s=config.test_timeout_s,
            args=("-p", "no:cacheprovider"),
            env=variables,
            with_parameters=True,
        )
    finally:
        await _remove(commands, folder)


async def _remove(commands: SlotCommands, folder: str) -> None:
    try:
        await commands.remove(folder, recursive=True)
    except CommandError:
        return  # no harm: the slot is removed after the rollout
