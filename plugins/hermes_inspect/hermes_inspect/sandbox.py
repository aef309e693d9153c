"""Inspect's sandbox provider `hermes`: the sandbox of a sample is a slot of one of our backends."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from contextlib import suppress
from typing import Any, Literal, overload

import anyio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from hermes_core import CommandError, HermesError, Runtime, Slot, SlotCommands, ToolBackend, UsageError
from hermes_inspect.config import HermesSandboxConfig, read_config

DEFAULTS: dict[str, Any] = {"acquire_timeout_s": 7 * 86400.0, "reserve_slots": 0}
"""Default settings of a pool. Samples wait for a slot for practically any time. Scorers use their sample's slot, so no
slot is reserved for verification."""

ERRNO = {
    "not_found": errno.ENOENT,
    "permission": errno.EACCES,
    "is_a_directory": errno.EISDIR,
    "not_a_directory": errno.ENOTDIR,
    "no_space": errno.ENOSPC,
}
"""The error number of the `OSError` for a `CommandError`, by the code of the `CommandError`."""

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

WHO_AM_I = f"PATH={SYSTEM_PATH}; id -u; id -un"

# $0 is the user, by name or number; "$@" is the command, which is found by the image's own PATH.
AS_USER = f"""
path=$PATH PATH={SYSTEM_PATH}
user=$(id -un "$0" 2>/dev/null) || user=$0
HOME=$(getent passwd "$user" | cut -d: -f6)
run=$(command -v runuser) || {{ echo 'the image has no runuser' >&2; exit 126; }}
export HOME PATH="$path"
exec "$run" -u "$user" -- "$@"
"""


class EvalRuntime:
    """The runtime that all tasks of an event loop share, with a tool backend for each of the different settings."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.over = False
        self._runtime = Runtime()
        self._backends: dict[str, ToolBackend] = {}
        self._tasks = 0

    def backend(self, config: HermesSandboxConfig) -> ToolBackend:
        """Return the tool backend for these settings. The first call makes it.

        Raises:
            UsageError, PluginError: the settings are wrong, or the backend can't be used here.
        """
        key = _pool_key(config)
        if key not in self._backends:
            profile = {**DEFAULTS, **config.backend_config}
            self._backends[key] = self._runtime.tool_backend(
                config.backend, isolation=config.isolation, profiles={"default": profile}, default_profile="default"
            )
        return self._backends[key]

    async def enter(self, config: HermesSandboxConfig) -> None:
        """Begin a task. Make the warm sandboxes of its settings, unless its samples name images.

        Raises:
            HermesError: the sandboxes can't be made.
        """
        self._tasks += 1
        try:
            backend = self.backend(config)
            if config.image is None:
                await backend.start()
        except BaseException:
            self._backends.pop(_pool_key(config), None)  # a backend that can't start has closed itself
            await self.leave()
            raise

    async def leave(self, *, keep: bool = False) -> None:
        """End a task. With the last task, everything ends; `keep` lets sandboxes live for their `orphan_ttl_s`."""
        self._tasks -= 1
        if self._tasks > 0:
            return
        self.over = True
        if keep:
            for backend in self._backends.values():
                await backend.aclose(keep=True)
        await self._runtime.aclose()


def _pool_key(config: HermesSandboxConfig) -> str:
    return config.model_dump_json(exclude={"image", "cwd"})


_eval_runtime: EvalRuntime | None = None


def eval_runtime() -> EvalRuntime:
    """Return the runtime of the running loop. Inspect runs one eval at a time, each in a loop of its own.

    Raises:
        UsageError: Inspect runs on trio.
    """
    global _eval_runtime
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError as error:
        raise UsageError("the sandbox 'hermes' needs asyncio", hint="unset INSPECT_ASYNC_BACKEND") from error
    if _eval_runtime is None or _eval_runtime.over or _eval_runtime.loop is not loop:
        _eval_runtime = EvalRuntime(loop)
    return _eval_runtime


@sandboxenv(name="hermes")
class HermesSandbox(SandboxEnvironment):
    """A slot as the sandbox of a sample.

    An `InfraError`, such as a lost sandbox, is never turned into an error that Inspect reports to the model. It ends
    the sample, which then has an error and no score."""

    def __init__(self, commands: SlotCommands, slot: Slot) -> None:
        super().__init__()
        self._commands = commands
        self._slot = slot
        self._names: frozenset[str] = frozenset()
        """The number and the name of the slot's user; empty until they are needed."""

    # ------------------------------------------------------------------ tasks and samples

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Make the warm sandboxes of the task."""
        await eval_runtime().enter(read_config(config))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Acquire a slot, as soon as one is free."""
        settings = read_config(config)
        backend = eval_runtime().backend(settings)
        slot = await backend.acquire(image=settings.image, cwd=settings.cwd)
        return {"default": cls(backend.commands(slot), slot)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Release the slots, and kill and remove everything in them."""
        backend = eval_runtime().backend(read_config(config))
        for environment in environments.values():
            await backend.release(environment.as_type(HermesSandbox)._slot, reset_workspace=True)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """End the task, and with the last task all sandboxes."""
        await eval_runtime().leave(keep=not cleanup)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002 - Inspect's name
        """End one sandbox by its id, or all sandboxes whose driver is dead."""
        if id is None:
            await anyio.run_process([sys.executable, "-m", "hermes_core", "reap", "--any-owner"], stdout=None)
            return
        async with Runtime() as runtime:
            for name in runtime.backends.names():
                with suppress(HermesError):  # a backend that can't be used here
                    if any(info.sandbox_id == id for info in await runtime.backend(name).list()):
                        await runtime.backend(name).terminate_id(id)

    @classmethod
    def config_files(cls) -> list[str]:
        """Return the names of configuration files that Inspect looks for beside a task."""
        return ["hermes.yaml", "compose.yaml", "Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the settings from a log."""
        return HermesSandboxConfig.model_validate(config)

    def default_polling_interval(self) -> float:
        """Return the seconds between two checks of a command of `exec_remote`."""
        return 0.2

    # ------------------------------------------------------------------ commands and files

    async def exec(  # noqa: PLR0917 - Inspect's parameters
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - Inspect's name
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. `timeout_retry` and `concurrency` are ignored: time limits are reliable, so that no command
        needs another try, and the pool limits the commands at the same time.

        Raises:
            TimeoutError: the time limit is over; `truncated_output` has the output so far.
            PermissionError: the program or the directory may not be used.
            OutputLimitExceededError: standard output is longer than the limit. (Of standard error, 2 MiB are kept, with
                a notice of what was left out.)
            SandboxUserUnsupportedError: the slot is not root, and can't run commands as another user.
            InfraError: the sandbox is lost.
        """
        if user is not None and not await self._is(user):
            cmd = ["/bin/sh", "-c", AS_USER, user, *cmd]
        try:
            result = await self._commands.run(
                cmd,
                cwd=cwd,
                env=env,
                stdin=input.encode() if isinstance(input, str) else input,
                timeout_s=timeout,
                output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except CommandError as error:
            if error.code in ("permission", "cwd_permission"):
                raise PermissionError(errno.EACCES, error.message, cmd[0]) from error
            return ExecResult(False, 127 if error.code == "not_found" else 126, "", error.message)
        if result.timed_out:
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            late.truncated_output = result.text + result.error_text  # type: ignore[attr-defined]  # where Inspect looks
            raise late
        if result.stdout_truncated:
            limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit, result.text + result.error_text)
        return ExecResult(result.ok, result.returncode, result.text, result.error_text)

    async def _is(self, user: str) -> bool:
        """Return whether the slot's commands run as this user anyway.

        Raises:
            SandboxUserUnsupportedError: the slot's commands run as another user, and can't run as `user`.
        """
        if not self._names:
            result = await self._commands.run(["/bin/sh", "-c", WHO_AM_I])
            self._names = frozenset(result.text.split())
        if user not in self._names and "0" not in self._names:
            raise SandboxUserUnsupportedError(
                f"the commands of this slot run as {' or '.join(sorted(self._names))}, and not as {user!r}: "
                "users need `isolation: dedicated` and `slot_user: root` in containers"
            )
        return user in self._names

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, and make its directories. If an error is raised, nothing was written.

        Raises:
            OSError: its subclass for the reason, such as PermissionError or IsADirectoryError.
            InfraError: the sandbox is lost.
        """
        try:
            await self._commands.write_file(file, contents.encode() if isinstance(contents, str) else contents)
        except CommandError as error:
            raise _os_error(error, file) from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return the contents of a file.

        Raises:
            OSError: its subclass for the reason, such as FileNotFoundError.
            UnicodeDecodeError: the text is not UTF-8.
            OutputLimitExceededError: the file is larger than the limit.
            InfraError: the sandbox is lost.
        """
        limit, data = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE, b""
        while True:
            try:
                part = await self._commands.read_file(file, offset=len(data), limit=limit + 1 - len(data))
            except CommandError as error:
                raise _os_error(error, file) from error
            data += part.data
            if max(part.size, len(data)) > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            if not part.data or len(data) >= part.size:
                return data.decode() if text else data


def _os_error(error: CommandError, file: str) -> OSError:
    number = ERRNO.get(error.code)
    if number is None:
        return OSError(errno.EINVAL, error.message, file)
    return OSError(number, os.strerror(number), file)
