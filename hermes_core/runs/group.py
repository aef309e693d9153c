"""Groups: several rollouts of one item with the same tools, for a trainer that compares them. Knows no trainer."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hermes_core.agents.base import Agent, AgentResult
from hermes_core.aio import together
from hermes_core.environment import Item
from hermes_core.errors import FailureKind, HermesError
from hermes_core.records.record import Record
from hermes_core.records.tokens import TokenSequence
from hermes_core.rollout.rollout import RolloutContext, begin, run_rollout
from hermes_core.runs.runner import STOPPING
from hermes_core.runs.session import Tools

PASSING = frozenset({FailureKind.INFRA, FailureKind.MODEL, FailureKind.CANCELLED})
"""Failures that are not about the item."""


TOKENS = "tokens"
"""The failure kind of a rollout that has a score, but no tokens that can be trained on."""


@dataclass(frozen=True)
class Rolled:
    """A rollout that ended, and what a trainer may use of it. Every adapter uses this class: see
    `docs/reference/trainers.md`."""

    record: Record
    failure_kind: str | None = None
    """Why nothing of it may be trained on: a `FailureKind`, or `tokens`. None if it may."""
    failure_reason: str | None = None
    """The same in words."""

    @classmethod
    def of(cls, record: Record, *, exact: bool) -> Rolled:
        """Return the rollout with this record, and decide what a trainer may use of it.

        Args:
            exact: whether the trainer needs its tokens.
        """
        if record.failure is not None:
            return cls(record, str(record.failure.kind), record.failure.message)
        if exact and not record.sequences:
            return cls(record, TOKENS, record.tokens_refused or "the server kept none")
        return cls(record)

    @property
    def mask_sample(self) -> bool:
        """Return whether nothing of it may be trained on."""
        return self.failure_kind is not None

    @property
    def refused(self) -> str | None:
        """Return why it can't be part of a group, as one text; None if it can."""
        return f"{self.failure_kind}: {self.failure_reason}" if self.mask_sample else None

    @property
    def labels(self) -> dict[str, Any]:
        """Return `mask_sample`, `failure_kind` and `failure_reason`."""
        return {name: getattr(self, name) for name in ("mask_sample", "failure_kind", "failure_reason")}

    @property
    def notes(self) -> dict[str, Any]:
        """Return what trainers keep beside a sample: `labels`, `trajectory_id` and `weight_versions`."""
        about = {"trajectory_id": self.record.trajectory_id, "weight_versions": self.record.weight_versions}
        return {**self.labels, **about}

    @property
    def reward(self) -> float | None:
        """Return the score; None if there is none that a trainer may use."""
        return None if self.mask_sample else self.record.reward

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the token sequences, which can be trained on."""
        return () if self.mask_sample else self.record.sequences


@dataclass
class Group:
    """The rollouts of one item."""

    group_id: str
    item_id: str
    size: int
    kept: list[Rolled] = field(default_factory=list)
    failed: list[Rolled] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Return whether it has all of its rollouts."""
        return len(self.kept) == self.size

    @property
    def unlucky(self) -> bool:
        """Return whether failures of the infrastructure, ours or the model's, are the only reason for missing
        rollouts."""
        failures = [rolled.record.failure for rolled in self.failed]
        return all(failure is not None and failure.kind in PASSING for failure in failures)


class GroupRecords(Protocol):
    """Records what a `GroupRoller` does, in the context of the task that asked for the group."""

    def add(self, rolled: Rolled, result: AgentResult) -> None:
        """Record a rollout that ended, with its trajectory record."""

    def add_group(self, group: Group) -> None:
        """Record a group that ended, complete or not."""


class GroupRoller:
    """Rolls out groups. Groups that run at the same time share the backend's slots.

    Args:
        context: what all rollouts have in common.
        tools: the tools of each group.
        records: where every rollout and group is recorded, if anywhere.
        room: maximum number of rollouts at the same time.
        refills: number of failed rollouts of a group that may be replaced. None is replaced once the group has taken
            longer than the deadline of a rollout.
        exact: whether a rollout without its tokens is useless.
    """

    def __init__(
        self,
        context: RolloutContext,
        tools: Tools,
        records: GroupRecords | None = None,
        *,
        room: int,
        refills: int,
        exact: bool,
    ) -> None:
        self.context = context
        self.fatal: BaseException | None = None
        """An error that every other rollout would meet too: don't ask for more groups."""
        self._tools = tools
        self._records = records
        self._room = asyncio.Semaphore(max(1, room))
        self._refills = refills
        self._exact = exact
        self._numbers = itertools.count()

    async def roll(self, item: Item, size: int) -> Group:
        """Roll out an item `size` times. Failed rollouts are replaced up to a limit, so the group may have fewer.

        It ends within twice the deadline of a rollout after its first rollout began.

        Raises:
            UsageError, PolicyError: no slot can be had with these settings, for this rollout or any other.
            CostLimitReached, EndpointDown: no other group can be rolled out either; raised when the rollouts that were
                begun have ended.
        """
        stopped: list[HermesError] = []
        group = self._new_group(item, size)
        numbers = itertools.count()
        refills = iter(range(self._refills))

        async def until_used() -> None:
            try:
                while (await self._roll(item, group, next(numbers))).mask_sample:
                    if self._is_late(group) or next(refills, None) is None:
                        return
            except STOPPING as error:
                stopped.append(error)
                self.fatal = self.fatal or error

        try:
            async with together() as tasks:
                for _ in range(size):
                    tasks.create_task(until_used())
        except Exception as error:
            self.fatal = self.fatal or error
            raise
        if self._records is not None:
            self._records.add_group(group)
        if stopped and not group.whole:
            raise stopped[0]
        return group

    async def roll_one(self, item: Item, *, agent: Agent | None = None, group_id: str | None = None) -> Group:
        """Roll out an item once, without replacement. The result is a group of one, which `records` does not get as a
        group.

        Args:
            agent: works on it instead of the context's agent.
            group_id: rollouts with the same id are placed on one sandbox if they fit, and have the same tools; None is
                a group of its own.

        Raises:
            UsageError, PolicyError, CostLimitReached, EndpointDown: as `roll` does.
        """
        group = self._new_group(item, 1)
        group.group_id = group_id or group.group_id
        await self._roll(item, group, 0, agent)
        return group

    def _new_group(self, item: Item, size: int) -> Group:
        item_id = self.context.environment.item_id(item)
        return Group(f"{item_id}#{next(self._numbers)}", item_id, size)

    def _is_late(self, group: Group) -> bool:
        """Return whether the group has taken longer than a rollout may."""
        began = min(rolled.record.started or 0.0 for rolled in (*group.kept, *group.failed))
        deadline_s = self.context.limits.deadline_s
        return deadline_s is not None and time.time() - began >= deadline_s

    async def _roll(self, item: Item, group: Group, index: int, agent: Agent | None = None) -> Rolled:
        """Roll out one rollout of the group. Its record is written in every case."""
        context = self.context if agent is None else replace(self.context, agent=agent)
        context = self._tools.offer_tools(context, item, group.group_id)
        async with self._room:
            if isinstance(self.fatal, STOPPING):
                raise self.fatal.twin()  # don't begin what can't succeed
            trajectory = begin(context, item, group.item_id, group.group_id, index)
            try:
                await run_rollout(context, item, trajectory)
            finally:
                rolled = Rolled.of(trajectory.to_record(context.redact), exact=self._exact)
                if self._records is not None:
                    self._records.add(rolled, trajectory.result)
                context.hooks.events.emit(
                    "trajectory_finished", trajectory_id=trajectory.trajectory_id, record=rolled.record.to_json()
                )
        (group.failed if rolled.mask_sample else group.kept).append(rolled)
        return rolled
