"""Scripts in a task's slot: make directories, kill the agent's processes, find forgeries, and upload files.

Slots are root, as Harbor's tasks expect, and own the absolute paths /tests, /solution and /logs. The scripts are POSIX
sh and use only programs that every image has, because an image need not have Python.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hermes_core import CommandError, CommandResult, DatasetError, Isolation, SetupFailed, SlotCommands, SlotHandle

PREPARE_TIMEOUT_S = 120.0

OFFERED = "/opt/hermes-packages"
"""The directory in a sandbox with packages for the tests."""

MAX_OUTPUT = 1 << 20
"""Number of last bytes of the tests' output that are read."""

_WATCHED = (
    "/tests",
    "/solution",
    "/conftest.py",
    "/pytest.ini",
    "/.pytest.ini",
    "/pyproject.toml",
    "/tox.ini",
    "/setup.cfg",
    "/etc/ld.so.preload",
)
"""Paths that no task has, and with which an agent could change how tests run. They are removed before the tests, unless
the image has them."""

# Prints a line for each argument that is a path that exists, and a line for each process.
_BEGIN = """
[ "$(id -u)" = 0 ] || { echo 'not root'; exit 0; }
mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/agent /logs/verifier /logs/artifacts || exit 1
for each in "$@"; do if [ -e "$each" ] || [ -L "$each" ]; then echo "has $each"; fi; done
for each in /proc/[0-9]*; do
  { read -r line <"$each/stat"; } 2>/dev/null || continue
  set -- ${line##*) }
  echo "process ${each#/proc/}:${20}"
done
"""

# Kills all processes but those in $1 (` pid:start pid:start `), their children, and the script's own ancestors. Of the
# children of process 1, which adopts orphans, only those with the name $2 are spared: the sleep of a watchdog.
_KILL = """
keep=$1 spared=$2 ours=" " each=$$
while [ "$each" -gt 0 ]; do
  ours="$ours$each "
  read -r line <"/proc/$each/stat" || break
  set -- ${line##*) }
  each=$2
done
round=0
while [ "$round" -lt 100 ]; do
  round=$((round + 1)) found=
  for each in /proc/[0-9]*; do
    pid=${each#/proc/}
    case $ours in *" $pid "*) continue ;; esac
    { read -r line <"$each/stat"; } 2>/dev/null || continue
    name=${line#*(} name=${name%)*}
    set -- ${line##*) }
    [ "$1" != Z ] || continue
    case $keep in *" $pid:${20} "*) continue ;; esac
    if [ "$2" = 1 ]; then [ "$name" != "$spared" ] || continue
    else case $keep in *" $2:"*) continue ;; esac
    fi
    found=$pid
    kill -KILL "$pid" 2>/dev/null
  done
  [ -n "$found" ] || exit 0
done
echo "process $found can't be killed"
exit 1
"""

# Removes paths that the agent planted, and empties /tests and /logs/verifier. Prints a line for each forgery and each
# removed path. Arguments: the watched paths that the image lacks.
_CLEAR = """
for each in /logs /logs/verifier /tests; do
  if [ -L "$each" ]; then echo "forged $each is a link"
  elif [ -e "$each" ] && [ ! -d "$each" ]; then echo "forged $each is no directory"
  fi
done
for each in /logs/verifier/reward.txt /logs/verifier/reward.json; do
  if [ -e "$each" ] || [ -L "$each" ]; then echo "forged $each was there before the tests"; fi
done
for each in "$@"; do
  if [ -e "$each" ] || [ -L "$each" ]; then echo "removed $each"; rm -rf "$each" || exit 1; fi
  if [ -e "$each" ] || [ -L "$each" ]; then echo "forged $each can't be removed"; fi
done
[ ! -L /logs ] || rm -f /logs
rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier && chmod 777 /logs/verifier || exit 1
for each in /tests/* /tests/.[!.]* /logs/verifier/* /logs/verifier/.[!.]*; do
  if [ -e "$each" ] || [ -L "$each" ]; then echo "forged $each can't be removed"; break; fi
done
"""

# Removes the files of a step's tests and solution. Arguments: the watched paths that the image lacks.
_TIDY = f"""
rm -rf {OFFERED} || exit 1
for each in "$@"; do case $each in /tests|/solution) rm -rf "$each" || exit 1 ;; esac; done
rm -rf /logs/verifier && mkdir -p /logs/verifier && chmod 777 /logs/verifier
"""

# Prints the kind of each path: `link`, `file`, `dir`, `other` or `none`.
_KINDS = """
for each in "$@"; do
  if [ -L "$each" ]; then echo link
  elif [ -f "$each" ]; then echo file
  elif [ -d "$each" ]; then echo dir
  elif [ -e "$each" ]; then echo other
  else echo none
  fi
done
"""

# Prints the end of a file. Arguments: the path, and the number of bytes.
_TAIL = '[ -L "$1" ] || [ ! -f "$1" ] || tail -c "$2" "$1" 2>/dev/null'


@dataclass(frozen=True)
class Beginning:
    """The state of a sandbox before the agent."""

    processes: tuple[str, ...]
    """The processes, each as `pid:start`, where `start` is the start time in clock ticks."""
    absent: tuple[str, ...]
    """The watched paths that the image lacks."""
    spared: str
    """The name of a process that the sandbox's watchdog starts again and again; empty if there is none."""


@dataclass(frozen=True)
class Cleared:
    """The agent's forgeries, each as a text for people, and the planted paths that were removed."""

    forged: tuple[str, ...]
    removed: tuple[str, ...]


def directory(leased: SlotHandle, workdir: str | None) -> str:
    """Return `workdir`; if it is None, the working directory of the slot's image, or else the slot's workspace."""
    slot = leased.slot
    return workdir or (slot.image and slot.image.workdir) or slot.workspace_dir


async def script(commands: SlotCommands, source: str, *arguments: str) -> CommandResult:
    """Run one of the scripts above. Standard error goes to standard output, because without a guest the provider has to
    start another program for each stream."""
    argv = ["/bin/sh", "-c", source, "hermes-harbor", *arguments]
    return await commands.run(argv, cwd="/", timeout_s=PREPARE_TIMEOUT_S, merge_stderr=True)


async def begin(leased: SlotHandle) -> Beginning:
    """Make the directories for a task's logs, and return the state of the sandbox.

    Raises:
        SetupFailed: the slot is not root, or the sandbox's file system is read-only.
    """
    done = await script(leased.commands, _BEGIN, *_WATCHED)
    lines = done.text.splitlines()
    if not done.ok or "not root" in lines:
        reason = "it is another user" if done.ok else done.text.strip()[-500:]
        raise SetupFailed(
            f"the slot can't be root of a file system of its own: {reason}",
            hint="use level private-root, or dedicated and leave out the setting for the sandbox's user",
        )
    there = _after("has ", lines)
    own_root = leased.slot.isolation == Isolation.PRIVATE_ROOT.label  # a slot that does not see the watchdog
    absent = tuple(path for path in _WATCHED if path not in there)
    return Beginning(_after("process ", lines), absent, "" if own_root else "sleep")


async def kill_others(commands: SlotCommands, beginning: Beginning) -> str | None:
    """Kill all processes that did not run in the beginning. Return the reason if that fails, or None.

    Core's own kill is not enough: in a sandbox without a guest, core does not find processes that hide.
    """
    keep = f" {' '.join(beginning.processes)} "
    done = await script(commands, _KILL, keep, beginning.spared)
    return None if done.ok else done.text.strip()[-200:] or "the shell was killed"


async def clear(commands: SlotCommands, beginning: Beginning) -> Cleared:
    """Empty /tests and /logs/verifier, remove planted paths, and return the agent's forgeries and these paths."""
    done = await script(commands, _CLEAR, *beginning.absent)
    lines = done.text.splitlines()
    forged = _after("forged ", lines)
    if not done.ok:
        forged += (f"/tests and /logs can't be made anew: {done.text.strip()[-200:]}",)
    return Cleared(forged, _after("removed ", lines))


async def tidy(commands: SlotCommands, beginning: Beginning) -> None:
    """Remove the tests and the solution of a step before the next one begins.

    Raises:
        SetupFailed: the files can't be removed.
    """
    done = await script(commands, _TIDY, *beginning.absent)
    if not done.ok:
        raise SetupFailed(f"the last step's tests can't be removed: {done.text.strip()[-200:]}")


async def kinds(commands: SlotCommands, *paths: str) -> list[str]:
    """Return the kind of each path, without following links: `file`, `dir`, `link`, `other` or `none`."""
    done = await script(commands, _KINDS, *paths)
    found = done.text.splitlines()
    return found if len(found) == len(paths) else ["other"] * len(paths)


async def tail(commands: SlotCommands, path: str) -> str:
    """Return the last `MAX_OUTPUT` bytes of a file; an empty text if it is no plain file."""
    try:
        return (await script(commands, _TAIL, path, str(MAX_OUTPUT))).text
    except CommandError:
        return ""


async def upload(commands: SlotCommands, folder: Path, target: str, max_bytes: int) -> None:
    """Copy a folder of the task to a directory of the sandbox. The copies belong to root.

    Raises:
        SetupFailed: the folder is too large, or can't be read.
    """
    try:
        archive = await asyncio.to_thread(_pack_contents, folder, max_bytes)
    except (OSError, DatasetError) as error:
        raise SetupFailed(f"{folder} can't be sent to the sandbox: {error}") from error
    await commands.tar_in(target, archive)


async def run_script(
    leased: SlotHandle,
    path: str,
    *,
    user: str | int | None = None,
    env: Mapping[str, str],
    timeout_s: float | None,
    output: str | None = None,
    programs: str | None = None,
) -> CommandResult:
    """Make a script executable and run it.

    Args:
        user: the script's user, as in `as_user`.
        output: a file for the script's output; None returns it.
        programs: a directory to put first in the script's `PATH`.
    """
    quoted, commands = shlex.quote(path), as_user(leased, user)
    executable = f"chmod +x {quoted} 2>/dev/null"
    if commands is not leased.commands:
        await script(leased.commands, executable)
    to_file = "" if output is None else f" >{shlex.quote(output)} 2>&1"
    first = "" if programs is None else f"PATH={programs}:$PATH; export PATH; "
    command = f"{executable}; {first}{quoted}{to_file}"
    return await commands.run(command, env=env, timeout_s=timeout_s, merge_stderr=True)


def as_user(leased: SlotHandle, user: str | int | None) -> SlotCommands:
    """Return the commands of a user of a task; None is the image's user, as in Harbor."""
    image = leased.slot.image
    return leased.as_user(str(user) if user is not None else (image and image.user) or "root")


def _after(prefix: str, lines: list[str]) -> tuple[str, ...]:
    return tuple(line.removeprefix(prefix) for line in lines if line.startswith(prefix))


def _pack_contents(folder: Path, max_bytes: int) -> bytes:
    return pack_for_root([(path, path.name) for path in sorted(folder.iterdir())], max_bytes)


def pack_for_root(members: Iterable[tuple[Path, str]], max_bytes: int) -> bytes:
    """Return an uncompressed tar of files and folders, which belong to root in it. Links stay links. Blocking.

    Args:
        members: each path with its name in the tar.

    Raises:
        DatasetError: the members are too large.
        OSError: a member can't be read.
    """
    left = max_bytes

    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal left
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        left -= member.size
        if left < 0:
            raise DatasetError(f"it has more than {max_bytes} bytes", hint="raise --env.max_upload_bytes")
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, name in members:
            tar.add(path, arcname=name, filter=of_root)
    return target.getvalue()
