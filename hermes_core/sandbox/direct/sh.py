"""Runs our own small scripts and the slots' commands by POSIX sh over channels.

Every script ends its output with a token that only we know, followed by its outcome. So we need no end of file, which a
process in the background could delay for ever. Paths, commands and sizes are passed as positional parameters, and the
length of the input is sent before it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from hermes_core.aio import TaskSet
from hermes_core.errors import ChannelLost, CommandError, SandboxLost, SlotLost, SlotUnclean
from hermes_core.sandbox.contract import Channel, Sandbox, SandboxStatus

READ_SIZE = 1 << 16

KILL_ROUNDS = 100

DYING_S = 0.3
"""How long a sandbox may exist after its processes were killed."""

_SHOWN = 1000
"""Maximum number of characters of a name in an error message."""

# $1: the token. The script's own parameters follow. Its stderr becomes part of the outcome.
_HELPER = """
umask 022
token=$1; shift
exec 4>&1
fail() { echo "$1" >&2; exit 1; }
exists() { [ -e "$1" ] || [ -L "$1" ] || fail 'No such file or directory'; }
message=$( {
%s
} 2>&1 >&4 )
status=$?
printf '%%s %%s %%s\\n' "$token" "$status" "$message" >&4
"""

# Parameters: directory, size of stdin (- for the channel's stdin, `fed` if `FEED` brings the input), 1 to merge, fifo
# for stderr, mark, `setsid` or nothing, the command. The token is the first line of stdin, because the command could
# read our parameters. The first line of output says that the command was started, or which part of it (`cwd`,
# `program`, `input`) is not available.
COMMAND = """
umask 022
cwd=$1 size=$2 merge=$3 fifo=$4 mark=$5 session=$6; shift 6
IFS= read -r token || exit 125
refuse() { printf '%s %s %s\\n' "$token" "$1" "$2"; exit 0; }
[ -e "$cwd" ] || refuse cwd 'No such file or directory'
[ -d "$cwd" ] || refuse cwd 'Not a directory'
cd "$cwd" 2>/dev/null || refuse cwd 'Permission denied'
search() {
  set -f; IFS=:
  for each in $PATH; do
    if [ -x "${each:-.}/$1" ] && [ ! -d "${each:-.}/$1" ]; then set +f; unset IFS; return; fi
  done
  refuse program 'command not found'
}
case $1 in
  */*)
    [ -e "$1" ] || refuse program 'No such file or directory'
    { [ -x "$1" ] && [ ! -d "$1" ]; } || refuse program 'Permission denied' ;;
  *) search "$1" ;;
esac
case $size in
  -) exec 3<&0 ;;
  0) exec 3</dev/null ;;
  fed) mkfifo "$fifo.in" 2>/dev/null; exec 3<"$fifo.in"; rm -f "$fifo.in" ;;
  *)
    { head -c "$size" >"$fifo.in" && exec 3<"$fifo.in"; } || refuse input 'No space left on device'
    rm -f "$fifo.in" ;;
esac
if [ "$merge" = 1 ]; then exec 5>&1; else mkfifo "$fifo" 2>/dev/null; exec 5>"$fifo"; rm -f "$fifo"; fi
unset HERMES_DIRECT_HELPER
printf '%s begun\\n' "$token"
( HERMES_DIRECT=$mark; export HERMES_DIRECT; exec $session "$@" <&3 2>&5 3<&- 5>&- ) &
exec 3<&-
wait "$!"
status=$?
trap '' PIPE
[ "$merge" = 1 ] || printf '%s end\\n' "$token" >&5 2>/dev/null
printf '%s exit %s\\n' "$token" "$status"
"""

# The other end of a command's stderr. The command starts when both ends are open.
STDERR = 'mkfifo "$1" 2>/dev/null; exec cat <"$1"'

# The other end of a command's stdin, which is sent in pieces, each after a line with its size. The next piece is sent
# when the last one was taken, because `head` may read more than its argument.
FEED = """
mkfifo "$1" 2>/dev/null
exec 3>"$1"
while IFS= read -r size && [ "$size" -gt 0 ]; do head -c "$size" >&3 || exit; echo; done
"""

# $1: the mark. $2: the signal. $3: how many rounds. `grep -z`, because some greps stop reading a line at a NUL byte.
KILL = """
rounds=$3
while [ "$rounds" -gt 0 ]; do
  found=$(grep -zlF -e "$1" /proc/[0-9]*/environ 2>/dev/null)
  [ -n "$found" ] || exit 0
  for each in $found; do each=${each#/proc/}; kill -s "$2" "${each%/environ}" 2>/dev/null; done
  rounds=$((rounds - 1))
  [ "$rounds" -eq 0 ] || sleep 0.02 2>/dev/null || sleep 1
done
[ "$2" != KILL ] || fail 'processes are left'
"""


# $1: the mark. Prints one process that carries it.
FIND = 'grep -zlF -e "$1" /proc/[0-9]*/environ 2>/dev/null | head -n 1'


class Ended(Exception):
    """A script ended without an outcome: it was killed, or its sandbox is gone."""


@dataclass(frozen=True)
class ExitLine:
    """The text after the token: `0 `, `1 No such file or directory`, `exit 3`."""

    word: str
    rest: str


async def await_start(channel: Channel, token: str, *, cwd: str, program: str) -> bytes:
    """Wait until the script `COMMAND` has started its command. Return the command's output so far.

    Raises:
        CommandError: the command can't be started. The code begins with `cwd_` if the directory can't be used.
        Ended, ChannelLost: see `until_token`.
    """
    line = b""
    while b"\n" not in line and len(line) < READ_SIZE:
        data = await channel.read(READ_SIZE)
        if not data:
            raise Ended
        line += data
    line, _, output = line.partition(b"\n")
    word, _, reason = line.removeprefix(token.encode()).decode("utf-8", "replace").strip().partition(" ")
    if word == "begun":
        return output
    name = {"cwd": cwd, "program": program}.get(word, "its input")
    error = failure(f"{reason}: {name[:_SHOWN]}")
    if word == "cwd":
        error.code = f"cwd_{error.code}"
    raise error


Feed = Callable[[bytes], Awaitable[object] | None]
"""Takes the next bytes of a stream. If it returns an awaitable, the stream waits for it."""


async def until_token(channel: Channel, token: str, feed: Feed, held: bytes = b"") -> ExitLine:
    """Pass a script's output to `feed`, piece by piece, and return its outcome.

    Args:
        held: output that has been read already.

    Raises:
        Ended: the stream ended before the token.
        ChannelLost: the transport died.
    """
    mark = token.encode()

    async def take(piece: bytes) -> None:
        if (waiting := feed(piece)) is not None:
            await waiting

    while (at := held.find(mark)) < 0:
        # Hold back only a possible beginning of the token. The rest may be a prompt, and a reader waits for it.
        length = next((n for n in range(len(mark) - 1, 0, -1) if held.endswith(mark[:n])), 0)
        if len(held) > length:
            await take(held[: len(held) - length])
            held = held[len(held) - length :]
        data = await channel.read(READ_SIZE)
        if not data:
            await take(held)
            raise Ended
        held += data
    if at:
        await take(held[:at])
    line = held[at + len(mark) :]
    while b"\n" not in line and len(line) < READ_SIZE and (data := await channel.read(READ_SIZE)):
        line += data
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    return ExitLine(word, rest)


def new_token() -> str:
    """Return a random token for the end of one script's output."""
    return secrets.token_hex(16)


async def helper(
    sandbox: Sandbox,
    script: str,
    *args: str,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    limit: int = 1 << 20,
) -> bytes:
    """Run one of our scripts and return its output.

    Raises:
        CommandError: the script failed, with a code for its message; or the output exceeds the limit (`too_large`).
        Ended: the script was killed before it had an outcome.
        ChannelLost, SandboxLost: the sandbox could not be reached.
    """
    check_words(*args)
    token = new_token()
    variables = {**(env or {}), "LC_ALL": "C", "HERMES_DIRECT_HELPER": "1"}
    channel = await sandbox.open(["sh", "-c", _HELPER % script, "hermes-direct", token, *args], env=variables)
    output = bytearray()

    def feed(data: bytes) -> None:
        output.extend(data)
        if len(output) > limit:
            raise CommandError(f"more than {limit} bytes", code="too_large")

    try:
        await send(channel, stdin)
        outcome = await until_token(channel, token, feed)
    finally:
        await channel.aclose()
    if outcome.word != "0":
        raise failure(outcome.rest)
    return bytes(output)


async def send(channel: Channel, data: bytes) -> None:
    """Write a script's input. A lost channel is no error here, because the script's outcome gives the reason."""
    try:
        for start in range(0, len(data), READ_SIZE):
            await channel.write(data[start : start + READ_SIZE])
    except ChannelLost:
        return


_CODES = {
    "No such file or directory": "not_found",
    "command not found": "not_found",
    "Is a directory": "is_a_directory",
    "Not a directory": "not_a_directory",
    "Permission denied": "permission",
    "Operation not permitted": "permission",
    "Read-only file system": "permission",
    "File exists": "exists",
    "No space left": "no_space",
    "Disk quota exceeded": "no_space",
    "Not a regular file": "not_a_file",
    "Invalid argument": "invalid",
}


def failure(message: str) -> CommandError:
    """Return the error for a failed script with this message."""
    code = next((code for words, code in _CODES.items() if words in message), "failed")
    return CommandError(message.strip()[-2000:] or "it failed without a word", code=code)


def check_words(*words: str) -> None:
    """Check that words can be arguments of a program.

    Raises:
        CommandError: a word has a NUL byte or can't be encoded, with code `invalid`.
    """
    for word in words:
        try:
            data = word.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise CommandError(f"a word is no text: {error}", code="invalid") from error
        if b"\0" in data:
            raise CommandError("NUL bytes can't be passed to a program", code="invalid", hint="pass such data by stdin")


class Shell:
    """A sandbox's `sh`. It runs scripts, and finds and kills processes with a mark in their environment.

    Args:
        program: the program that runs the slots' commands: `bash` or `sh`.
        session: the program that starts a session (`setsid`), or empty.
        can_kill: whether `/proc` shows the environments of processes.
    """

    def __init__(self, sandbox: Sandbox, *, program: str, session: str, can_kill: bool) -> None:
        self.sandbox = sandbox
        self.program = program
        self.session = session
        self.work = TaskSet()
        self.lost = asyncio.Event()
        """Set when the sandbox has ended, or can't be reached any more."""
        self.closed = False
        self._can_kill = can_kill
        self._numbers = itertools.count(1)

    async def script(self, source: str, *args: str, stdin: bytes = b"", limit: int = 1 << 20) -> bytes:
        """Run `helper`. If it is interrupted, find out whether the sandbox has ended or only the script was killed."""
        self._check_open()
        try:
            return await helper(self.sandbox, source, *args, stdin=stdin, limit=limit)
        except Ended as error:
            await self.confirm_alive(error)
            raise CommandError("the operation was killed inside the sandbox") from error
        except ChannelLost as error:
            await self.check_alive(error)
            raise
        except SandboxLost:
            self.lost.set()
            raise

    async def kill(self, mark: str, signal: str, *, rounds: int = KILL_ROUNDS) -> None:
        """Signal all processes with the mark, until none is left.

        Raises:
            SlotLost: processes are left, or can't be searched for.
        """
        if not self._can_kill:
            raise SlotLost("without /proc processes can't be found", sandbox_id=self.sandbox.id)
        try:
            await self.script(KILL, mark, signal, str(rounds))
        except CommandError as error:
            raise SlotUnclean(f"the slot could not be killed: {error}", sandbox_id=self.sandbox.id) from error

    async def is_there(self, mark: str) -> bool:
        """Return whether a process with the mark runs.

        Raises:
            SlotLost: processes can't be searched for.
        """
        try:
            return bool(await self.script(FIND, mark))
        except CommandError as error:
            raise SlotLost(f"processes can't be looked for: {error}", sandbox_id=self.sandbox.id) from error

    async def open(self, source: str, args: list[str], env: dict[str, str]) -> Channel:
        """Start a script, and return its channel.

        Raises:
            ChannelLost, SandboxLost: the sandbox could not be reached.
        """
        self._check_open()
        try:
            return await self.sandbox.open(["sh", "-c", source, "hermes-direct", *args], env=env)
        except ChannelLost as error:
            await self.check_alive(error)
            raise
        except SandboxLost:
            self.lost.set()
            raise

    async def check_alive(self, cause: BaseException | None) -> None:
        """Check with the provider that the sandbox runs, after a lost channel.

        Raises:
            SandboxLost: the sandbox does not run.
        """
        if await self.sandbox.status() != SandboxStatus.RUNNING:
            self.lost.set()
            raise SandboxLost("the sandbox has ended", sandbox_id=self.sandbox.id) from cause

    async def confirm_alive(self, cause: BaseException | None = None) -> None:
        """Check that the sandbox still runs after a process in it was killed. Wait for `DYING_S` first, because a
        sandbox that ends loses its processes a moment before it is gone.

        Raises:
            ChannelLost, SandboxLost: the sandbox can't be reached any more.
        """
        await asyncio.sleep(DYING_S)
        await self.check_alive(cause)
        try:
            await helper(self.sandbox, "true")
        except Ended as error:
            await self.check_alive(error)
            raise ChannelLost("the sandbox does not answer", sandbox_id=self.sandbox.id) from error

    def next_number(self) -> int:
        """Return a new number for a command of this sandbox."""
        return next(self._numbers)

    def _check_open(self) -> None:
        if self.closed or self.lost.is_set():
            raise SandboxLost("the sandbox is gone", hint="acquire another slot", sandbox_id=self.sandbox.id)
