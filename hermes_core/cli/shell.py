"""`hermes-rl shell`: a person's terminal in a slot, which can be left and entered again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from hermes_core.cli.support import new_runtime
from hermes_core.errors import CommandError, ConfigError, UnknownNameError, UsageError
from hermes_core.printing import printable, say
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import ProcessStatus, Slot, SlotCommands, WindowSize
from hermes_core.sandbox.pool.checkpoint import Checkpoint, read_checkpoint
from hermes_core.tool_backend import ToolBackend

DETACH = b"\x1d"
"""Ctrl-]."""
ORPHAN_TTL_S = 24 * 3600.0
"""How long a shell waits for its user's return."""
REPLAYED = 16 << 10
"""Number of bytes of the latest output that are shown again when the user returns."""
_WAIT_S = 60.0
_FULL_S = 0.05
_MOST_SIDE = 1000
_SHELL = 'exec "${SHELL:-sh}" -i'


@click.command()
@click.argument("sandbox", required=False)
@click.option("--backend", metavar="NAME", help="Backend that makes a new sandbox [local].")
@click.option("--profile", metavar="NAME", help="Profile of the new sandbox.")
@click.option("--isolation", metavar="LEVEL", default="user", help="Minimum isolation level of its slot [user].")
@click.pass_context
def shell(ctx: click.Context, sandbox: str | None, backend: str | None, profile: str | None, isolation: str) -> None:
    """Open a shell in a new sandbox, or go back to a shell that you left in SANDBOX.

    Ctrl-] leaves the shell; what runs in it goes on for up to a day. When the shell exits, the sandbox ends. The exit
    status is that of the shell.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "standard input and output must be a terminal", hint="run it without redirections, or use the terminal tool"
        )
    if sandbox is not None and (backend or profile):
        raise UsageError(
            "an existing sandbox already has a backend and a profile", hint="leave out --backend and --profile"
        )
    ctx.exit(asyncio.run(_run(ctx.obj, sandbox, backend or "local", profile, isolation)))


async def _run(verbose: int, sandbox: str | None, backend: str, profile: str | None, isolation: str) -> int:
    async with new_runtime(verbose) as runtime:
        shells = Path(runtime.settings.state_dir) / "shells"
        folder = shells / secrets.token_hex(4) if sandbox is None else _folder_of(sandbox, shells)
        with Checkpoint(folder, runtime.owner) as checkpoint:
            try:
                return await _visit(runtime, checkpoint, sandbox, _Wish(backend, profile, isolation))
            finally:
                if not checkpoint.sandboxes:
                    checkpoint.close()
                    shutil.rmtree(folder, ignore_errors=True)


def _folder_of(sandbox: str, shells: Path) -> Path:
    """Return the folder with the checkpoint for a shell's sandbox."""
    known: dict[str, Path] = {}
    for path in shells.glob("*/processes.json"):
        with contextlib.suppress(ConfigError):
            known |= {saved.sandbox_id: path.parent for saved in read_checkpoint(path)}
    if sandbox not in known:
        raise UnknownNameError("shell", sandbox, known, where="that was left here")
    return known[sandbox]


class _Wish(NamedTuple):
    """The user's choices for a new sandbox."""

    backend: str
    profile: str | None
    isolation: str


async def _visit(runtime: Runtime, checkpoint: Checkpoint, sandbox: str | None, wish: _Wish) -> int:
    if sandbox is not None:
        saved = next(iter(checkpoint.sandboxes.values()), None)
        if saved is None:  # its user has ended the shell since `_folder_of`
            raise _has_ended(sandbox)
        wish = _Wish(saved.backend, saved.profile, saved.isolation)
    own = {"slots_per_sandbox": 1, "max_sandboxes": 1, "min_sandboxes": 0, "reserve_slots": 0}
    config = {**own, "orphan_ttl_s": ORPHAN_TTL_S}
    tools = runtime.tool_backend(wish.backend, isolation=wish.isolation, config=config, checkpoint=checkpoint)
    try:
        slot, process = await (_new(tools, wish.profile) if sandbox is None else _find_session(tools, sandbox))
        ended = await _attach(tools.commands(slot), process, f"in sandbox {slot.sandbox_id}; Ctrl-] leaves it")
    except BaseException:
        await tools.aclose()  # while the checkpoint is open, so that it forgets the ended sandbox
        raise
    if ended is None:
        await tools.aclose(keep=True)
        say(f"\nleft; `hermes-rl shell {slot.sandbox_id}` comes back to it within a day", err=True)
        return 0
    await tools.aclose()
    return 128 + ended.signal if ended.signal is not None else ended.exit_code or 0


async def _new(tools: ToolBackend, profile: str | None) -> tuple[Slot, ProcessStatus]:
    slot = await tools.acquire("shell", profile=profile)
    env = {"TERM": os.environ.get("TERM", "xterm-256color")}
    return slot, await tools.commands(slot).start(_SHELL, env=env, pty=_size())


async def _find_session(tools: ToolBackend, sandbox: str) -> tuple[Slot, ProcessStatus]:
    for slot in await tools.take_over():
        for process in await tools.commands(slot).processes():
            if process.pty is not None:
                return slot, process
    raise _has_ended(sandbox)


def _has_ended(sandbox: str) -> UsageError:
    return UsageError(f"the shell in {sandbox} has ended", hint="`hermes-rl shell` opens another one")


def _size() -> WindowSize:
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return WindowSize(min(max(rows, 1), _MOST_SIDE), min(max(columns, 1), _MOST_SIDE))


async def _attach(commands: SlotCommands, process: ProcessStatus, greeting: str) -> ProcessStatus | None:
    """Connect the user's terminal with the process's terminal. Return the ended process's status, or None if the user
    left while the process goes on."""
    loop = asyncio.get_running_loop()
    resized, left = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    loop.add_signal_handler(signal.SIGHUP, left.set)
    resized.set()
    works: set[asyncio.Task[Any]] = set()
    try:
        with _raw():
            click.echo(printable(greeting) + "\r", err=True)  # after `_raw`, so that keys typed in reply go to the slot
            works |= {
                asyncio.create_task(_show_output(commands, process)),
                asyncio.create_task(_send_keys(commands, process.process_id)),
                asyncio.create_task(_follow_size(commands, process.process_id, resized)),
                asyncio.create_task(left.wait()),
            }
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_signal_handler(signal.SIGHUP)
    status = await commands.poll(process.process_id)
    return None if status.running else status


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Put the user's terminal into raw mode, so that every key goes to the slot, also keys typed before this call."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _show_output(commands: SlotCommands, process: ProcessStatus) -> None:
    """Show the process's output, until it ends."""
    offset = max(0, process.output_bytes - REPLAYED)
    while True:
        chunk = await commands.log(process.process_id, offset=offset, wait_s=_WAIT_S)
        await asyncio.to_thread(_write, chunk.data)
        offset = chunk.offset + len(chunk.data)
        if not chunk.running and offset >= chunk.total:
            return


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


async def _send_keys(commands: SlotCommands, process_id: str) -> None:
    """Send keys to the process, until the user presses the key that leaves, or the process reads no more."""
    while data := await _keys():
        keys, leave, _ = data.partition(DETACH)
        while keys:
            try:
                taken = await commands.write(process_id, keys)
            except CommandError:
                await asyncio.Event().wait()  # the process has ended; `_show_output` ends the visit
            keys = keys[taken:]
            if keys:
                await asyncio.sleep(_FULL_S)
        if leave:
            return


async def _keys() -> bytes:
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
    try:
        return os.read(fd, 4096)
    except OSError:  # the user's terminal is gone
        return b""


async def _follow_size(commands: SlotCommands, process_id: str, resized: asyncio.Event) -> None:
    """Give the process's terminal the size of the user's terminal, now and at each change."""
    while True:
        await resized.wait()
        resized.clear()
        with contextlib.suppress(CommandError):  # the process has ended meanwhile
            await commands.resize(process_id, _size())
