"""The run that one process of verifiers keeps open, and shares among its rollouts. Knows nothing of verifiers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from hermes_core import GroupRoller, Item, Rolled, RunOptions, Runtime, Session, open_session
from hermes_core.envs.session import check_scored
from hermes_verifiers.places import Places


class WorkerOptions(RunOptions):
    """The options of a run, without those that are the trainer's business."""

    concurrency: int = Field(default=32, ge=1, le=1 << 16)
    """Number of rollouts at the same time, of all processes of this user on this host."""
    group_size: Literal[1] = 1
    """verifiers plans each rollout of a group by itself (`-r`)."""
    infra_retries: Literal[0] = 0
    """verifiers repeats failed rollouts (`--env.retries`). If we did, the turns of abandoned attempts would be trained
    on, too, because they are in the trace."""
    stop_on_infra: None = None
    max_cost: None = None


@dataclass(frozen=True)
class OpenRun:
    """What the rollouts of this process use."""

    session: Session
    roller: GroupRoller
    places: Places
    items: Mapping[str, Item]


@dataclass(eq=False)
class _Sharing:
    """An open run, how many use it, and the task that owns it."""

    opened: asyncio.Future[OpenRun]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    owner: asyncio.Task[None] | None = None
    users: int = 0


class Worker:
    """One environment in this process. Its run is opened by the first who needs it and closed by the last.

    Args:
        environment: its name.
        env: its configuration.
        options: `concurrency` is the number of rollouts at the same time of all processes of this user on this host.
    """

    def __init__(self, environment: str, env: Mapping[str, Any], options: RunOptions) -> None:
        self._environment = environment
        self._env = env
        self._options = options
        self._sharing: _Sharing | None = None

    def prompts(self) -> dict[str, list[dict[str, Any]]]:
        """Return the prompt of each item by the item's id. Blocks while the dataset is read; an event loop may run.

        Raises:
            HermesError: as `open_session` says.
            UsageError: the environment gives no rewards.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._prompts()).result()

    async def _prompts(self) -> dict[str, list[dict[str, Any]]]:
        async with Runtime() as runtime, self._session(runtime) as session:
            check_scored(session.environment)
            return {key: session.environment.initial_messages(item) for key, item in _by_id(session).items()}

    async def roll(self, item_id: str, agent: str, settings: Mapping[str, Any] | None = None) -> Rolled:
        """Roll out an item once. All rollouts of an item are placed on one sandbox if they fit.

        Args:
            agent: the agent's name.
            settings: the agent's settings.

        Raises:
            HermesError: no rollout can be done with these options, or the model's endpoint answers nobody.
        """
        async with self.open() as run:
            if agent == "oracle":
                run.session.hooks.check_solve()
            runtime = run.session.runtime
            works = runtime.agent(agent, settings)
            try:
                async with run.places.one():
                    group = await run.roller.roll_one(run.items[item_id], agent=works, group_id=item_id)
            finally:
                await runtime.close(works)
        (rolled,) = group.kept or group.failed
        return rolled

    @asynccontextmanager
    async def open(self) -> AsyncIterator[OpenRun]:
        """Keep the run open during the block. One task owns the run, so that it does not matter who is last.

        Raises:
            HermesError: as `open_session` and `Session.sandboxes` say.
        """
        sharing = self._sharing = self._sharing or self._begin()
        sharing.users += 1
        try:
            yield await asyncio.shield(sharing.opened)
        finally:
            sharing.users -= 1
            if not sharing.users:
                await self._end(sharing)

    def _begin(self) -> _Sharing:
        sharing = _Sharing(asyncio.get_running_loop().create_future())
        sharing.owner = asyncio.create_task(self._own(sharing), name=f"run of {self._environment}")
        return sharing

    async def _end(self, sharing: _Sharing) -> None:
        """Close the run. The next who needs one opens another, and need not wait."""
        assert sharing.owner is not None
        self._sharing = None
        sharing.left.set()
        if not sharing.opened.done():
            sharing.owner.cancel()
        await asyncio.wait([sharing.owner])

    async def _own(self, sharing: _Sharing) -> None:
        try:
            async with Runtime() as runtime, self._session(runtime) as session, session.sandboxes() as context:
                roller = GroupRoller(context, session.tools, room=session.room, refills=0, exact=False)
                directory = runtime.settings.state_dir / "verifiers" / socket.gethostname()
                places = Places(directory, self._options.concurrency)
                sharing.opened.set_result(OpenRun(session, roller, places, _by_id(session)))
                await sharing.left.wait()
        except Exception as error:
            if sharing.opened.done():
                raise
            sharing.opened.set_exception(error)
        finally:
            sharing.opened.cancel()

    def _session(self, runtime: Runtime) -> Any:
        return open_session(runtime, self._environment, "nop", self._options, env=self._env, work_of="model")


def _by_id(session: Session) -> dict[str, Item]:
    environment = session.environment
    return {environment.item_id(item): item for item in environment.selected_items()}
