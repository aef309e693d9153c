"""The tools of a check: the backend under test, slots of it, and tool backends and sandboxes of the check's own."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pytest

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    HermesError,
    Isolation,
    PluginError,
    PolicyError,
    ProvisionError,
    Runtime,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
    Slot,
    SlotCommands,
    ToolBackend,
    validate_data,
)
from hermes_core.sandbox.promises import create_sandbox, diagnosis_of, levels_of, list_sandboxes

SLOTS = 8
"""Number of slots in a sandbox of the tool backends that checks share."""

ACQUIRE_S = 90.0
"""Seconds that a check waits for a slot, including the creation of its sandbox."""

PROBE_S = 60.0
"""Time limit in seconds of a program that does nothing, in a new sandbox."""

FIRST_S = 600.0
"""Time limit in seconds for the first sandbox, whose image may have to be fetched."""

RAW_TTL_S = 120.0
"""Seconds that a sandbox without a guest lives, because its watchdog gets no heartbeat."""


SHOWN = 300
"""Maximum number of characters of an output in a message."""


@dataclass(frozen=True)
class ProgramOutput:
    """The output and the end of a program that ran over its own channel."""

    status: int
    out: bytes
    err: str

    def prints(self, wanted: bytes, what: str) -> None:
        """Check what the program wrote to its standard output.

        Raises:
            pytest.fail.Exception: the output was not `wanted`; the message names `what` and the program's end.
        """
        if self.out != wanted:
            said = f", and it wrote to standard error: {self.err.strip()[-SHOWN:]!r}" if self.err.strip() else ""
            got = f"got {_shorten(self.out)}, not {_shorten(wanted)}"
            pytest.fail(f"{what}: {got} (exit status {self.status}{said})")


def _shorten(output: bytes) -> str:
    text = repr(output)
    text = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    return f"{text} ({len(output)} bytes)"


async def communicate(channel: Channel, stdin: bytes = b"") -> ProgramOutput:
    """Send the program its input, and wait for its end."""
    assert isinstance(channel, Channel), f"`open` returned {channel!r:.80}, which is not a Channel"
    try:
        if stdin:
            await channel.write(stdin)
        parts = []
        while data := await channel.read(1 << 18):
            parts.append(data)
        return ProgramOutput(await channel.wait(), b"".join(parts), channel.stderr_tail)
    finally:
        await channel.aclose()


class Rig:
    """One run of the kit on one backend, with the sandboxes that its checks share; an async context manager.

    Args:
        name: the backend's name in the runtime.
        config: the profile to test it with, by the keys of its `config_class`. The kit sets the numbers of slots and
            sandboxes itself.
        isolation: the level for checks that are not about levels; None is `user`, or the next stronger one.

    Raises:
        UnknownNameError, ConfigError: the backend, the level or a key does not exist, or has a wrong value.
        PluginError: the backend can't be made here.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        isolation: str | Isolation | None = None,
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.config = dict(config or {})
        self.backend = runtime.backend(name)
        self.level = Isolation.SHARED
        self.missing: tuple[str, ...] = ()
        """The features that the sandboxes lack because they have no guest: they have no Python, or their slots are
        root."""
        self.no_guest = ""
        """The reason why the guest can't start; empty if it can."""
        self.no_slots = ""
        """The reason why no command can be run in a slot; empty if commands can be run. With a reason, only the checks
        of group `contract` can be run."""
        self.owner = f"kit-{secrets.token_hex(6)}"
        self.refused: dict[Isolation, str] = {}
        """The levels that the backend declares, but refuses to this profile, with the backend's reason."""
        self.broken: dict[Isolation, str] = {}
        """The levels that the backend declares and does not refuse, but that its sandboxes can't give, with the
        reason."""
        self._asked = None if isolation is None else Isolation.parse(isolation)
        self._shared: dict[Isolation, ToolBackend] = {}
        self.profile()

    async def __aenter__(self) -> Self:
        """Check that the backend can be used, and whether its sandboxes have a guest.

        Raises:
            ProvisionError: the backend can't be used here.
            PolicyError: the backend does not declare the level that was asked for.
            PluginError: the backend's `check` is broken.
        """
        diagnosis = await diagnosis_of(self.backend)
        if not diagnosis.usable:
            raise ProvisionError(
                f"backend {self.name!r} can't be used here: {diagnosis.summary}",
                hint="; ".join(diagnosis.advice) or f"`hermes-rl doctor {self.name}` says why",
            )
        try:
            await self._begin()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the sandboxes that the checks shared."""
        while self._shared:
            await self._shared.popitem()[1].aclose()

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities that the backend declares."""
        return self.backend.capabilities

    @property
    def levels(self) -> frozenset[Isolation]:
        """Return the declared levels that the profile under test can have."""
        return levels_of(self.backend, self.profile())

    def profile(self, **changes: Any) -> SandboxConfig:
        """Return the profile under test, with these keys changed."""
        what = f"the profile of backend {self.name!r}"
        return validate_data(self.backend.config_class, {**self.config, **changes, "name": "default"}, what)

    def tool_backend(
        self, level: Isolation, owner: str, config: SandboxConfig, backend: Backend | None = None
    ) -> ToolBackend:
        """Return a tool backend with one profile. The caller starts and closes it."""
        return ToolBackend(
            backend or self.backend,
            profiles={config.name: config},
            tools=self.runtime.tools,
            isolation=level,
            owner=owner,
        )

    async def common_tools(self, level: Isolation) -> ToolBackend:
        """Return the tool backend whose sandboxes the checks of one level share."""
        if level not in self._shared:
            config = self.profile(
                slots_per_sandbox=SLOTS, min_sandboxes=0, max_sandboxes=4, reserve_slots=0, acquire_timeout_s=ACQUIRE_S
            )
            self._shared[level] = self.tool_backend(level, self.owner, config)
        return self._shared[level]

    async def replace(self, level: Isolation) -> None:
        """Give up the shared sandboxes of a level, which a check may have damaged."""
        if (tools := self._shared.pop(level, None)) is not None:
            await tools.aclose()

    async def _begin(self) -> None:
        levels = sorted(self.levels)
        wanted = usual = [level for level in levels if level >= Isolation.USER] or levels
        root_of_sandbox = self.profile().root_of_sandbox(self._asked or Isolation.DEDICATED)
        guest = not root_of_sandbox and await self._has_python()
        if not guest:
            wanted = [level for level in (Isolation.DEDICATED, Isolation.SHARED) if level in levels]
        if self._asked is not None:
            wanted = usual = [level for level in levels if level is self._asked]
        if not usual:
            asked = "any isolation level" if self._asked is None else self._asked.label
            raise PolicyError(
                f"backend {self.name!r} does not have {asked} with this profile",
                hint=f"it has: {', '.join(level.label for level in levels) or 'none'}",
            )
        self.level = (wanted or usual)[0]
        if not wanted:
            why = self.no_guest or "the profile's slots are root"
            self.no_slots = self.no_slots or f"{why}; without a guest, only levels dedicated and shared work"
        if self.no_slots:
            return
        if guest:
            await self._try_levels(levels)
            return
        tools = await self.common_tools(self.level)
        async with tools.lease() as slot:
            self.missing = tools.missing(slot)

    async def _try_levels(self, levels: Sequence[Isolation]) -> None:
        """Find the declared levels that are refused to the profile under test, with the reasons."""
        for level in levels:
            if level is self.level:
                continue
            try:
                async with (await self.common_tools(level)).lease():
                    pass
            except PolicyError as error:
                await self.replace(level)
                by_backend = await self._refuses(level)
                (self.refused if by_backend else self.broken)[level] = error.message
            except HermesError:  # the checks report it
                await self.replace(level)

    async def _refuses(self, level: Isolation) -> bool:
        """Return whether the backend itself refuses to make a sandbox for this level."""
        try:
            async with Kit(self, level) as kit, kit.sandbox():
                return False
        except PolicyError:
            return True

    async def _has_python(self) -> bool:
        """Return whether the guest can start. If not, set `no_guest`, and `no_slots` if no command can be run.

        Raises:
            HermesError: the backend says that it can't make a sandbox.
            PluginError: the backend did not make and end a sandbox in time.
        """
        weakest = min(self.capabilities.isolation, default=Isolation.SHARED)
        tried = False
        try:
            async with asyncio.timeout(FIRST_S), Kit(self, weakest) as kit, kit.sandbox() as sandbox:
                self.no_guest = await _failure_of(sandbox, "python3", "-c", "")
                if self.no_guest and await _failure_of(sandbox, "sh", "-c", ":"):
                    self.no_slots = self.no_guest
                tried = True
        except TimeoutError as error:
            raise PluginError(
                f"backend {self.name!r} made and ended no sandbox within {FIRST_S:g} s",
                hint="look at what its `create`, `terminate` and `list` wait for",
            ) from error
        except Exception:  # after the attempt, an error is a matter for the checks
            if not tried:
                raise
        return not self.no_guest


async def _failure_of(sandbox: Sandbox, *argv: str) -> str:
    """Run a program that does nothing, and return the reason of its failure; empty if it succeeds."""
    try:
        async with asyncio.timeout(PROBE_S):
            done = await communicate(await sandbox.open(argv))
    except TimeoutError:
        why = f"it did not end within {PROBE_S:g} s"
    except Exception as error:
        why = reason_of(error)
    else:
        if done.status == 0:
            return ""
        why = f"exit status {done.status}" + (f", stderr: {done.err.strip()}" if done.err.strip() else ", no stderr")
    return f"the guest could not start: `{argv[0]}` can't be run in the sandbox: {why}"


class Kit:
    """The tools of one check: an async context manager that ends the slots and sandboxes that the check has left.

    `slot` and `lease` return slots of sandboxes that all checks share; `tools` and `sandbox` make new ones for the
    check.
    """

    def __init__(self, rig: Rig, level: Isolation, figures: dict[str, float] | None = None) -> None:
        self.rig = rig
        self.level = level
        """The isolation level of this check."""
        self.owner = f"{rig.owner}-{secrets.token_hex(4)}"
        """The owner of the check's own sandboxes."""
        self.figures = {} if figures is None else figures
        """The figures that the check has measured, by name."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(failed=error is not None)

    async def aclose(self, *, failed: bool = False) -> None:
        """End the slots and sandboxes that the check has left.

        Args:
            failed: whether the check has raised an error. Then it is no further error if it has left sandboxes.

        Raises:
            AssertionError: the check has left sandboxes. They are ended first.
        """
        await self._stack.aclose()
        left = await self.list_sandboxes()
        for info in left:
            await self.backend.terminate_id(info.sandbox_id)
        assert failed or not left, f"sandboxes were left: {', '.join(info.sandbox_id for info in left)}"

    @property
    def backend(self) -> Backend:
        """Return the backend under test."""
        return self.rig.backend

    @property
    def is_dedicated(self) -> bool:
        """Return whether each sandbox has one slot only."""
        return self.level is Isolation.DEDICATED

    @property
    def direct(self) -> bool:
        """Return whether the sandboxes have no guest, so that commands go through `sh`."""
        return bool(self.rig.missing)

    def figure(self, name: str, value: float) -> None:
        """Add a figure to `figures`."""
        self.figures[name] = round(value, 3)

    # --- slots of sandboxes that are shared with other checks

    async def common_tools(self) -> ToolBackend:
        """Return the tool backend whose sandboxes all checks of this level share."""
        return await self.rig.common_tools(self.level)

    async def lease(self, group: str | None = None) -> Slot:
        """Return a slot that is released and reset when the check is over."""
        tools = await self.common_tools()
        slot = await tools.acquire(group=group)
        self._stack.push_async_callback(tools.release, slot, reset_workspace=True)
        return slot

    async def slot(self) -> SlotCommands:
        """Return the commands of a slot that is released and reset when the check is over."""
        return (await self.common_tools()).commands(await self.lease())

    async def neighbours(self) -> tuple[SlotCommands, SlotCommands]:
        """Return the commands of two slots of one sandbox (of two sandboxes, if each has one slot)."""
        group = uuid.uuid4().hex
        one, other = await self.lease(group), await self.lease(group)
        if one.sandbox_id != other.sandbox_id and not self.is_dedicated:
            pytest.fail("two slots of one group are on two sandboxes, though there was room on one")
        tools = await self.common_tools()
        return tools.commands(one), tools.commands(other)

    # --- the check's own sandboxes

    @asynccontextmanager
    async def tools(
        self, *, seats: int = 2, per_sandbox: int = 2, warm: int = 0, backend: Backend | None = None, **config: Any
    ) -> AsyncIterator[ToolBackend]:
        """Make a tool backend of the check's own.

        Args:
            seats: maximum number of slots in all.
            per_sandbox: slots in one sandbox (one, if a sandbox has one slot only).
            warm: sandboxes made before the block begins, and kept.
            backend: a backend to use instead of the one under test, usually a wrapper of it.
            config: more keys of the profile.
        """
        slots = 1 if self.is_dedicated else per_sandbox
        numbers = {"slots_per_sandbox": slots, "max_sandboxes": -(-seats // slots), "min_sandboxes": warm}
        settings = {**numbers, "reserve_slots": 0, "acquire_timeout_s": ACQUIRE_S, **config}
        tools = self.rig.tool_backend(self.level, self.owner, self.rig.profile(**settings), backend)
        async with tools:
            yield tools

    def spec(self, creation_id: str | None = None, *, ttl_s: float = RAW_TTL_S, **config: Any) -> SandboxSpec:
        """Return the spec of a sandbox without a guest; `config` has more keys of its profile."""
        return SandboxSpec(
            creation_id=creation_id or uuid.uuid4().hex,
            owner=self.owner,
            config=self.rig.profile(orphan_ttl_s=ttl_s, **config),
            isolation=self.level,
            environment={"HERMES_KIT": "environment of the spec"},
            labels={"profile": "default"},
        )

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox, which the caller ends.

        Raises:
            HermesError: the backend raised an error, or returned no sandbox.
        """
        return await create_sandbox(self.backend, "create", lambda: self.backend.create(spec))

    @asynccontextmanager
    async def sandbox_of(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Make a sandbox, which ends with the block."""
        sandbox = await self.create(spec)
        try:
            yield sandbox
        finally:
            await sandbox.terminate()

    def sandbox(
        self, creation_id: str | None = None, *, ttl_s: float = RAW_TTL_S
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Make a sandbox of the check's own, without a guest, which ends with the block."""
        return self.sandbox_of(self.spec(creation_id, ttl_s=ttl_s))

    async def list_sandboxes(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the check's own sandboxes that the backend lists and that have not ended."""
        found = await list_sandboxes(self.backend, owner or self.owner)
        return [info for info in found if info.status is SandboxStatus.RUNNING]


def reason_of(error: BaseException) -> str:
    """Return an error in words, for the report."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    own = isinstance(error, AssertionError | pytest.skip.Exception | pytest.fail.Exception)
    return str(error) if own else f"{type(error).__name__}: {error}"
