"""A run for a trainer that is not asynchronous: its session, sandboxes and rollouts, in an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.chat import Chat
from hermes_core.agents.generate import TokenServer
from hermes_core.agents.model import ModelAgent
from hermes_core.aio import LoopThread, SingleFlight, TaskSet, together
from hermes_core.environment import Environment, Item
from hermes_core.envs.driven import DrivenRollout
from hermes_core.envs.group import Group, GroupRoller
from hermes_core.envs.options import RunOptions
from hermes_core.envs.record import Record
from hermes_core.envs.rollout import RolloutContext
from hermes_core.envs.session import Session, check_scored, open_session
from hermes_core.errors import UnknownNameError, UsageError
from hermes_core.runtime import Runtime

T = TypeVar("T")

NAME = "name"
"""What names the agent among its settings."""


class DrivenRun:
    """An open run whose rollouts begin one by one, as a trainer asks for them.

    `call` may be used in any thread; every coroutine of the run goes through it, and runs in the run's loop.

    Args:
        environment: its name, or an instance.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent, whose rollouts are token-exact; None if the trainer runs the model itself. `name`
            is the agent's: `model`, if it is not there, or a program's.
        options: the options of the run.
        refills: number of failed rollouts of a group that `roll` may replace.
        more_room: what to do where rollouts hold all slots and the trainer begins another.

    Raises:
        HermesError: it can't be opened, as `open_session` says.
    """

    def __init__(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any] | None,
        options: RunOptions,
        *,
        refills: int = 0,
        more_room: str = "raise concurrency",
    ) -> None:
        self._refills = refills
        self._more_room = more_room
        self._tasks = TaskSet()
        self._stack = AsyncExitStack()
        self._rollouts: set[DrivenRollout] = set()
        self._starting = SingleFlight[RolloutContext]("the start of the sandboxes", keep=True)
        self._roller: GroupRoller | None = None
        self.exact = agent is not None
        """Whether the rollouts have a model of their own, which keeps tokens."""
        self._loop = LoopThread("hermes-rl run", self._close)
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

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which runs in the run's loop, in any other loop. It is cancelled with the caller.

        Raises:
            LoopEnded: the run is closed.
        """
        return await self._loop.run(work)

    def close(self) -> None:
        """End the rollouts and the sandboxes. Idempotent. It also happens when the program ends."""
        self._loop.close()

    @property
    def closed(self) -> bool:
        """Return whether it is closed."""
        return self._loop.closed

    async def start(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """Begin `work` in the run's loop and return it at once. It is cancelled when the run is closed."""
        return self._tasks.spawn(work, what)

    async def context(self) -> RolloutContext:
        """Return what all rollouts have in common. The first caller starts the sandboxes."""
        return await self._starting.get(self._tasks, self._start)

    def item(self, item_id: str) -> Item:
        """Return an item of the environment.

        Raises:
            UnknownNameError: it has no such item.
        """
        if item_id not in self.items:
            raise UnknownNameError("item", item_id, ())
        return self.items[item_id]

    async def begin(self, item_id: str) -> DrivenRollout:
        """Return a rollout that has begun, or could not: then its record says why.

        Raises:
            UnknownNameError: there is no such item.
            UsageError, PolicyError: no slot can be had with these settings.
        """
        context, item = await self.context(), self.item(item_id)
        if len(self._rollouts) >= self.session.room:
            raise UsageError(
                f"{len(self._rollouts)} rollouts hold all slots until they end, and another was to begin",
                hint=self._more_room,
            )
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
        """End a rollout that nobody scores. Idempotent."""
        await rollout.aclose()
        self._rollouts.discard(rollout)

    async def roll(self, sizes: Sequence[tuple[str, int]]) -> list[Group]:
        """Return groups of rollouts, all rolled out at the same time. Each is given as the item's id and its size.

        Raises:
            HermesError: as `GroupRoller.roll` says.
        """
        roller = await self.roller()
        async with together() as tasks:
            groups = [tasks.create_task(roller.roll(self.item(item_id), size)) for item_id, size in sizes]
        return [group.result() for group in groups]

    async def roller(self) -> GroupRoller:
        """Return what rolls out groups."""
        context = await self.context()
        if self._roller is None:
            room, tools = self.session.room, self.session.tools
            self._roller = GroupRoller(context, tools, room=room, refills=self._refills, exact=self.exact)
        return self._roller

    async def model(
        self, runtime: Runtime, agent: Mapping[str, Any]
    ) -> tuple[AgentSettings, Callable[[Chat], TokenServer] | None]:
        """Return the settings of the agent, and what makes its model's server; None is the one at its `base_url`.

        Raises:
            UnknownNameError, ConfigError: a key or a value is wrong.
        """
        given = {key: value for key, value in agent.items() if key != NAME}
        return runtime.agent_settings({"tool_call_parser": "auto", **given}, agent.get(NAME, ModelAgent.name)), None

    async def _open(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any] | None,
        options: RunOptions,
    ) -> Session:
        runtime = await self._stack.enter_async_context(Runtime())
        settings, server = (None, None) if agent is None else await self.model(runtime, agent)
        opening = open_session(
            runtime,
            environment,
            # Where the trainer runs the model, the agent is the caller. `nop` only stands for it: `model` decides the
            # isolation.
            "nop" if agent is None else agent.get(NAME, ModelAgent.name),
            options,
            env=env,
            settings=settings,
            work_of="model",
            server=server,
        )
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
