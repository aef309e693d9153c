"""Runs many rollouts: `group_size` for each item of an environment, up to `concurrency` at the same time."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from hermes_core.agents.base import Agent, AgentSettings, is_in_slot
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.aio import alongside, together
from hermes_core.environment import Environment, Item
from hermes_core.errors import (
    DatasetError,
    FailureKind,
    HermesError,
    PluginError,
    PolicyError,
    UnknownNameError,
    UsageError,
    describe,
    explain_errors,
)
from hermes_core.records.jsonable import Redact, find_changed_fields, json_line
from hermes_core.records.store import TRAJECTORIES, Changes, OutputFolder
from hermes_core.records.summary import Key, NoProgress, Progress, RunSummary, Tally
from hermes_core.rollout.rollout import RolloutContext, begin, run_rollout
from hermes_core.rollout.trajectory import Trajectory
from hermes_core.runs.image_prefetch import Prefetch
from hermes_core.runs.options import RunOptions, agent_settings, check_price
from hermes_core.runs.session import ITEMS, Session, Tools, environment_error, open_session, versions
from hermes_core.runs.stall_watchdog import STALLS
from hermes_core.runtime import Runtime
from hermes_core.sandbox.pool.cost import CostLimitReached, SandboxUsage
from hermes_core.sink import Sink
from hermes_core.tool_backend import ToolBackend, check_builds
from hermes_core.validation import validate_data

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

STOPPING = (CostLimitReached, EndpointDown)
"""Errors after which no more rollouts begin, but running rollouts end by themselves."""

SYNC_EVERY_S = 1.0
"""Seconds between two flushes of the records to the disk."""

SHOW_EVERY_S = 1.0
"""Seconds after which the progress display is updated even if no rollout ended."""


async def run_rollouts(
    runtime: Runtime,
    environment: str | Environment,
    agent: str | Agent = "model",
    *,
    env: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | AgentSettings | None = None,
    out_dir: str | Path | None = None,
    runs_dir: str | Path | None = None,
    resume: bool = False,
    retry_failed: Collection[FailureKind] | None = None,
    on_folder: Callable[[Path], None] | None = None,
    on_record: Callable[[Mapping[str, Any]], None] | None = None,
    sinks: Sequence[Sink | str] = (),
    progress: Progress | None = None,
    **options: Any,
) -> RunSummary:
    """Roll out every item of an environment and score it.

    Args:
        environment: the environment's name, or an instance; its `setup` and `aclose` are called here.
        agent: the agent's name, or an instance (which the caller closes).
        env: the environment's configuration, for an environment given by name.
        settings: the agent's settings, for an agent given by name.
        out_dir: directory for the records, `run.json` and `summary.json`. Without `out_dir` and `runs_dir`, nothing is
            kept.
        runs_dir: directory in which the run gets a new folder `ENVIRONMENT-YYYYMMDD-HHMMSS`, if there is no `out_dir`.
        resume: continue the run in `out_dir`; rollouts that ended without a failure are not repeated.
        retry_failed: when resuming, repeat only failures of these kinds, and rollouts that were cancelled. None repeats
            all failures.
        on_folder: called with the run's folder, if it has one, just before the first rollout begins.
        on_record: called with each record as it is written, on the event loop.
        sinks: additional places for the records, except those of cancelled rollouts; closed at the end. A text names a
            plugin's sink: `NAME`, or `NAME=TARGET`.
        options: the fields of `RunOptions`: `backend`, `concurrency`, `group_size`, `isolation`, `seed`, ….

    Returns:
        The summary of the run; `summary.complete` says whether every rollout ended without a failure.

    Raises:
        UsageError: something given by name does not exist, or an option is impossible.
        DatasetError: the dataset can't be used.
        OutputError: the records can't be written.
        PluginError: a sink failed, or another part of a plugin.
        InfraError: the backend could not be started.
        ModelError: the model's endpoint is unreachable, or refuses the key or the model; raised before a sandbox is
            made.
    """
    chosen = validate_data(RunOptions, options, "the run")
    filled = agent_settings(runtime, agent, settings, chosen.seed)
    check_price(agent, filled, chosen.max_cost)
    async with AsyncExitStack() as stack:
        open_sinks: list[_OpenSink] = []
        for sink in sinks:
            open_sinks.append(_open_sink(runtime, sink))
            stack.push_async_exit(open_sinks[-1].close)
        if resume and out_dir is None:
            raise UsageError("no run to resume was named", hint="give its folder: --out DIR")
        session = await stack.enter_async_context(
            open_session(runtime, environment, agent, chosen, env=env, settings=filled)
        )
        run = Run(
            tools=session.tools,
            jobs=Jobs(session, chosen.group_size),
            on_record=on_record,
            sinks=open_sinks,
            progress=progress or NoProgress(),
            options=chosen,
            folder=OutputFolder.choose(out_dir, runs_dir, session.name),
        )
        stalls = None
        if run.folder is not None:
            stack.callback(run.folder.close)
            again = None if retry_failed is None else {*retry_failed, FailureKind.CANCELLED}
            await _open_folder(run.folder, run, session, resume=resume, again=again)
            stalls = run.folder.path / STALLS
        async with session.sandboxes(run.count_left(), start=run.jobs.need_slots, stalls=stalls) as context:
            if on_folder is not None and run.folder is not None:
                on_folder(run.folder.path)
            return await run.all(context, session.room)


async def _open_folder(
    folder: OutputFolder, run: Run, session: Session, *, resume: bool, again: Collection[FailureKind] | None
) -> None:
    """Begin or resume the run in its folder; see `OutputFolder.open`."""
    options = run.options
    about: dict[str, Any] = {
        "versions": versions(session.runtime),
        "seed": options.seed,
        "concurrency": options.concurrency,
        **({"quarantine": options.quarantine} if options.quarantine is not None else {}),
    }
    await in_thread(
        folder.open,
        session.configuration(),
        about,
        run.tally,
        resume=resume,
        again=again,
        changes=run.jobs.changes(session.redact),
    )


def _open_sink(runtime: Runtime, sink: Sink | str) -> _OpenSink:
    if not isinstance(sink, str):
        return _OpenSink(type(sink).__name__, sink)
    name, _, target = sink.partition("=")
    return _OpenSink(name, runtime.sink(name, target))


@dataclass(frozen=True)
class _OpenSink:
    """A sink of the run, with its name for error messages."""

    name: str
    sink: Sink

    async def write(self, record: Mapping[str, Any], folder: OutputFolder | None) -> None:
        """Send the sink a record that `folder` already holds.

        Raises:
            PluginError: the sink failed.
        """
        try:
            await self.sink.write(record)
        except Exception as error:
            kept = f"; every record is in {folder.path / TRAJECTORIES}, to be sent again" if folder is not None else ""
            raise PluginError(
                f"sink {self.name!r} failed: {describe(error)}", hint=f"repair the sink or its target{kept}"
            ) from error

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the sink. If the run has failed already, a failure here is only logged.

        Raises:
            PluginError: the sink failed.
        """
        try:
            await self.sink.aclose()
        except Exception as failed:
            text = f"sink {self.name!r} failed when it was closed: {describe(failed)}"
            if error is None:
                raise PluginError(text, hint="check that its records are complete") from failed
            log.warning("%s", text)


@dataclass(frozen=True)
class Job:
    """One rollout to do."""

    item: Item
    item_id: str
    rollout_index: int


class Jobs:
    """The rollouts of a run, in order. The rollouts of an item are next to each other, so that a group runs at the same
    time.

    Only the items' ids are kept in memory. An item is read from the dataset when its first rollout begins.

    Raises:
        DatasetError: there are no items, or two items have the same id, or an item names tools that do not exist.
        PolicyError, UsageError: no item can get a slot with the run's settings; or an item's image must be built, and
            the run's backend can't build images.
        PluginError: the environment is broken.
    """

    def __init__(self, session: Session, group_size: int) -> None:
        environment = session.environment
        self._group_size = group_size
        self.item_ids: dict[str, int] = {}
        """The items' positions in the dataset by their ids, in order."""
        self.need_slots = is_in_slot(session.agent)
        """Whether any rollout needs a slot."""
        with explain_errors(functools.partial(environment_error, environment, ITEMS)):
            self._items = environment.select_items()
            self._check(environment, session.tools, session.slots)

    def _check(self, environment: Environment, tools: Tools, slots: ToolBackend) -> None:
        refused: HermesError | None = None
        possible = False
        always = self.need_slots
        for number, item in enumerate(self._items):
            item_id = environment.item_id(item)
            if item_id in self.item_ids:
                raise DatasetError(
                    f"two items of environment {environment.name!r} have the id {item_id!r}",
                    hint="give each item an id of its own",
                )
            self.item_ids[item_id] = number
            try:
                needs = always or tools.need_slot(item, item_id)
            except UnknownNameError as error:
                raise DatasetError(f"item {item_id!r}: {error.message}", hint=error.hint) from error
            self.need_slots |= needs
            if environment.item_images:
                for image in environment.images(item):
                    check_builds(slots.backend, image)
            possible |= not needs
            if not possible:
                try:
                    slots.check_slot(
                        profile=environment.profile(item),
                        image=environment.image(item),
                        network=environment.network(item),
                    )
                    possible = True
                except (PolicyError, UsageError) as error:
                    refused = refused or error
        if refused and not possible:
            raise refused
        if not self.item_ids:
            raise DatasetError(
                f"environment {environment.name!r} has no items",
                hint="check its dataset, and the settings that select from it",
            )

    def __len__(self) -> int:
        return len(self.item_ids) * self._group_size

    def count(self, done: Callable[[Key], bool]) -> int:
        """Return the number of rollouts that are not done."""
        return sum(not done((item_id, index)) for item_id in self.item_ids for index in range(self._group_size))

    def changes(self, redact: Redact) -> Changes:
        """Return a function that compares an item's fields in a record with the item as it is now."""

        @functools.lru_cache(64)  # records of one item are near each other
        def item(number: int) -> Item:
            return self._items[number]

        def find_changes(item_id: str, kept: Mapping[str, Any]) -> list[str] | None:
            number = self.item_ids.get(item_id)
            return None if number is None else find_changed_fields(kept, item(number), redact)

        return find_changes

    def items_left(self, done: Callable[[Key], bool]) -> Iterator[Item]:
        """Yield the items with at least one rollout that is not done."""
        for item_id, number in self.item_ids.items():
            if not all(done((item_id, index)) for index in range(self._group_size)):
                yield self._items[number]

    def iter_jobs(self, done: Callable[[Key], bool]) -> Iterator[Job]:
        """Yield the rollouts that are not done."""
        for item_id, number in self.item_ids.items():
            item: Item | None = None
            for index in range(self._group_size):
                if not done((item_id, index)):
                    item = self._items[number] if item is None else item
                    yield Job(item, item_id, index)


@dataclass
class Run:
    """Carries out the rollouts of one run, writes their records, and stops the run early if necessary."""

    tools: Tools
    jobs: Jobs
    options: RunOptions
    agents: Sequence[Agent] = ()
    """The agent of each rollout of a group; if empty, the context's agent does all of them."""
    on_record: Callable[[Mapping[str, Any]], None] | None = None
    sinks: Sequence[_OpenSink] = ()
    progress: Progress = field(default_factory=NoProgress)
    folder: OutputFolder | None = None
    tally: Tally = field(default_factory=Tally)
    _stopped: str | None = None
    _running: set[Trajectory] = field(default_factory=set)
    _synced: float = field(default_factory=time.monotonic)

    async def all(self, context: RolloutContext, concurrency: int) -> RunSummary:
        """Do the rollouts that are left, and return a summary, even if an error ends the run."""
        self.tally.start_session()
        self.progress.begin(len(self.jobs), self.tally)
        items = self.jobs.items_left(self.tally.was_done_before)
        prefetch = Prefetch(context.environment, context.backend, context.profile, items, self.options.prefetch)
        try:
            async with alongside(self._show()), aclosing(prefetch):
                await each(self._iter_left(prefetch), lambda job: self._one(context, job), concurrency)
        except STOPPING as error:
            self._stopped = str(error)
        except BaseException as error:
            self._stopped = "interrupted" if isinstance(error, asyncio.CancelledError) else str(error)
            self._finish(context.backend.usage())
            raise
        finally:
            self.progress.end(self.tally)
        return await in_thread(self._finish, context.backend.usage())

    async def _show(self) -> None:
        """Update the progress display at intervals, also while no rollout ends."""
        while True:
            await asyncio.sleep(SHOW_EVERY_S)
            self.progress.update(self.tally)

    def _finish(self, usage: Mapping[str, SandboxUsage]) -> RunSummary:
        """Return a summary. If there is a folder, wait until the records are on the disk, and write the summary,
        too."""
        place = str(self.folder.path) if self.folder else None
        summary = self.tally.summary(len(self.jobs), usage=usage, stopped=self._stopped, out_dir=place)
        if self.folder is not None:
            self.folder.sync()
            self.folder.write_summary(summary)
        return summary

    def count_left(self) -> int:
        """Return the number of rollouts still to be done."""
        return self.jobs.count(self.tally.was_done_before)

    def _iter_left(self, prefetch: Prefetch) -> Iterator[Job]:
        item_id: str | None = None
        for job in itertools.takewhile(lambda _: self._may_begin(), self.jobs.iter_jobs(self.tally.was_done_before)):
            if job.item_id != item_id:
                item_id = job.item_id
                prefetch.group_begins()
            yield job

    def _may_begin(self) -> bool:
        """Return whether another rollout may begin. If the cost limit is reached, note this as the reason to stop."""
        max_cost = self.options.max_cost
        if self._stopped is None and max_cost is not None:
            running = sum(trajectory.result.usage.cost or 0.0 for trajectory in self._running)
            cost = (self.tally.usage.cost or 0.0) + running
            if cost >= max_cost:
                self._stopped = f"the model's tokens have cost ${cost:.4g}, and max_cost is ${max_cost:g}"
        return self._stopped is None

    async def _one(self, context: RolloutContext, job: Job) -> None:
        """Do one rollout and write its record. A cancelled rollout has a record, too; a resumed run repeats the
        rollout.

        Raises:
            CostLimitReached, EndpointDown: no other rollout can begin.
        """
        if self.agents:
            context = replace(context, agent=self.agents[job.rollout_index])
        trajectory = begin(context, job.item, job.item_id, job.item_id, job.rollout_index)
        self._running.add(trajectory)
        down: EndpointDown | None = None
        try:
            await run_rollout(self.tools.offer_tools(context, job.item, job.item_id), job.item, trajectory)
        except asyncio.CancelledError:
            self._keep(context, trajectory)
            raise
        except EndpointDown as error:  # recorded as a model failure, and also ends the run
            down = error
        except Exception:  # refused before it began: there is no record to write
            self._running.discard(trajectory)
            _tell_finished(context, trajectory.to_record(context.redact).to_json())
            raise
        written = self._keep(context, trajectory)
        for sink in self.sinks:
            await sink.write(written, self.folder)
        if self.folder is not None and time.monotonic() - self._synced > SYNC_EVERY_S:
            self._synced = time.monotonic()
            await in_thread(self.folder.sync)
        if down is not None:
            raise down

    def _keep(self, context: RolloutContext, trajectory: Trajectory) -> dict[str, Any]:
        self._running.discard(trajectory)
        record = trajectory.to_record(context.redact)
        written = record.to_json()
        if self.folder is not None:
            self.folder.append(json_line(written))
        self.tally.add(record)
        self.progress.update(self.tally)
        _tell_finished(context, written)
        if self.on_record is not None:
            self.on_record(written)
        most, rate = self.options.stop_on_infra, self.tally.infra_rate()
        if most is not None and rate > most:
            self._stopped = (
                f"{rate:.0%} of the last rollouts were failures of the infrastructure, images or the model's endpoint"
            )
        return written


async def each(jobs: Iterator[T], work: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Do `work` on every job, `concurrency` at a time. The first exception cancels all other work, and is raised
    itself, not in an exception group.

    After an exception in `STOPPING`, running jobs are not cancelled, but no more begin.
    """
    stopped: list[HermesError] = []

    async def worker() -> None:
        for job in jobs:
            if stopped:
                return
            try:
                await work(job)
            except STOPPING as error:
                stopped.append(error)

    async with together() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    if stopped:
        raise stopped[0]


def _tell_finished(context: RolloutContext, record: Mapping[str, Any]) -> None:
    context.hooks.events.emit("trajectory_finished", trajectory_id=record["trajectory_id"], record=record)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread. If cancelled, wait for its end all the same, because the caller then closes the
    files that the function uses."""
    future = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args, **kwargs))
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if (error := future.exception()) is not None:
            log.warning("given up while cancelled: %s", error)
        raise
    return future.result()
