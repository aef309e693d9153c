"""The run behind a spec: its environment, its sandboxes and its rollouts, in an event loop of its own.

TRL is synchronous, and hermes-rl is not. So a run lives in a thread, and the trainer's threads wait for it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from hermes_core import (
    ConfigError,
    DrivenRollout,
    Environment,
    Group,
    GroupRoller,
    Item,
    LoopThread,
    Record,
    RolloutContext,
    RunOptions,
    Runtime,
    Session,
    SingleFlight,
    TaskSet,
    UnknownNameError,
    UsageError,
    open_session,
)
from hermes_core.envs.session import check_scored

log = logging.getLogger(__name__)

T = TypeVar("T")

TESTED = "1.16.0"
"""The version of TRL with which this package was tested."""

ITEM = "item_id"
"""The field of a prompt's last message that names the item. `rollout_func` gets nothing but the prompt."""


class Run:
    """An open run. `call` may be used in any thread; every coroutine of it runs in its own loop.

    Args:
        environment: its name, or an instance.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent `model`; None if TRL runs the model itself.
        options: the options of the run.
        refills: number of failed rollouts of a group that may be replaced.

    Raises:
        HermesError: it can't be opened, as `open_session` says.
    """

    def __init__(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any] | None,
        options: RunOptions,
        refills: int,
    ) -> None:
        self._refills = refills
        self._tasks = TaskSet()
        self._stack = AsyncExitStack()
        self._rollouts: set[DrivenRollout] = set()
        self._starting = SingleFlight[RolloutContext]("the start of the sandboxes", keep=True)
        self._roller: GroupRoller | None = None
        self.exact = agent is not None
        """Whether the rollouts have a model of their own, which keeps tokens."""
        self._loop = LoopThread("hermes-rl for TRL", self._close)
        try:
            self.session = self.call(self._open(environment, env, agent, options))
            self.items = self.call(self._items())
        except BaseException:
            self._loop.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, which runs in the run's loop. Ctrl-C cancels it.

        Raises:
            LoopEnded: the run is closed.
        """
        return self._loop.call(work)

    def close(self) -> None:
        """End the rollouts and the sandboxes. Idempotent. It also happens when the program ends."""
        self._loop.close()

    @property
    def closed(self) -> bool:
        """Return whether it is closed."""
        return self._loop.closed

    async def context(self) -> RolloutContext:
        """Return what all rollouts have in common. The first caller starts the sandboxes."""
        return await self._starting.get(self._tasks, self._start)

    def prompt(self, item_id: str) -> list[dict[str, Any]]:
        """Return the prompt of an item, whose last message names the item."""
        *before, last = self.session.environment.initial_messages(self.items[item_id])
        return [*before, {**last, ITEM: item_id}]

    def tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools of all rollouts.

        Raises:
            UsageError: not all items have the same tools.
        """
        session, offered = self.session, self.session.tools
        drawn = session.environment.config.distribution or any(map(session.environment.distribution, self._each()))
        names = {offered.names(item) for item in self._each()} or {offered.names()}
        if drawn or len(names) > 1:
            raise UsageError(
                f"the rollouts of environment {session.name!r} differ in their tools, and all instances of an "
                "environment_factory have the same",
                hint="use rollout_func, or name the toolsets in env: enabled_toolsets",
            )
        return session.runtime.tools.schemas(names.pop())

    async def begin(self, item_id: str) -> DrivenRollout:
        """Return a rollout that has begun, or could not: then its record says why.

        Raises:
            UsageError, PolicyError: no slot can be had with these settings.
        """
        context = await self.context()
        if len(self._rollouts) >= self.session.room:
            raise UsageError(
                f"{len(self._rollouts)} rollouts hold all slots until they are scored, and TRL begins another",
                hint="set concurrency of HermesSpec to the rollouts of a generation batch in one process: "
                "per_device_train_batch_size × steps_per_generation",
            )
        item = self._item(item_id)
        rollout = DrivenRollout(self.session.tools.offered(context, item, item_id), item)
        self._rollouts.add(rollout)
        try:
            await rollout.begin()
        except BaseException:
            self._rollouts.discard(rollout)
            raise
        return rollout

    async def end(self, rollouts: Sequence[tuple[DrivenRollout, str]]) -> list[Record]:
        """Verify rollouts, all at the same time, and return their records. Each comes with its model's last message."""
        records = await asyncio.gather(*(rollout.end(text) for rollout, text in rollouts))
        self._rollouts.difference_update(rollout for rollout, _ in rollouts)
        return records

    async def drop(self, rollout: DrivenRollout) -> None:
        """End a rollout that nobody scores."""
        await rollout.aclose()
        self._rollouts.discard(rollout)

    async def roll(self, sizes: Sequence[tuple[str, int]]) -> list[Group]:
        """Return groups of rollouts, all rolled out at the same time. Each is given as the item's id and its size.

        Raises:
            HermesError: as `GroupRoller.roll` says.
        """
        roller = await self.roller()
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(roller.roll(self._item(item_id), size)) for item_id, size in sizes]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [group.result() for group in groups]

    async def roller(self) -> GroupRoller:
        """Return what rolls out groups."""
        context = await self.context()
        if self._roller is None:
            room, tools = self.session.room, self.session.tools
            self._roller = GroupRoller(context, tools, room=room, refills=self._refills, exact=True)
        return self._roller

    def _item(self, item_id: str) -> Item:
        if item_id not in self.items:
            raise UnknownNameError("item", item_id, ())
        return self.items[item_id]

    def _each(self) -> list[Item]:
        return list(self.items.values())

    async def _open(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any] | None,
        options: RunOptions,
    ) -> Session:
        check_version()
        runtime = await self._stack.enter_async_context(Runtime())
        # Where TRL runs the model, the agent is the caller. `nop` only stands for it: `model` decides the isolation.
        settings = None if agent is None else runtime.agent_settings({"tool_call_parser": "auto", **agent}, "model")
        name = "nop" if settings is None else "model"
        opening = open_session(runtime, environment, name, options, env=env, settings=settings, work_of="model")
        session = await self._stack.enter_async_context(opening)
        check_scored(session.environment)
        return session

    async def _items(self) -> dict[str, Item]:
        environment = self.session.environment
        return {environment.item_id(item): item for item in environment.selected_items()}

    async def _start(self) -> RolloutContext:
        return await self._stack.enter_async_context(self.session.sandboxes())

    async def _close(self) -> None:
        try:
            await asyncio.gather(*(rollout.aclose() for rollout in self._rollouts))
            await self._tasks.aclose()
        finally:
            await self._stack.aclose()


def check_version() -> None:
    """Warn of a version of TRL with which this was not tested. What is used of TRL is experimental there.

    Raises:
        ConfigError: TRL is not installed.
    """
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("TRL is not installed", hint="pip install hermes-rl-trl, which brings it") from error
    if found.split(".")[:2] != TESTED.split(".")[:2]:
        log.warning("hermes-rl-trl was tested with trl %s, and this is trl %s", TESTED, found)
