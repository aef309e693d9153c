"""A run for a trainer: a session, its sandboxes, and rollouts that begin when the trainer asks for them."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cached_property, partial
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from hermes_core.agents.base import Agent, AgentSettings
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.generate import TokenServer
from hermes_core.agents.model import ExactSettings, ModelAgent
from hermes_core.aio import LoopThread, SingleFlight, TaskSet, together
from hermes_core.environment import Environment, Item
from hermes_core.errors import ConfigError, UnknownNameError, UsageError
from hermes_core.records.record import Record
from hermes_core.rollout.rollout import RolloutContext
from hermes_core.runs.external_agent import DrivenRollout
from hermes_core.runs.group import Group, GroupRecords, GroupRoller, Rolled
from hermes_core.runs.options import RunOptions
from hermes_core.runs.session import Session, check_scored, open_session
from hermes_core.runtime import Runtime

T = TypeVar("T")
RunT = TypeVar("RunT", bound="TrainerRun")

NAME = "name"
"""The key for the agent's name among the settings of an agent."""


@asynccontextmanager
async def open_trainer_session(
    environment: str | Environment,
    options: RunOptions,
    *,
    env: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    server: Callable[[AgentSettings, Chat], TokenServer] | None = None,
) -> AsyncIterator[Session]:
    """Open a session for a trainer, with a new runtime.

    Args:
        environment: the environment's name, or an instance.
        env: the environment's configuration, for an environment given by name.
        agent: settings of the agent, whose rollouts are token-exact. The key `name` has the agent's name: `model`, or
            that of a program. None if the trainer runs the model itself.
        server: makes the agent's token server; None is the server at the agent's `base_url`.

    Raises:
        UsageError: the environment gives no rewards.
        HermesError: as `open_session` says.
    """
    async with Runtime() as runtime:
        # If the trainer runs the model, `nop` takes the place of an agent, and `work_of` decides the isolation.
        name = "nop" if agent is None else agent.get(NAME, ModelAgent.name)
        settings = None if agent is None else _exact_settings(runtime, agent)
        async with open_session(
            runtime,
            environment,
            name,
            options,
            env=env,
            settings=settings,
            work_of=ModelAgent.name,
            server=None if server is None or settings is None else partial(server, settings),
        ) as session:
            check_scored(session.environment)
            yield session


def _exact_settings(runtime: Runtime, agent: Mapping[str, Any]) -> ExactSettings:
    """Return the settings of an agent whose rollouts are token-exact.

    Raises:
        UsageError: the rollouts of this agent can't be token-exact.
        UnknownNameError, ConfigError: a key or a value is wrong.
    """
    values = {"tool_call_parser": "auto", **agent}
    name = values.pop(NAME, ModelAgent.name)
    if not issubclass(runtime.agent_config_class(name), ExactSettings):
        raise UsageError(
            f"the rollouts of agent {name!r} have no tokens", hint="use `model`, or an agent that is a program"
        )
    settings = runtime.agent_settings(values, name)
    assert isinstance(settings, ExactSettings)
    return settings


def check_temperature(session: Session, temperature: float) -> None:
    """Check that the agent samples at the temperature at which the trainer computes logprobs.

    Raises:
        ConfigError: the agent samples at another temperature, or at the endpoint's default.
    """
    settings = session.settings
    if settings is None or settings.temperature == temperature:
        return
    sampling = "its endpoint's temperature" if settings.temperature is None else f"temperature {settings.temperature:g}"
    raise ConfigError(
        f"the agent samples at {sampling}, and the trainer computes logprobs at {temperature:g}",
        hint="set the same temperature in the agent's settings and in the trainer's; Tinker's is always 1",
    )


class TrainerRun:
    """A run whose rollouts begin when a trainer asks for them: in groups, or one by one with a model of the trainer.

    An asynchronous trainer opens the run in its own event loop:

        async with TrainerRun(partial(open_trainer_session, "boxes", options, agent=agent), exact=True) as run:
            groups = await run.roll([(item_id, 8) for item_id in run.items])

    Any other trainer opens the run in a thread, and passes every coroutine to `call`, from any thread, or to `run`,
    from any event loop:

        with TrainerRun(partial(open_trainer_session, "boxes", options)) as run:
            rollout = run.call(run.begin(item_id))

    Without `eager`, the first rollout starts the sandboxes.

    Args:
        opening: opens the session.
        sandboxes: makes the session's sandboxes.
        exact: whether rollouts need their tokens.
        refills: number of failed rollouts of a group that `roll` may replace.
        records: records every rollout and group that `roll` makes; None records nothing.
        eager: whether to start the sandboxes as soon as the session is open.
        more_room: the hint of the error for a rollout that begins while other rollouts hold all slots.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractAsyncContextManager[Session]],
        *,
        sandboxes: Callable[[Session], AbstractAsyncContextManager[RolloutContext]] = Session.sandboxes,
        exact: bool = False,
        refills: int = 0,
        records: GroupRecords | None = None,
        eager: bool = False,
        more_room: str = "raise concurrency",
    ) -> None:
        self.exact = exact
        self._opening = opening
        self._sandboxes = sandboxes
        self._refills = refills
        self._records = records
        self._eager = eager
        self._more_room = more_room
        self._tasks = TaskSet()
        self._stack = AsyncExitStack()
        self._sessions = SingleFlight[Session]("the opening of the run", keep=True)
        self._rollers = SingleFlight[GroupRoller]("the start of the sandboxes", keep=True)
        self._rollouts: set[DrivenRollout] = set()
        self._thread: LoopThread | None = None

    # ------------------------------------------------------------------ in the running event loop

    async def open(self) -> Self:
        """Open the session. Callers at the same time share one attempt.

        Raises:
            HermesError: as `opening` and `sandboxes` do.
        """
        await self._sessions.get(self._tasks, lambda: self._stack.enter_async_context(self._opening()))
        if self._eager:
            await self.roller()
        return self

    async def aclose(self) -> None:
        """End the rollouts, the sandboxes and the session. Idempotent."""
        try:
            await asyncio.gather(*(rollout.aclose() for rollout in self._rollouts))
            await self._tasks.aclose()
        finally:
            await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ------------------------------------------------------------------ in a thread of its own

    def start(self) -> Self:
        """Open the session in a new event loop, in a thread. The session is closed when the program ends, at the
        latest.

        Raises:
            HermesError: as `open` does.
        """
        self._thread = LoopThread("hermes-rl run", self.aclose)
        try:
            return self.call(self.open())
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the run's thread, wait for it, and return its result. Ctrl-C cancels the work.

        Raises:
            LoopEnded: the run is closed.
        """
        return self._running_thread.call(work)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the run's thread, and await its result in the caller's event loop. If the caller is cancelled,
        so is the work.

        Raises:
            LoopEnded: the run is closed.
        """
        return await self._running_thread.run(work)

    async def spawn(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """Begin `work` in the run's loop, and return its task at once. The task is cancelled when the run is closed."""
        return self._tasks.spawn(work, what)

    def close(self) -> None:
        """End the rollouts, the sandboxes, the session and the thread. Idempotent."""
        if self._thread is not None:
            self._thread.close()

    @property
    def closed(self) -> bool:
        """Return whether the run's thread has ended, or never began."""
        return self._thread is None or self._thread.closed

    @property
    def _running_thread(self) -> LoopThread:
        if self._thread is None:
            raise UsageError("the run has no thread", hint="use `start`, or the block `with`")
        return self._thread

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ items and sandboxes

    @property
    def session(self) -> Session:
        """Return the open session.

        Raises:
            UsageError: the session is not open.
        """
        if None not in self._sessions.kept:
            raise UsageError("the run is not open", hint="use `open` or `start`, or a block `async with` or `with`")
        return self._sessions.kept[None]

    @cached_property
    def items(self) -> Mapping[str, Item]:
        """Return the items of the environment by id."""
        environment = self.session.environment
        return {environment.item_id(item): item for item in environment.select_items()}

    def item(self, item_id: str) -> Item:
        """Return an item of the environment.

        Raises:
            UnknownNameError: the environment has no such item.
        """
        if item_id not in self.items:
            raise UnknownNameError("item", item_id, ())
        return self.items[item_id]

    async def roller(self) -> GroupRoller:
        """Return the roller of groups. The first caller starts the sandboxes.

        Raises:
            HermesError: as `sandboxes` does.
        """
        return await self._rollers.get(self._tasks, self._new_roller)

    async def _new_roller(self) -> GroupRoller:
        session = self.session
        context = await self._stack.enter_async_context(self._sandboxes(session))
        return GroupRoller(
            context, session.tools, self._records, room=session.room, refills=self._refills, exact=self.exact
        )

    async def context(self) -> RolloutContext:
        """Return the context that all rollouts share. The first caller starts the sandboxes. Raise as `roller`."""
        return (await self.roller()).context

    # ------------------------------------------------------------------ rollouts

    async def roll(self, sizes: Sequence[tuple[str, int]]) -> list[Group]:
        """Roll out groups, all at the same time, and return them. Each group is given as an item's id and a size.

        Raises:
            HermesError: as `GroupRoller.roll`.
        """
        roller = await self.roller()
        async with together() as tasks:
            groups = [tasks.create_task(roller.roll(self.item(item_id), size)) for item_id, size in sizes]
        return [group.result() for group in groups]

    async def roll_one(self, item_id: str, *, agent: Agent | None = None, group_id: str | None = None) -> Rolled:
        """Do one rollout and return it. See `GroupRoller.roll_one`."""
        group = await (await self.roller()).roll_one(self.item(item_id), agent=agent, group_id=group_id)
        (rolled,) = group.kept or group.failed
        return rolled

    async def begin(self, item_id: str) -> DrivenRollout:
        """Begin a rollout whose model the trainer runs, and return the rollout. If it could not begin, its record says
        why.

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
        rollout = DrivenRollout(self.session.tools.offer_tools(context, item, item_id), item)
        self._rollouts.add(rollout)
        try:
            await rollout.begin()
        except BaseException:
            self._rollouts.discard(rollout)
            raise
        return rollout

    async def end(self, rollouts: Sequence[tuple[DrivenRollout, str]]) -> list[Record]:
        """Verify rollouts, all at the same time, and return their records. Each rollout is given with its model's last
        message."""
        records = await asyncio.gather(*(rollout.end(text) for rollout, text in rollouts))
        self._rollouts.difference_update(rollout for rollout, _ in rollouts)
        return records

    async def drop(self, rollout: DrivenRollout) -> None:
        """End a rollout without scoring it. Idempotent."""
        await rollout.aclose()
        self._rollouts.discard(rollout)


class SharedRun(Generic[RunT]):
    """A run that is started at its first use. Can be pickled: in each process, all copies share one run.

    Args:
        make: makes the run; pickled, too.
        key: identifies the copies of one run; None makes a new key.
    """

    def __init__(self, make: Callable[[], RunT], key: str | None = None) -> None:
        self._make = make
        self._key = key or uuid.uuid4().hex
        self._starting = threading.Lock()
        self._run: RunT | None = None
        _shared[self._key] = self

    @property
    def run(self) -> RunT:
        """Return the run of this process. The first call starts the run. Blocks.

        Raises:
            HermesError: as `TrainerRun.start`. The next call tries again.
        """
        with self._starting:
            if self._run is None:
                self._run = self._make().start()
            return self._run

    def close(self) -> None:
        """Close the run of this process, if it was started. Idempotent."""
        if self._run is not None:
            self._run.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._make, self._key)


_shared: WeakValueDictionary[str, SharedRun[Any]] = WeakValueDictionary()
"""The runs of this process, by key."""


def _same(make: Callable[[], RunT], key: str) -> SharedRun[RunT]:
    """Return the run with this key in this process, or a new one."""
    return _shared.get(key) or SharedRun(make, key)
