"""Prepared directories: filled once per sandbox, and read by its slots. Concurrent requests share one attempt."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from hermes_core.aio import TaskSet
from hermes_core.errors import CommandError, HermesError, PolicyError, ProvisionError, SetupFailed, UsageError
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.direct.client import DirectClient
from hermes_core.sandbox.pool.leases import PooledSandbox

log = logging.getLogger(__name__)

Build = Callable[[SlotCommands, str], Awaitable[None]]
"""Fills a new directory. Its arguments are the commands of the preparation user and the directory's absolute path."""

COMMAND_TIMEOUT_S = 1800.0

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_key(key: str) -> str:
    """Return the key of a preparation.

    Raises:
        UsageError: the key can't be a file name.
    """
    if not _KEY.fullmatch(key):
        raise UsageError(
            f"{key!r} can't be the key of a preparation",
            hint="use up to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return key


class NewSandbox:
    """A sandbox before its first lease, while its network is open.

    Attributes:
        sandbox_id: the sandbox.
        image: the image that it was made from, if its profile names one.
        commands: the commands of the preparation user. `preparation` is another name for them.
    """

    def __init__(self, tasks: TaskSet, pooled: PooledSandbox, image: str | None) -> None:
        self.sandbox_id = pooled.sandbox.id
        self.image = image
        self.commands = self.preparation = pooled.prepare_commands()
        self._tasks = tasks
        self._pooled = pooled

    async def prepare(self, key: str, build: Build | str | Sequence[str], *, private: bool = False) -> str:
        """Prepare a directory as `LeasedSlot.prepare` does. Later requests with this key return it."""
        return await prepare(self._tasks, self._pooled, check_key(key), as_build(build), private=private)


def as_build(build: Build | str | Sequence[str]) -> Build:
    """Return `build`, or, if it is one or more shell commands, a function that runs them in the directory."""
    return build if callable(build) else partial(_run_all, [build] if isinstance(build, str) else build)


async def _run_all(lines: Sequence[str], commands: SlotCommands, directory: str) -> None:
    for line in lines:
        result = await commands.run(line, cwd=directory, timeout_s=COMMAND_TIMEOUT_S, merge_stderr=True)
        if not result.ok:
            output = result.text[-2000:]
            raise SetupFailed(f"preparing failed with {result.returncode}: {line[:200]}\n{output}".rstrip())


async def prepare(tasks: TaskSet, pooled: PooledSandbox, key: str, build: Build, *, private: bool) -> str:
    """Return a directory that `build` fills once per sandbox and key.

    Calls during an attempt wait for it, and raise its error. After a failure, or when the last of these calls is
    cancelled, the directory is removed, and the next call tries again.
    """
    if private and isinstance(pooled.client, DirectClient) and pooled.client.granted is not Isolation.SHARED:
        raise PolicyError(
            "without a guest nothing can be hidden from the slot of a sandbox",
            hint="use an image with python3 (3.7 or later), and no slot_user: root",
            sandbox_id=pooled.sandbox.id,
        )
    attempt = partial(_attempt, pooled, check_key(key), build, private=private)
    return await pooled.preparations.get(tasks, attempt, (key, private))


async def _attempt(pooled: PooledSandbox, key: str, build: Build, *, private: bool) -> str:
    kind = "private" if private else "shared"
    directory = f"{pooled.sandbox.workspace_base}/prepared/{kind}/{key}"
    mark = f"{pooled.sandbox.workspace_base}/prepared/{kind}/.done.{key}"
    commands = pooled.prepare_commands()
    if pooled.restored and await _is_there(commands, mark):
        return directory
    for path in (mark, directory):
        await _remove(commands, path)  # an earlier driver may have been interrupted
    result = await commands.run(["mkdir", "-p", "--", directory], merge_stderr=True)
    if not result.ok:
        raise ProvisionError(f"can't make {directory}: {result.text.strip()}", sandbox_id=pooled.sandbox.id)
    try:
        await build(commands, directory)
        if not private:
            await _protect(commands, directory)
        await commands.write_file(mark, b"")
    except BaseException:
        await _undo(commands, directory)
        raise
    return directory


async def _is_there(commands: SlotCommands, path: str) -> bool:
    try:
        await commands.stat(path)
    except CommandError as error:
        if error.code != "not_found":
            raise
        return False
    return True


async def _protect(commands: SlotCommands, directory: str) -> None:
    """Remove write permissions for others, which an archive or an installer may have set."""
    result = await commands.run(["chmod", "-R", "go-w", "--", directory], merge_stderr=True)
    if not result.ok:
        raise ProvisionError(f"can't protect {directory}: {result.text.strip()[-500:]}")


async def _undo(commands: SlotCommands, directory: str) -> None:
    try:
        await _remove(commands, directory)
    except HermesError as error:
        log.warning("the failed preparation %s was not removed: %s", directory, error)


async def _remove(commands: SlotCommands, directory: str) -> None:
    try:
        await commands.remove(directory, recursive=True)
    except CommandError as error:
        if error.code != "not_found":
            raise
