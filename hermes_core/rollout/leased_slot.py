"""A leased slot for environment hooks: commands, tools, prepared directories, and the agent's work."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from enum import Enum
from typing import Any, TypeVar

from hermes_core.errors import CommandError, HermesError, InfraError, ModelError, ToolArgumentError, UsageError
from hermes_core.handles import MAX_DIFF_BYTES, MAX_FILES_BYTES
from hermes_core.rollout.command_log import CommandLog
from hermes_core.rollout.unawaited import Calls, Pending, must_await
from hermes_core.sandbox.as_user import AsUser, is_root
from hermes_core.sandbox.commands import Call, CommandResult, ExecutionResult, Operation, Slot, SlotCommands
from hermes_core.sandbox.pool.preparation import Build, as_build
from hermes_core.tool_backend import ToolBackend

T = TypeVar("T")

DIFF_TIMEOUT_S = 120.0
_NO_ROOM = ("No space left on device", "Disk quota exceeded")

# A temporary index leaves the repository's own index as the agent left it. Hooks, external diffs and text conversions
# are off, because the agent may have configured them.
_DIFF_SCRIPT = r"""set -e
index=$(mktemp -d)
trap 'rm -rf "$index"' EXIT
export GIT_INDEX_FILE="$index/index" GIT_OPTIONAL_LOCKS=0 GIT_TERMINAL_PROMPT=0
if [ -n "$DIFF_BINARY" ]; then printf '* -diff\n' > "$index/attributes"; else : > "$index/attributes"; fi
git() {
  command git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=true \
    -c core.attributesFile="$index/attributes" "$@"
}
cd "$(git rev-parse --show-toplevel)"
git read-tree "$DIFF_BASE"
git add -A .
git diff --cached --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv "$DIFF_BASE" --
"""


class ErrorOrigin(Enum):
    """Where an error happened."""

    AGENT = "agent"
    """In the agent's own slot."""
    FRESH = "fresh"
    """In a slot where no agent has written."""
    PREPARATION = "preparation"
    """In a place where no slot can write."""


Note = Callable[[BaseException, ErrorOrigin], None]
"""Called with every error of a slot and every cancellation of its commands, before the hook gets it."""


class LeasedSlot:
    """One leased slot. Every `InfraError` in the slot is noted, so that a hook can't hide the error by catching it.

    Attributes:
        preparation: the commands of the preparation user of the slot's sandbox, in the directory of prepared things.
        limit: the time limit of the hook that uses the slot, or None.
        alone: whether `processor` holds all of the sandbox's processors.
        calls: calls that were not awaited, also those on fresh slots of the same rollout.
        log: the commands that hooks ran, also those in fresh slots of the same rollout.
    """

    alone = False

    origin = ErrorOrigin.AGENT

    def __init__(
        self,
        backend: ToolBackend,
        slot: Slot | None,
        note: Note,
        *,
        group: str | None = None,
        calls: Calls | None = None,
        log: CommandLog | None = None,
    ) -> None:
        self._slot = slot
        self.calls = calls or Calls()
        self.log = log or CommandLog()
        self.group = group
        self.limit: asyncio.Timeout | None = None
        self._backend = backend
        self._note = note

    @property
    def slot(self) -> Slot:
        """Return the slot's handle in the tool backend.

        Raises:
            UsageError: the rollout has no slot.
        """
        if self._slot is None:
            raise UsageError(
                "this rollout has no slot: its environment said that its hooks need none, and no tool does",
                hint="let `uses_slot` of the environment return True",
            )
        return self._slot

    @functools.cached_property
    def commands(self) -> SlotCommands:
        """Return the commands of the slot, run as the slot's user."""
        return self._observe("commands", self._backend.commands(self.slot), self.origin)

    def as_user(self, user: str) -> SlotCommands:
        """Implement `SlotHandle.as_user`."""
        return self.commands if is_root(user) else AsUser(self.commands, user)

    @property
    def sandbox_id(self) -> str:
        """Return the id of the slot's sandbox."""
        return self.slot.sandbox_id

    @functools.cached_property
    def preparation(self) -> SlotCommands:
        """Return the preparation user's commands on this slot's sandbox."""
        return self._observe("preparation", self._backend.preparation(self.slot), ErrorOrigin.PREPARATION)

    @must_await()
    async def exec_tool(
        self,
        tool_name: str,
        args: Mapping[str, Any] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the name that environments call it by
        *,
        user: str | None = None,
    ) -> ExecutionResult:
        """Implement `ExecTool`."""
        tool = self._backend.tool(tool_name)
        args = args or {}
        work = self._watch(self._backend.execute(self.slot, tool, args, timeout_s=timeout, user=user))
        result = await (self.log.run(str(args["command"]), work) if "command" in args else work)
        if result.metadata.get("invalid_arguments"):
            raise ToolArgumentError(result.error, slot_id=self.slot.slot_id, trajectory_id=self.slot.trajectory_id)
        return result

    @must_await()
    async def kill_everything(self) -> None:
        """Implement `SlotHandle.kill_everything`."""
        await self._watch(self._backend.kill_everything(self.slot))

    @must_await()
    async def empty(self) -> None:
        """Implement `SlotHandle.empty`."""
        await self._watch(self._backend.empty(self.slot))

    @must_await()
    async def prepare(self, key: str, build: Build | str | Sequence[str], *, private: bool = False) -> str:
        """Implement `SlotHandle.prepare`."""
        fill = as_build(build)

        async def fill_logged(commands: SlotCommands, directory: str) -> None:
            await fill(commands.around(self._log_run), directory)

        try:
            return await self._watch(self._backend.prepare(self.slot, key, fill_logged, private=private))
        except HermesError as error:
            await self._check_room(error, ErrorOrigin.PREPARATION)
            raise

    @asynccontextmanager
    async def processor(self) -> AsyncIterator[None]:
        """Implement `SlotHandle.processor`."""
        async with AsyncExitStack() as stack:
            with self.clock_stopped():
                turn = self._backend.processor(self.slot, alone=self.alone)
                await self._watch(stack.enter_async_context(turn))
            yield

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Stop the clock of `limit` while the block runs."""
        limit = self.limit
        due = None if limit is None or limit.expired() else limit.when()
        if limit is None or due is None:
            yield
            return
        clock = asyncio.get_running_loop().time
        limit.reschedule(None)
        began = clock()
        try:
            yield
        finally:
            limit.reschedule(due + clock() - began)

    @must_await()
    async def files(self, path: str = ".", *, max_bytes: int = MAX_FILES_BYTES) -> bytes:
        """Implement `SlotHandle.files`."""
        return await self.commands.tar_out(path, max_bytes=max_bytes)

    @must_await()
    async def diff(self, path: str = ".", *, base: str = "HEAD", max_bytes: int = MAX_DIFF_BYTES) -> str:
        """Implement `SlotHandle.diff`."""
        try:
            try:
                return (await self._diff(path, base, max_bytes, binary=False)).decode("utf-8")
            except UnicodeDecodeError:  # text that is not UTF-8, which JSON can carry only in git's binary form
                return (await self._diff(path, base, max_bytes, binary=True)).decode("utf-8", "replace")
        finally:
            await self.kill_everything()

    async def _diff(self, path: str, base: str, max_bytes: int, *, binary: bool) -> bytes:
        done = await self.commands.run(
            _DIFF_SCRIPT,
            cwd=path,
            env={"DIFF_BASE": base, "DIFF_BINARY": "1" if binary else ""},
            timeout_s=DIFF_TIMEOUT_S,
            output_limit=2 * max_bytes,
        )
        if not done.ok:
            reason = done.error_text.strip()[-500:] or f"exit code {done.returncode}"
            raise CommandError(f"no diff of {path!r} against {base!r}: {reason}", slot_id=self.slot.slot_id)
        if done.stdout_truncated or len(done.stdout) > max_bytes:
            size = f"{done.stdout_bytes} bytes, more than {max_bytes}"
            raise CommandError(f"the diff of {path!r} has {size}", code="too_large", slot_id=self.slot.slot_id)
        return done.stdout

    def _observe(self, name: str, commands: SlotCommands, origin: ErrorOrigin, *, log: bool = True) -> SlotCommands:
        """Return the commands, wrapped so that hooks must await each call and that errors are noted. Messages call the
        object `name`."""

        def observe(call: Call, operation: Operation[T], /) -> Pending[T]:
            work = self._note_errors(call, operation, origin, log=log)
            return Pending(f"{name}.{operation.name}(…)", work, self.calls)

        return commands.around(observe)

    async def _note_errors(self, call: Call, operation: Operation[T], origin: ErrorOrigin, *, log: bool) -> T:
        """Carry out an operation, and note its errors.

        Raises:
            Disturbed: the operation failed because other slots have filled the disk.
        """
        try:
            outcome = await (self._log_run(call, operation) if log else call(operation))
        except (HermesError, asyncio.CancelledError) as error:
            self._note(error, origin)
            await self._check_room(error, origin)
            raise
        await self._check_room(outcome, origin)
        return outcome

    def _log_run(self, call: Call, operation: Operation[T], /) -> Coroutine[Any, Any, T]:
        """Carry out an operation. The command of a `run` is logged."""
        work = call(operation)
        return work if operation.command is None else self.log.run(operation.command.line, work)

    async def _check_room(self, outcome: object, origin: ErrorOrigin) -> None:
        """Raise `Disturbed` if the outcome is a failure and other slots have filled the disk of the sandbox."""
        said = ""
        if isinstance(outcome, HermesError):
            said = outcome.message
        elif isinstance(outcome, CommandResult) and not outcome.ok:
            said = outcome.text + outcome.error_text
        if not any(words in said for words in _NO_ROOM):
            return
        check = self._backend.check_room(self.slot, preparation=origin is ErrorOrigin.PREPARATION)
        await (check if origin is ErrorOrigin.FRESH else self._watch(check))  # in a fresh slot, failed work is repeated

    async def _watch(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except InfraError as error:
            self._note(error, self.origin)
            raise


class ModelTime:
    """The time that the agent in a slot waits for its model. This time has its own limit, and does not count as the
    agent's time.

    Args:
        limit_s: maximum seconds of all waits together; None is no limit.
    """

    def __init__(self, slot: LeasedSlot, limit_s: float | None) -> None:
        self._slot = slot
        self._limit_s = self._left_s = limit_s

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Measure one wait, as described for `AgentTask.waiting`."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            with self._slot.clock_stopped():
                async with asyncio.timeout(self._left_s) as limit:
                    yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ModelError(
                f"the model took longer than the {self._limit_s:g} s that a rollout may wait for it",
                hint="look at what keeps its endpoint busy, lower the concurrency, or raise model_timeout",
            ) from error
        finally:
            if self._left_s is not None:
                self._left_s = max(0.0, self._left_s - (clock() - began))


class AgentTime:
    """The time of the agent in a slot: a limit for all its work, and a limit for the present part of the work.

    Args:
        whole_s: seconds for all parts together, without the waits for the model; None is no limit.
        part_s: seconds for the first part; None leaves only the limit for all parts.

    Attributes:
        part_s: the seconds that the present part had at its start; None is no limit.
    """

    def __init__(self, slot: LeasedSlot, whole_s: float | None, part_s: float | None) -> None:
        self._slot = slot
        self._left_s = whole_s
        self.part_s = self._shorter(part_s)

    def begin_part(self, part_s: float | None) -> None:
        """Begin the time of the next part. The slot's `limit` must be the agent's limit, and the clock must run."""
        limit = self._slot.limit
        if limit is None:
            return
        now, due = asyncio.get_running_loop().time(), limit.when()
        if self._left_s is not None and self.part_s is not None and due is not None:
            self._left_s = max(0.0, self._left_s - (self.part_s - (due - now)))
        self.part_s = self._shorter(part_s)
        limit.reschedule(None if self.part_s is None else now + self.part_s)

    def _shorter(self, part_s: float | None) -> float | None:
        return min((each for each in (self._left_s, part_s) if each is not None), default=None)


class Fresh(LeasedSlot):
    """A fresh slot for verification: a lease of its own, in which no agent has written."""

    origin = ErrorOrigin.FRESH
