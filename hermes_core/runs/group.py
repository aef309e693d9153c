"""Groups: several rollouts of one item with the same tools, for any trainer that compares them."""

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
"""Kinds of failures that say nothing about the item."""


TOKENS = "tokens"
"""The failure kind of a rollout with a score but without tokens that can be trained on."""


@dataclass(frozen=True)
class Rolled:
    """A rollout that ended, with the parts that a trainer may use. Every adapter uses this class: see
    `docs/reference/trainers.md`."""

    record: Record
    failure_kind: str | None = None
    """The reason why the rollout can't be trained on: a `FailureKind`, or `tokens`. None if it can be."""
    failure_reason: str | None = None
    """The reason for `failure_kind` in words."""

    @classmethod
    def of(cls, record: Record, *, exact: bool) -> Rolled:
        """Return the rollout with this record, and decide whether it can be trained on.

        Args:
            exact: whether the trainer needs the rollout's tokens.
        """
        if record.failure is not None:
            return cls(record, str(record.failure.kind), record.failure.message)
        if exact and not record.sequences:
            return cls(record, TOKENS, record.tokens_refused or "the server kept none")
        return cls(record)

    @property
    def mask_sample(self) -> bool:
        """Return whether the rollout must not be trained on."""
        return self.failure_kind is not None

    @property
    def refused(self) -> str | None:
        """Return a text that says why the rollout can't be part of a group; None if it can."""
        return f"{self.failure_kind}: {self.failure_reason}" if self.mask_sample else None

    @property
    def labels(self) -> dict[str, Any]:
        """Return `mask_sample`, `failure_kind` and `failure_reason`."""
        return {name: getattr(self, name) for name in ("mask_sample", "failure_kind", "failure_reason")}

    @property
    def notes(self) -> dict[str, Any]:
        """Return the values that trainers keep beside a sample: `labels`, `trajectory_id` and `weight_versions`."""
        about = {"trajectory_id": self.record.trajectory_id, "weight_versions": self.record.weight_versions}
        return {**self.labels, **about}

    @property
    def reward(self) -> float | None:
        """Return the score; None if there is none, or if the rollout must not be trained on."""
        return None if self.mask_sample else self.record.reward

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the token sequences; none if the rollout must not be trained on."""
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
        """Return whether all rollouts of the group succeeded."""
        return len(self.kept) == self.size

    @property
    def unlucky(self) -> bool:
        """Return whether rollouts are missing only because of failures that say nothing about the item (`PASSING`)."""
        failures = [rolled.record.failure for rolled in self.failed]
        return all(failure is not None and failure.kind in PASSING for failure in failures)


class GroupRecords(Protocol):
    """Records the rollouts and groups of a `GroupRoller`. Called in the context of the task that asked for a group."""

    def add(self, rolled: Rolled, result: AgentResult) -> None:
        """Record a rollout that ended, with its trajectory record."""

    def add_group(self, group: Group) -> None:
        """Record a group that ended, complete or not."""


class GroupRoller:
    """Rolls out groups. Groups that run at the same time share the backend's slots.

    Args:
        context: the values that all rollouts share.
        tools: gives the tools of each group.
        records: records every rollout and group; None records nothing.
        room: maximum number of rollouts at the same time.
        refills: maximum number of failed rollouts of a group to replace. A group that has taken longer than the
            deadline of a rollout gets no more replacements.
        exact: whether rollouts need their tokens.
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
        """An error that every other rollout would have, too. After it, ask for no more groups."""
        self._tools = tools
        self._records = records
        self._room = asyncio.Semaphore(max(1, room))
        self._refills = refills
        self._exact = exact
        self._numbers = itertools.count()

    async def roll(self, item: Item, size: int) -> Group:
        """Roll out an item `size` times. Failed rollouts are replaced up to a limit, so some rollouts may be missing.

        The group ends at the latest twice the deadline of a rollout after its first rollout began.

        Raises:
            UsageError, PolicyError: no slot can be had with these settings, for this rollout or any other.
            CostLimitReached, EndpointDown: no other group can be rolled out either; raised after the running rollouts
                have ended.
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
        """Roll out an item once, without replacement. Return a group with one rollout. `records` gets only the rollout.

        Args:
            agent: works on the item instead of the context's agent.
            group_id: rollouts with the same id have the same tools, and share a sandbox if there is room; None makes a
                new group.

        Raises:
            UsageError, PolicyError, CostLimitReached, EndpointDown: as `roll`.
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
        """Do one rollout of the group. Its record is written in every case."""
        context = self.context if agent is None else replace(self.context, agent=agent)
        context = self._tools.offer_tools(context, item, group.group_id)
        async with self._room:
            if isinstance(self.fatal, STOPPING):
                raise self.fatal.twin()  # another rollout could not succeed
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
