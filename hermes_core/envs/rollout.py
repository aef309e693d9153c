"""One rollout, from lease to release, and the object that its hooks work with."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hermes_core.agents.base import Agent, AgentResult, AgentTask, Message, StopReason
from hermes_core.envs.base import Environment, Item
from hermes_core.envs.trajectory import Redact, Trajectory, plain
from hermes_core.envs.workspace import Fresh, LeasedSlot
from hermes_core.errors import FailureKind, HermesError, SetupFailed, UnknownNameError, VerifierError
from hermes_core.sandbox.results import Slot

if TYPE_CHECKING:
    from hermes_core.hooks import EnvironmentHooks
    from hermes_core.sandbox.tool_backend import ToolBackend
    from hermes_core.tools.base import CallContext
    from hermes_core.tools.registry import ToolRegistry

log = logging.getLogger(__name__)


ScorePatch = Callable[[Item, str, "Rollout"], Awaitable[tuple[float, Mapping[str, Any]]]]


@dataclass(frozen=True)
class Limits:
    """How long a rollout may take, in seconds, and how often it is begun anew."""

    rollout_timeout_s: float | None = 3600.0
    """The agent's time; over it the rollout stops with `time_limit` and is verified all the same. None is no limit."""
    setup_timeout_s: float = 1800.0
    """The set-up hook's time; over it the rollout fails with kind `setup`."""
    verify_timeout_s: float = 3600.0
    """The verify hook's time; over it the rollout fails with kind `verifier`."""
    infra_retries: int = 2
    """How often a rollout that met an infrastructure failure is begun anew on a fresh slot."""


@dataclass(frozen=True)
class RolloutContext:
    """What the rollouts of one run have in common."""

    environment: Environment
    hooks: EnvironmentHooks
    """The environment's hooks with the plugins' wrappers around them, and the observers."""
    agent: Agent
    backend: ToolBackend
    tools: ToolRegistry
    tool_names: tuple[str, ...] = ()
    """The tools that the model can call."""
    tool_schemas: Sequence[dict[str, Any]] = ()
    """Their schemas, made once for many rollouts."""
    backend_name: str = ""
    profile: str | None = None
    """The profile of the slots; None is the backend's default."""
    limits: Limits = field(default_factory=Limits)
    redact: Redact | None = None
    """Takes out of a text the secrets that the driver knows."""


class Rollout(LeasedSlot):
    """The rollout as its hooks see it: the agent's own slot, fresh slots beside it, and the patch for the record.

    Attributes:
        trajectory_id: unique; the same when the rollout is begun anew after an infrastructure failure.
    """

    def __init__(self, context: RolloutContext, trajectory: Trajectory, slot: Slot) -> None:
        super().__init__(context.backend, slot, trajectory.note_infra, group=trajectory.group)
        self.trajectory_id = trajectory.trajectory_id
        self._context = context
        self._trajectory = trajectory
        self._driver_state: dict[str, Any] = {}

    async def tool_handler(self, tool_name: str, args: Mapping[str, Any], task_id: str) -> str:
        """Run one tool call of the model and give what it is told, as JSON text.

        Only the tools of this rollout can be called. Those that the sandbox does not run, run here, without the
        slot's commands.

        Raises:
            InfraError, StaleSlotError: they end the rollout. Everything else that goes wrong is told to the model.
        """
        context = self._context
        if tool_name not in context.tool_names:
            error = UnknownNameError("tool", tool_name, context.tool_names)
            return json.dumps({"error": str(error)})
        tool = context.tools.get(tool_name)
        if tool.where == "sandbox":  # the tool itself: a slot tool of the same name is for hooks only
            result = await self._watch(context.backend.execute(self.slot, tool, args))
        else:
            result = await self._watch(context.tools.call(tool, self._driver_context(), args))
        context.hooks.observers.tool_called(
            trajectory_id=self.trajectory_id, tool_name=tool_name, arguments=args, result=result
        )
        return json.dumps(plain(result.to_tool_result(), context.redact), ensure_ascii=False)

    def _driver_context(self) -> CallContext:
        """What a tool that runs here is given: nothing of the slot."""
        from hermes_core.tools.base import CallContext

        return CallContext(
            trajectory_id=self.trajectory_id, timeout_s=None, commands=None, slot=None, state=self._driver_state
        )

    @asynccontextmanager
    async def fresh_slot(self) -> AsyncIterator[Fresh]:
        """A fresh slot from the reserve that agents never take, on the agent's sandbox where possible; reset after.

        Raises:
            InfraError: there is none to be had.
        """
        lease = self._context.backend.lease(
            f"{self.trajectory_id}-verify", profile=self.slot.profile, group=self.group, verification=True
        )
        slot = await self._watch(lease.__aenter__())
        try:
            fresh = Fresh(self._context.backend, slot, self._note_infra, group=self.group)
            fresh.limit = self.limit
            yield fresh
        finally:
            await lease.__aexit__(*sys.exc_info())

    def hook_arguments(self, item: Item) -> dict[str, Any]:
        """The arguments that every environment hook can take."""
        return {"item": item, "trajectory_id": self.trajectory_id, "exec_tool": self.exec_tool, "rollout": self}

    def record_patch(self, patch: str) -> None:
        """Keep the agent's work as a patch in the record, for `hermes-rl rescore` and for reading."""
        self._trajectory.patch = patch


async def run_rollout(context: RolloutContext, item: Item, trajectory: Trajectory) -> Trajectory:
    """One rollout, from lease to release. What a rollout can meet ends in the record, not in an exception.

    An infrastructure failure is never a reward: the rollout is begun anew on a fresh slot, up to the limit.

    Args:
        trajectory: the record to fill; when this is cancelled it says so.

    Returns:
        The same trajectory, scored or with a failure.

    Raises:
        UsageError, PolicyError: no slot can be had the way it was asked for, by this rollout or any other.
    """
    return await _until_no_infra(context, trajectory, lambda: _attempt(context, item, trajectory))


async def run_rescoring(context: RolloutContext, item: Item, patch: str, trajectory: Trajectory) -> Trajectory:
    """Score a patch by itself, with the environment's `score_patch`; otherwise as `run_rollout`."""
    return await _until_no_infra(context, trajectory, lambda: _score_patch(context, item, patch, trajectory))


async def _until_no_infra(
    context: RolloutContext, trajectory: Trajectory, attempt: Callable[[], Awaitable[None]]
) -> Trajectory:
    for attempts_left in range(context.limits.infra_retries, -1, -1):
        await attempt()
        if trajectory.failure is None or trajectory.failure.kind is not FailureKind.INFRA or not attempts_left:
            break
        log.warning("trajectory %s: %s; begun anew", trajectory.trajectory_id, trajectory.failure.message)
        trajectory.begin_again()
    return trajectory


async def _attempt(context: RolloutContext, item: Item, trajectory: Trajectory) -> None:
    """One lease of a slot, and all that happens in it."""
    hooks, limits = context.hooks, context.limits
    with trajectory.records_failure():
        async with _leased(context, item, trajectory) as rollout:
            on_slot = rollout.hook_arguments(item)
            with trajectory.stage("setup"):
                prompt = context.environment.initial_messages(item)
                async with _within(rollout, limits.setup_timeout_s, SetupFailed):
                    on_slot["workspace_meta"] = await hooks.setup(**on_slot)
            with trajectory.stage("agent"):
                trajectory.result = await _work(context, trajectory, prompt, on_slot)
            with trajectory.stage("verify"):
                await context.backend.kill_everything(rollout.slot)
                async with _within(rollout, limits.verify_timeout_s, VerifierError):
                    trajectory.score(*await hooks.verify(result=trajectory.result, **on_slot))


async def _score_patch(context: RolloutContext, item: Item, patch: str, trajectory: Trajectory) -> None:
    """One lease of a slot, and the verification of a patch beside it."""
    score_patch: ScorePatch = getattr(context.environment, "score_patch")  # noqa: B009 - not every environment has it
    with trajectory.records_failure():
        async with _leased(context, item, trajectory) as rollout:
            with trajectory.stage("verify"):
                async with _within(rollout, context.limits.verify_timeout_s, VerifierError):
                    trajectory.score(*await score_patch(item, patch, rollout))


async def _work(
    context: RolloutContext, trajectory: Trajectory, prompt: list[Message], on_slot: Mapping[str, Any]
) -> AgentResult:
    """Let the agent work until it is done or its time is up; what it did until then stands."""
    task = AgentTask(
        trajectory_id=trajectory.trajectory_id,
        messages=prompt,
        tool_schemas=list(context.tool_schemas),
        tool_handler=on_slot["rollout"].tool_handler,
        solve=functools.partial(context.hooks.solve, **on_slot),
        parallel_safe=frozenset(name for name in context.tool_names if context.tools.get(name).parallel_safe),
        seed_key=f"{trajectory.item_id}:{trajectory.rollout_index}",
        result=trajectory.result,
    )
    try:
        async with asyncio.timeout(context.limits.rollout_timeout_s) as limit:
            return await context.agent.run(task)
    except TimeoutError:
        if not limit.expired():
            raise
        task.result.stop(StopReason.TIME_LIMIT)
        return task.result


@asynccontextmanager
async def _leased(context: RolloutContext, item: Item, trajectory: Trajectory) -> AsyncIterator[Rollout]:
    """The rollout's slot, both ways timed. A slot that can't be reset is the pool's to deal with: the score stands."""
    lease = context.backend.lease(
        trajectory.trajectory_id,
        profile=context.profile,
        image=context.environment.image(item),
        group=trajectory.group,
    )
    with trajectory.stage("acquire"):
        slot = await lease.__aenter__()
    try:
        yield Rollout(context, trajectory, slot)
    finally:
        with trajectory.timed("release"):
            try:
                await lease.__aexit__(*sys.exc_info())
            except HermesError as error:
                log.warning("trajectory %s: the slot was not released cleanly: %s", trajectory.trajectory_id, error)


@asynccontextmanager
async def _within(rollout: Rollout, seconds: float, error: type[HermesError]) -> AsyncIterator[None]:
    """Cancel what takes longer, and raise `error`."""
    try:
        async with asyncio.timeout(seconds) as rollout.limit:
            yield
    except TimeoutError as cause:
        if rollout.limit is None or not rollout.limit.expired():
            raise
        raise error(f"not done after {seconds:g} s", hint="raise the limit, or look for what hangs") from cause
