"""The types of the objects that an environment's hooks and cheats get: the rollout, and its slots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from hermes_core.sandbox.commands import Cwd, ExecutionResult, Slot, SlotCommands
from hermes_core.sandbox.images import Image
from hermes_core.sandbox.pool.preparation import Build

T = TypeVar("T")

MAX_FILES_BYTES = 64 << 20
MAX_DIFF_BYTES = 8 << 20


class ExecTool(Protocol):
    """Runs a slot tool (`bash`, `read_file`, `write_file`) or a registered sandbox tool in a slot."""

    async def __call__(
        self,
        tool_name: str,
        args: Mapping[str, Any] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the name that environments call it by
        *,
        user: str | None = None,
    ) -> ExecutionResult:
        """Run the tool.

        Args:
            timeout: seconds; None is the profile's `execution_timeout`.
            user: see `SlotHandle.as_user`; None is the slot's own user.

        Raises:
            UnknownNameError, ToolArgumentError: there is no such tool, or it does not accept these arguments. A model
                would get this error as an answer, but a hook that continued would score its own mistake.
            UsageError: the tool is a driver tool.
            InfraError: the sandbox failed. All other failures are in the result.
            StaleSlotError: the slot was released.
        """


class SlotHandle(Protocol):
    """One leased slot. If an operation raises `InfraError`, the rollout fails, even if the hook catches the error."""

    alone: bool
    """Whether `processor` holds all of the sandbox's processors."""

    @property
    def slot(self) -> Slot:
        """Return the lease's data: ids, workspace, profile, image.

        Raises:
            UsageError: the rollout has no slot.
        """

    @property
    def sandbox_id(self) -> str:
        """Return the id of the slot's sandbox."""

    @property
    def commands(self) -> SlotCommands:
        """Return the commands of the slot, run as the slot's user."""

    @property
    def preparation(self) -> SlotCommands:
        """Return the commands of the preparation user of the slot's sandbox. They start in the directory below which
        `prepare` makes its directories."""

    @property
    def exec_tool(self) -> ExecTool:
        """Return the function that runs tools in this slot."""

    def as_user(self, user: str) -> SlotCommands:
        """Return commands that run in the slot as this user of its system. The slot's own user must be root.

        Args:
            user: `USER[:GROUP]`, by name or number. Without a group, the user's own group is used.

        Raises:
            CommandError: `user` can't be the name of a user.
        """

    async def kill_everything(self) -> None:
        """Kill every process of the slot. All are dead when this returns.

        Raises:
            InfraError: the sandbox can't be reached.
            SlotUnclean: it can't be proved that all processes are dead.
        """

    async def empty(self) -> None:
        """Kill every process of the slot, and remove its files.

        Raises:
            InfraError, SlotUnclean: as `kill_everything` does.
        """

    async def prepare(self, key: str, build: Build | str | Sequence[str], *, private: bool = False) -> str:
        """Make a directory once per sandbox and key, as a user that no slot has. Slots can read it but not write it.

        Args:
            key: names the content. Callers with the same key wait while the directory is being made.
            build: an async function of the preparation user's commands and the directory, or one or more shell commands
                that run in the directory.
            private: whether slots can't read it either.

        Returns:
            The directory's absolute path in the sandbox.

        Raises:
            SetupFailed: a shell command of `build` failed; the next caller tries again.
        """

    def processor(self) -> AbstractAsyncContextManager[None]:
        """Hold one of the sandbox's processors while the block runs, for work that keeps it busy, such as tests.

        Entering the block waits until a processor is free. This wait does not count against the hook's time limit. If
        more such work runs than there are processors, each job slows down the others, and they miss time limits that
        they would otherwise meet. A check that is repeated on the sandbox where it was disturbed holds all processors.

        Raises:
            InfraError: the sandbox is gone.
        """

    async def files(self, path: str = ".", *, max_bytes: int = MAX_FILES_BYTES) -> bytes:
        """Return a plain tar of a directory's contents, as far as the slot's user may read them.

        Raises:
            CommandError: the tar is larger than `max_bytes` (code `too_large`), or `path` is no directory.
        """

    async def diff(self, path: str = ".", *, base: str = "HEAD", max_bytes: int = MAX_DIFF_BYTES) -> str:
        """Return the changes in the git repository at `path` since `base`, including new files, in the form of `git
        apply`.

        git runs in the slot, on a repository that the agent could have changed in any way. So treat the diff as the
        agent's work. All processes that git started are dead when this returns.

        Raises:
            CommandError: there is no such repository or commit, or the diff is larger than `max_bytes`.
        """


class RolloutHandle(SlotHandle, Protocol):
    """The rollout as its hooks see it: the agent's own slot, fresh slots, and the patch for the record."""

    trajectory_id: str
    """The rollout's unique id. It does not change when the rollout is restarted after an infrastructure failure."""

    @property
    def agent_user(self) -> str | None:
        """Return the user as which the agent's tools run; None is the slot's own user."""

    def fresh_slot(
        self,
        *,
        apart_from: str | None = None,
        image: Image | None = None,
        cwd: str | Cwd | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[SlotHandle]:
        """Return a fresh slot, for `async with`. It comes from the reserve that agents never use, and is reset
        afterwards.

        The slot is on the agent's sandbox where possible.

        Args:
            apart_from: the id of a sandbox to avoid while another sandbox has a vacant slot.
            image: the image of the slot's sandbox, by name or to be built; None is the agent's image.
            cwd: the directory in which commands start, which must exist when the first command starts; or `Cwd.IMAGE`
                for the image's own. None is the workspace.
            env: environment variables of every command; None means the item's variables.

        Raises:
            InfraError: no slot is available; raised on entering.
            ImageError: the image can't be built or fetched; raised on entering.
            ConfigError: the profile can't be used with this image; raised on entering.
        """

    async def check_afresh(
        self,
        lay_out: Callable[[SlotHandle], Awaitable[object]],
        check: Callable[[SlotHandle], Awaitable[T]],
        *,
        disturbed: Callable[[T], str | None],
    ) -> T:
        """Run a check in a fresh slot and return its result. Repeat the check once if other slots or the host may have
        disturbed it.

        If a process was killed or ran out of room, another slot or a busy host may have taken the memory. So the check
        is run once more: in another sandbox if one has room, or else in the same sandbox with all of its processors,
        and with the agent's slot emptied. The record mentions this. The second result counts in any case, because code
        under test can kill itself as often as it likes.

        Args:
            lay_out: puts the files that `check` needs into the slot. It must run none of the agent's code, and must not
                read the agent's slot, which may be empty.
            check: may run the agent's code.
            disturbed: returns why the agent may not have caused an outcome of `check`; None if the agent did.

        Raises:
            Disturbed: both times, the slot was disturbed before any of the agent's code ran.
            Exception: as `lay_out` or `check` raised it.
        """

    async def check_again(self, leased: SlotHandle, reason: str, check: Callable[[], Awaitable[T]]) -> T:
        """Repeat a check in the same slot, with all processors of the sandbox. The record mentions this.

        Args:
            leased: the slot of the check.
            reason: why the agent may not have caused the first outcome.
        """

    def record_patch(self, patch: str) -> None:
        """Store the agent's work as a patch in the record, for `hermes-rl rescore` and for readers."""
