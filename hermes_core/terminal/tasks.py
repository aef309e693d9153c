"""The sandboxes of tasks. Each is made on first use, keeps its directory, and ends when its task ends or is idle."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from hermes_core.aio import LoopThread, TaskSet
from hermes_core.errors import CommandError, HermesError, PolicyError, SandboxLost, SlotLost, StaleSlotError, UsageError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import ProcessUpdate, Slot, SlotCommands
from hermes_core.sandbox.contract import Backend, Isolation, SandboxConfig
from hermes_core.sandbox.pool.checkpoint import Checkpoint
from hermes_core.sandbox.pool.watches import Subscriber
from hermes_core.settings import Settings
from hermes_core.terminal.settings import TerminalSettings
from hermes_core.tool_backend import ToolBackend, check_time_limit
from hermes_core.tools.process import PROCESS
from hermes_core.tools.terminal import NOT_RUN, TERMINAL
from hermes_core.validation import validate_data

log = logging.getLogger(__name__)

DEFAULT_TASK = "default"
_LONGEST_LOOK_S = 60.0
ORPHAN_TTL_S = 24 * 3600.0
"""The time to live of a task's sandbox without a driver, if the next process can take it over."""

T = TypeVar("T")

_GONE = SandboxLost, SlotLost, StaleSlotError
"""Errors after which a task's slot is gone. After others (a wrong argument, a lost channel, a sandbox that is too busy
to answer), its files are intact."""

_ENTER = 'if [ -e "$TMPDIR/.hermes-cwd" ]; then cd "$(cat "$TMPDIR/.hermes-cwd")" 2>/dev/null; else {first}; fi; '
# On exit, the directory is written to a file of the slot, unless the command sets its own EXIT trap.
_REMEMBER = """trap 'pwd -P >"$TMPDIR/.hermes-cwd"' EXIT; """
_BEGIN_IN = 'mkdir -p -- {0} 2>/dev/null; cd -- {0} || {{ echo "{1} names it" >&2; exit 1; }}'
_SETTING = "TERMINAL_CWD, or the profile's workdir,"


@dataclass(frozen=True)
class TerminalCall:
    """One call of the terminal tool."""

    command: str
    background: bool = False
    timeout_s: float | None = None
    """Time limit in seconds. None is the limit in the settings."""
    task_id: str = DEFAULT_TASK
    workdir: str | None = None
    """Directory of the command. None is the directory where the task's last command ended."""
    profile: str | None = None
    pty: bool = False
    check_interval_s: float | None = None


@dataclass
class _Task:
    slot: asyncio.Task[Slot]
    used: float
    """The loop's time of its last use."""
    profile: str | None
    running: int = 0
    """Number of commands that run now."""


class TaskTerminals:
    """The tasks of one process, with a runtime and an event loop of their own. Thread-safe.

    Raises:
        ConfigError, UnknownNameError: the settings are wrong, or name a backend that does not exist.
    """

    def __init__(self, settings: TerminalSettings | None = None, runtime_settings: Settings | None = None) -> None:
        self._given = settings, runtime_settings
        self._settings = TerminalSettings()
        self._runtime: Runtime | None = None
        self._tools: ToolBackend | None = None
        self._checkpoint: Checkpoint | None = None
        self._taking_over: asyncio.Task[None] | None = None
        self._subscribers: list[Subscriber] = []
        self._tasks: dict[str, _Task] = {}
        self._work = TaskSet()
        self._thread = LoopThread("terminal tasks", self._end)

    @property
    def is_closed(self) -> bool:
        """Return whether the tasks have been ended."""
        return self._thread.closed

    def call(self, request: TerminalCall) -> dict[str, Any]:
        """Run a command, and block until it is done. Return the tool's answer."""
        return self._thread.call(self._answer(request))

    async def run(self, request: TerminalCall) -> dict[str, Any]:
        """Run a command from another event loop. Return the tool's answer."""
        return await self._thread.run(self._answer(request))

    def process(self, task_id: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call the tool `process` for a task, and block until it is done. Return the tool's answer."""
        return self._thread.call(self._with_errors(self._process(task_id, args)))

    def subscribe(self, subscriber: Subscriber) -> None:
        """Await `subscriber(update)`, in the event loop of the tasks, for updates of watched processes."""
        self._subscribers.append(subscriber)

    def cleanup(self, task_id: str | None, *, force: bool = False) -> bool:
        """End a task's sandbox, and block until it is done. Return whether there was one.

        Raises:
            UsageError: the task has running background processes, and `force` is not set.
        """
        return self._thread.call(self._cleanup(task_id or DEFAULT_TASK, force))

    def close(self) -> None:
        """End everything, and block until it is done."""
        self._thread.close()

    # --- in the event loop

    async def _answer(self, request: TerminalCall) -> dict[str, Any]:
        return await self._with_errors(self._run(request))

    async def _with_errors(self, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer of `work`, or an answer for its error, in both cases without known secrets."""
        try:
            answer = await work
        except HermesError as error:
            answer = not_run(error)
        redact = self._runtime.redact if self._runtime is not None else str
        return {key: redact(value) if isinstance(value, str) else value for key, value in answer.items()}

    async def _run(self, request: TerminalCall) -> dict[str, Any]:
        tools, task_id = await self._ready_backend(), request.task_id
        limit = self._settings.timeout_s if request.timeout_s is None else check_time_limit(request.timeout_s)
        task = self._task(tools, task_id, request.profile)
        task.running += 1
        try:
            slot = await _outcome(task.slot)
            result = await tools.execute(slot, TERMINAL, await self._args(tools, task, request, limit), timeout_s=limit)
        except HermesError as error:
            if isinstance(error, _GONE) or not _had(task.slot):
                self._forget(tools, task_id, task)  # the next command starts with a new sandbox
            raise
        finally:
            task.running -= 1
            task.used = asyncio.get_running_loop().time()
        failed = {"output": result.output, "exit_code": NOT_RUN, "error": result.error, "status": "error"}
        answer = dict(result.answer or failed)
        return answer if "exit_code" in answer else {**failed, **answer}

    async def _args(self, tools: ToolBackend, task: _Task, request: TerminalCall, limit: float) -> dict[str, Any]:
        """Return the tool's arguments. They run the command in the task's directory and, unless it runs in the
        background, record the directory where it ends.

        A background command may end at any time, and must not change the task's directory then. It is started with
        `workdir`, so that its listed command is the caller's.
        """
        args: dict[str, Any] = {"command": request.command, "background": request.background, "pty": request.pty}
        if request.check_interval_s is not None:
            args["check_interval"] = request.check_interval_s
        if request.workdir is not None:
            args["workdir"] = request.workdir
        elif request.command.strip():
            enter = self._entering(task.profile)
            if request.background:
                args["workdir"] = await _directory(tools.commands(task.slot.result()), enter, limit)
            else:
                args["command"] = enter + _REMEMBER + request.command
        return args

    def _entering(self, profile: str | None) -> str:
        """Return shell code that changes to the directory where the task's last command ended. For the first command,
        this is the directory that the settings name, if any."""
        first = self._settings.cwd_of(profile)
        return _ENTER.format(first="true" if first is None else _BEGIN_IN.format(shlex.quote(first), _SETTING))

    def _task(self, tools: ToolBackend, task_id: str, profile: str | None) -> _Task:
        if task_id not in self._tasks:
            acquiring = self._work.spawn(tools.acquire(task_id, profile=profile), f"slot of task {task_id}")
            self._tasks[task_id] = _Task(acquiring, asyncio.get_running_loop().time(), profile)
        return self._tasks[task_id]

    async def _process(self, task_id: str, args: dict[str, Any]) -> dict[str, Any]:
        tools = await self._ready_backend()
        task = self._tasks.get(task_id)
        if task is None:
            raise UsageError(f"task {task_id!r} has no sandbox", hint="the first command of a task makes one")
        task.running += 1
        try:
            slot = await _outcome(task.slot)
            return (await tools.execute(slot, PROCESS, args, timeout_s=self._settings.timeout_s)).to_tool_result()
        finally:
            task.running -= 1
            task.used = asyncio.get_running_loop().time()

    async def _ready_backend(self) -> ToolBackend:
        """Return the tool backend. If there is a checkpoint, first take over the sandboxes of the previous process."""
        tools = self._open()
        if self._checkpoint is not None:
            if self._taking_over is None or (self._taking_over.done() and self._taking_over.exception() is not None):
                self._taking_over = self._work.spawn(self._take_over(tools), "take over")
            await _outcome(self._taking_over)
        return tools

    async def _take_over(self, tools: ToolBackend) -> None:
        now = asyncio.get_running_loop().time()
        for slot in await tools.take_over():
            ready: asyncio.Task[Slot] = self._work.spawn(_already(slot), f"slot of task {slot.trajectory_id}")
            self._tasks[slot.trajectory_id or DEFAULT_TASK] = _Task(ready, now, slot.profile)

    def _open(self) -> ToolBackend:
        if self._tools is None:
            settings, runtime_settings = self._given
            reading = self._runtime or Runtime(runtime_settings)
            self._settings = TerminalSettings.load(reading.config_classes()) if settings is None else settings
            if self._runtime is None:
                # A backend of hosts looks for earlier sandboxes only on the hosts that its runtime's profiles name.
                profiles = {**reading.settings.profiles, **self._settings.profiles}
                self._runtime = Runtime(reading.settings.model_copy(update={"profiles": profiles}))
            backend = self._runtime.backend(self._settings.backend)
            level = strongest(backend)
            if (folder := self._settings.state_dir) is not None and self._checkpoint is None:
                self._checkpoint = Checkpoint(folder, self._runtime.owner)
            self._tools = ToolBackend(
                backend,
                profiles={
                    name: _profile(backend, name, values, recovered=self._checkpoint is not None)
                    for name, values in self._settings.profiles.items()
                },
                tools=self._runtime.tools,
                isolation=level,
                owner=self._runtime.owner,
                default_profile=self._settings.default_profile,
                take_over=self._runtime.settings.owner is not None,
                checkpoint=self._checkpoint,
            )
            self._tools.subscribe(self._tell)
            self._work.spawn(self._watch(self._tools), "idle tasks")
        return self._tools

    async def _watch(self, tools: ToolBackend) -> None:
        """End the sandboxes of idle tasks."""
        lifetime = self._settings.lifetime_s
        while True:
            await asyncio.sleep(min(_LONGEST_LOOK_S, lifetime / 4))
            for task_id, task in [*self._tasks.items()]:
                idle = asyncio.get_running_loop().time() - task.used
                if task.running or idle < lifetime:
                    continue
                if living := await self._busy(tools, task):
                    log.info("task %s is idle and kept: %s of it live", task_id, ", ".join(living))
                else:
                    log.info("task %s was idle for %g s, and its sandbox is ended", task_id, idle)
                    self._forget(tools, task_id, task)

    async def _tell(self, update: ProcessUpdate) -> None:
        for subscriber in [*self._subscribers]:
            try:
                await subscriber(update)
            except Exception:
                log.exception("a subscriber to background processes failed")

    async def _busy(self, tools: ToolBackend, task: _Task) -> list[str]:
        """Return the background processes that the task left running on purpose."""
        if not _had(task.slot):
            return []
        try:
            processes = await tools.commands(task.slot.result()).processes()
        except HermesError:
            return []
        return [process.process_id for process in processes if process.running]

    async def _cleanup(self, task_id: str, force: bool) -> bool:
        task = self._tasks.get(task_id)
        if task is None or self._tools is None:
            return False
        if not force and (living := await self._busy(self._tools, task)):
            raise UsageError(
                f"task {task_id!r} was not ended: it has {len(living)} live background processes ({', '.join(living)})",
                hint="end them with process(action='kill'), or use force=True",
            )
        await asyncio.shield(self._forget(self._tools, task_id, task))
        return True

    def _forget(self, tools: ToolBackend, task_id: str, task: _Task) -> asyncio.Task[None]:
        if self._tasks.get(task_id) is task:
            del self._tasks[task_id]
        return self._work.spawn(_release(tools, task.slot), f"end of task {task_id}")

    async def _end(self) -> None:
        await self._work.aclose()
        try:
            if self._tools is not None:
                await self._tools.aclose()
        finally:
            if self._checkpoint is not None:
                self._checkpoint.close()
            if self._runtime is not None:
                await self._runtime.aclose()


def not_run(error: HermesError) -> dict[str, Any]:
    """Return the tool's answer for a command that could not be run."""
    return {"output": "", "exit_code": NOT_RUN, "error": str(error), "status": "error"}


async def _already(slot: Slot) -> Slot:
    return slot


def _had(slot: asyncio.Task[Slot]) -> bool:
    """Return whether the task has got its slot."""
    return slot.done() and not slot.cancelled() and slot.exception() is None


async def _outcome(work: asyncio.Task[T]) -> T:
    """Return the result of `work`, which goes on if the caller is cancelled.

    Raises:
        SandboxLost: another caller cancelled `work`.
        Exception: the error of `work`.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if not work.cancelled() or waiting is None or waiting.cancelling():
            raise
    raise SandboxLost(
        "the task was ended while this waited for its sandbox", hint="the next command of the task makes another"
    )


async def _directory(commands: SlotCommands, enter: str, limit: float) -> str:
    """Return the directory to which the shell code `enter` changes.

    Raises:
        CommandError: the directory can't be entered.
    """
    result = await commands.run(f"{enter}pwd -P", timeout_s=limit)
    if not result.ok:
        error = result.error_text.strip()
        raise CommandError(f"the command was not run: its directory can't be entered: {error or 'no answer'}")
    return result.text.removesuffix("\n")


async def _release(tools: ToolBackend, acquiring: asyncio.Task[Slot]) -> None:
    acquiring.cancel()
    await asyncio.wait([acquiring])
    if _had(acquiring):
        await tools.release(acquiring.result(), reset_workspace=True)


def strongest(backend: Backend) -> Isolation:
    """Return the strongest level for tasks that the backend grants, except `private-root`: tasks are not root unless
    someone asks for it, and many accounts can't grant it.

    Raises:
        PolicyError: the backend can't isolate tasks.
    """
    level = max(backend.capabilities.isolation - {Isolation.PRIVATE_ROOT}, default=Isolation.SHARED)
    if level < Isolation.USER:
        raise PolicyError(
            f"backend {backend.name!r} can't isolate tasks here: it grants {level.label!r} at most",
            hint="`hermes-rl doctor` says what it needs for more, or set TERMINAL_ENV to another backend",
        )
    return level


def _profile(backend: Backend, name: str, values: dict[str, Any], *, recovered: bool) -> SandboxConfig:
    """Return a profile for tasks: with one slot per sandbox, and no slots reserved for verification.

    Args:
        recovered: whether the next process can take over its sandboxes, so that these have to wait for it.
    """
    kind = backend.config_class
    config = kind.from_dict(name, values)
    changes: dict[str, Any] = {"slots_per_sandbox": 1, "reserve_slots": 0}
    if recovered and "orphan_ttl_s" not in config.model_fields_set:
        changes["orphan_ttl_s"] = ORPHAN_TTL_S
    if "min_sandboxes" not in config.model_fields_set:
        changes["min_sandboxes"] = 0
    return validate_data(kind, {**config.model_dump(exclude_unset=True), **changes}, f"profile {name!r}")
