"""Runs commands as any user of the sandbox's system, in a slot whose own user is root.

The sandbox needs only `sh`, and `setpriv` or `su`, so this works with and without a guest. Files are read and written
by scripts of the direct mode, with the user's rights.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, Self, TypeVar

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import Around, Command, CommandResult, ProcessStatus, SlotCommands, operation
from hermes_core.sandbox.direct import files, sh

MAX_COMMAND = 100_000
"""Maximum number of bytes of a command, which is passed as one argument."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,99})?")

# Arguments: a user as Docker writes it, and a command line. As with Docker, a number need not be the id of a known
# user, and a user given with a group is in no other group. Root runs this script with variables that the item may have
# set, so the script uses no program from PATH. `setpriv` execs the command, so signals and the exit status are the
# command's own. Busybox's `setpriv` (a link) lacks these options.
_SWITCH = """
name=${1%%:*} group=${1#"${1%%:*}"} found= groups=--init-groups
group=${group#:}
while IFS=: read -r each _ uid gid _ home _; do
  if [ "$each" = "$name" ] || [ "$uid" = "$name" ]; then found=$each; break; fi
done </etc/passwd
if [ -z "$found" ]; then
  case $name in *[!0-9]*) echo "there is no user $name" >&2; exit 126 ;; esac
  found=$name uid=$name gid=0 home=/ groups=--clear-groups
fi
if [ -n "$group" ]; then
  gid= groups=--clear-groups
  while IFS=: read -r each _ id _; do
    if [ "$each" = "$group" ] || [ "$id" = "$group" ]; then gid=$id; break; fi
  done </etc/group
  case ${gid:-$group} in *[!0-9]*) echo "there is no group $group" >&2; exit 126 ;; esac
  gid=${gid:-$group}
fi
HOME=$home USER=$found LOGNAME=$found TMPDIR=/tmp
export HOME USER LOGNAME TMPDIR
umask 022
if [ -x /usr/bin/setpriv ] && [ ! -L /usr/bin/setpriv ]; then
  exec /usr/bin/setpriv --reuid="$uid" --regid="$gid" "$groups" -- /bin/sh -c "$2"
fi
for su in /bin/su /usr/bin/su; do
  if [ -x "$su" ] && [ "$groups" = --init-groups ]; then exec "$su" -s /bin/sh "$found" -c "$2"; fi
done
echo 'there is neither setpriv nor su' >&2
exit 126
"""

_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; fi; exec sh -c "$1"'

_PRELUDE = """
fail() { echo "$1" >&2; exit 1; }
exists() { [ -e "$1" ] || [ -L "$1" ] || fail 'No such file or directory'; }
"""


def is_root(user: str) -> bool:
    """Return whether `user`, a name or number with or without `:group`, is root. The group does not matter."""
    return user.partition(":")[0] in ("", "0", "root")


P = ParamSpec("P")
T = TypeVar("T")


def _by_root(method: Callable[Concatenate[SlotCommands, P], T]) -> Callable[Concatenate[AsUser, P], T]:
    """Return a method of `AsUser` that calls the method of the same name of the slot's commands, which run as root."""
    name = method.__name__

    def call_root(self: AsUser, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = getattr(self._root, name)(*args, **kwargs)
        return result

    call_root.__name__, call_root.__doc__ = name, method.__doc__
    return call_root


class AsUser(files.ScriptedFiles):
    """The commands of a slot, run as a user other than root. They have this user's home, and the user owns the files
    that they make. A command whose program can't be run ends with status 126 or 127, as in a shell.

    Args:
        commands: the slot's commands, which run as root.
        user: a user as Docker writes it: a name or a number, or with a group `user:group`.

    Raises:
        CommandError: `user` can't be a user's name.
    """

    def __init__(self, commands: SlotCommands, user: str) -> None:
        if not _NAME.fullmatch(user):
            raise CommandError(f"{user[:100]!r} can't be a user's name", code="invalid")
        super().__init__(commands.workspace_dir, commands.call, commands.cwd)
        self._root = commands
        self._user = user
        self._aside = "/tmp/.hermes-"

    def around(self, wrap: Around) -> Self:
        """Return the same commands, observed by `wrap`."""
        return type(self)(self._root.around(wrap), self._user)

    processes = _by_root(SlotCommands.processes)
    poll = _by_root(SlotCommands.poll)
    log = _by_root(SlotCommands.log)
    wait = _by_root(SlotCommands.wait)
    write = _by_root(SlotCommands.write)
    resize = _by_root(SlotCommands.resize)
    kill = _by_root(SlotCommands.kill)
    forward = _by_root(SlotCommands.forward)

    async def _run(self, command: Command) -> CommandResult:
        """Run a command to its end."""
        return await self._root._run(replace(command, args=self._argv(command.args)))

    async def _start(self, command: Command) -> ProcessStatus:
        """Start a background process."""
        return await self._root._start(replace(command, args=self._argv(command.args)))

    def _argv(self, args: str | Sequence[str]) -> list[str]:
        words = ["sh", "-c", _SHELL, "sh", args] if isinstance(args, str) else args
        if not words:
            raise CommandError("the command is empty", code="invalid")
        line = "exec " + shlex.join(words)
        if len(line.encode("utf-8", "surrogateescape")) > MAX_COMMAND:
            raise CommandError(
                f"a command of another user than root has at most {MAX_COMMAND} bytes",
                code="invalid",
                hint="write long texts to a file",
            )
        return ["/bin/sh", "-c", _SWITCH, "sh", self._user, line]

    async def _file(self, script: str, path: str, *args: str, stdin: bytes = b"", limit: int = 1 << 20) -> bytes:
        if not path:
            raise CommandError("a path has at least one character", code="invalid")
        place = posixpath.join(self.workspace_dir, self.cwd, path)
        sh.check_words(place, *args)
        source, word = files.with_path(script, place)
        argv = ["sh", "-c", _PRELUDE + source, "sh", word, *args]
        result = await self._run(Command(argv, cwd="/", env={"LC_ALL": "C"}, stdin=stdin, output_limit=limit))
        if not result.ok:
            error = sh.failure(result.error_text)
            raise CommandError(f"{path}: {error.message}", code=error.code)
        if result.stdout_bytes > limit:
            raise CommandError(f"{path}: more than {limit} bytes", code="too_large")
        return result.stdout

    @operation
    async def clear(self, keep: Sequence[str] = ()) -> None:
        """Raise CommandError, because the slot's files belong to root."""
        raise CommandError("only root can remove all files of the slot", code="permission")
