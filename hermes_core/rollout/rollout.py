"""Runs one rollout, from the lease of its slot to the release, and defines `Rollout`, the object for its hooks."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from hermes_core.agents.base import (
    Agent,
    AgentResult,
    AgentSlot,
    AgentTask,
    CallError,
    CallErrorKind,
    Fill,
    Message,
    StopReason,
    ToolAnswer,
    takes_mcp,
)
from hermes_core.agents.baselines import NopAgent
from hermes_core.agents.replies import sayable, sayable_message
from hermes_core.environment import Environment, FollowUp, Item, check_scores_patches
from hermes_core.errors import (
    DISTURBANCES,
    CommandError,
    Disturbed,
    ErrorKind,
    FailureKind,
    HermesError,
    InfraError,
    ModelError,
    PluginError,
    PolicyError,
    SetupFailed,
    SlotLost,
    SlotUnclean,
    UnknownNameError,
    UsageError,
    VerifierError,
)
from hermes_core.handles import SlotHandle
from hermes_core.mcp.opening import OpenServers, open_servers
from hermes_core.mcp.servers import McpServer, check_server_name
from hermes_core.plugins.calling import EnvironmentHooks, HookArguments
from hermes_core.records.jsonable import Redact, plain
from hermes_core.rollout.attribution import WorkAtFault, attribute_failure
from hermes_core.rollout.leased_slot import AgentTime, ErrorOrigin, Fresh, LeasedSlot, ModelTime
from hermes_core.rollout.limits import Limits
from hermes_core.rollout.running import RunningRollouts
from hermes_core.rollout.trajectory import Trajectory
from hermes_core.rollout.unawaited import Opening
from hermes_core.sandbox.as_user import AsUser, is_root
from hermes_core.sandbox.commands import Call, Cwd, ExecutionResult, Operation, Slot, start_directory
from hermes_core.sandbox.contract import Phase
from hermes_core.sandbox.images import Image
from hermes_core.sandbox.pool.cost import CostLimitReached
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.schema import function_schema

log = logging.getLogger(__name__)

T = TypeVar("T")

VERIFY_SHARE = 0.25
"""The share of a rollout's deadline that is kept for its verification, unless the verification's own limit is
shorter."""

RELEASE_S, RELEASE_SHARE = 10.0, 0.05
"""Seconds between the end of the verification and the deadline, and the largest share of the deadline that these
seconds may be."""

ENDPOINT_S = 1.0
"""If a rollout that missed its deadline has waited at least this many seconds for the endpoint, the endpoint is to
blame, not the model."""


@dataclass(frozen=True, kw_only=True)
class RolloutContext:
    """The values that all rollouts of one run share."""

    environment: Environment
    hooks: EnvironmentHooks
    """The environment's hooks, inside the wrappers of plugins, and the events of the hooks."""
    agent: Agent
    backend: ToolBackend
    tools: ToolRegistry
    tool_names: tuple[str, ...] = ()
    """The tools that the model may call."""
    tool_schemas: Sequence[dict[str, Any]] = ()
    """The schemas of these tools, made once for many rollouts."""
    mcp_servers: Mapping[str, McpServer] = field(default_factory=dict)
    """The run's MCP servers that the model may use. Items may have more."""
    needs_slot: bool = True
    """Whether a hook or a tool needs a slot. Without one, nothing can be run in a sandbox."""
    backend_name: str = ""
    profile: str | None = None
    """The profile for items that name none; None is the backend's default."""
    limits: Limits = field(default_factory=Limits)
    redact: Redact | None = None
    """Removes the secrets that the driver knows from a text."""
    seed: int | None = None
    """The seed of the run."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of hermes-rl, Python and plugins, for the records."""
    running: RunningRollouts = field(default_factory=RunningRollouts)
    """The rollouts that have not ended."""
    controls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Limits the number of untouched environments that are verified at a time, because each takes a slot."""


class Rollout(LeasedSlot):
    """The rollout as its hooks see it: the agent's own slot, fresh slots, and the patch for the record.

    Attributes:
        trajectory_id: unique; unchanged when the rollout is restarted after an infrastructure failure.
        unclean: the reason why the agent's slot can't be used any more, if the agent's processes can't be killed.
        overran: whether the hook's time ended while the hook waited for a command in a slot.
    """

    def __init__(self, context: RolloutContext, trajectory: Trajectory, slot: Slot | None) -> None:
        super().__init__(context.backend, slot, self._note_error, group=trajectory.group, log=trajectory.commands)
        self.unclean: SlotUnclean | None = None
        self.overran = False
        self.trajectory_id = trajectory.trajectory_id
        self._ours: list[CommandError] = []
        self._context = context
        self._trajectory = trajectory
        self._driver_state: dict[str, Any] = {}
        self.used = False
        """Whether the agent ever did anything in its slot."""
        self.emptied = False
        """Whether the agent's work was removed from the slot, or lost together with the slot."""
        self.tools = {name: context.tools.get(name) for name in context.tool_names}
        """The tools that the model may call, by name."""
        self.servers = OpenServers()
        """The MCP servers of the rollout."""

    def _note_error(self, error: BaseException, origin: ErrorOrigin) -> None:
        """Note an error of a slot, and whether the agent's work may have caused it."""
        if isinstance(error, SlotUnclean) and origin is ErrorOrigin.AGENT:
            self.unclean = self.unclean or error
        elif isinstance(error, InfraError):
            self._trajectory.note_infra(error)
        elif isinstance(error, CommandError) and origin is ErrorOrigin.PREPARATION:
            self._ours.append(error)
        elif isinstance(error, asyncio.CancelledError) and origin is not ErrorOrigin.PREPARATION:
            self.overran = self.limit is not None and self.limit.expired()

    def is_of_the_work(self, error: CommandError) -> bool:
        """Return whether a command's error may be due to the agent's work. Errors of preparations are not, because no
        slot can write to the directory where preparations run."""
        return error not in self._ours

    @property
    def agent_user(self) -> str | None:
        """Return the user as whom the agent's tools run; None is the slot's own user."""
        environment = self._context.environment
        user = environment.agent_user(self._trajectory.item)
        if user is None and environment.as_image and self.slot.image is not None:
            user = self.slot.image.user
        return None if user is None or is_root(user) else user

    def agent_slot(self) -> AgentSlot:
        """Return the view of the slot for an agent that is a program in the slot."""

        async def prepare(key: str, build: Fill) -> str:
            with self.clock_stopped():
                return await self.prepare(key, build)

        def mark_used(call: Call, operation: Operation[T], /) -> Coroutine[Any, Any, T]:
            self.used = True
            return call(operation)

        commands = self._backend.commands(self.slot).around(mark_used)
        commands = self._observe("commands", commands, ErrorOrigin.AGENT, log=False)
        user = self.agent_user
        return AgentSlot(commands if user is None else AsUser(commands, user), prepare)

    async def tool_handler(self, tool_name: str, args: Mapping[str, Any], task_id: str) -> ToolAnswer:
        """Run one tool call of the model and return the answer to the model, as JSON text.

        Only the tools of this rollout can be called. Tools that do not run in the sandbox run in the driver, without
        the slot's commands.

        Raises:
            InfraError, StaleSlotError: these errors end the rollout. All other failures are reported to the model.
        """
        self.used = True
        context = self._context
        if tool_name not in self.tools:
            unknown = str(UnknownNameError("tool", tool_name, self.tools))
            return ToolAnswer(json.dumps({"error": unknown}), CallError(CallErrorKind.UNKNOWN_TOOL, unknown))
        tool = self.tools[tool_name]
        if tool.where == "sandbox":  # the tool itself, as its name may be that of a slot tool, which only hooks use
            result = await self._watch(context.backend.execute(self.slot, tool, args, user=self.agent_user))
        else:
            result = await self._watch(context.tools.call(tool, self._driver_context(), args))
        context.hooks.events.emit(
            "tool_called", trajectory_id=self.trajectory_id, tool_name=tool_name, arguments=args, result=result
        )
        return _answer(result, context.redact)

    def _driver_context(self) -> CallContext:
        """Return the context for a tool that runs in the driver, without access to the slot."""
        return CallContext(
            trajectory_id=self.trajectory_id, timeout_s=None, commands=None, slot=None, state=self._driver_state
        )

    def offer(self, tools: Sequence[Tool]) -> None:
        """Offer the model these tools, in addition to the tools that it has.

        Raises:
            SetupFailed: the model already has a tool with the name of one of these.
        """
        for tool in tools:
            if tool.name in self.tools:
                raise SetupFailed(f"there are two tools named {tool.name!r}", hint="give the MCP server another name")
            self.tools[tool.name] = tool
        if tools:
            offered = self._trajectory.tool_schemas
            self._trajectory.tool_schemas = [*offered, *(function_schema(tool) for tool in tools)]

    def fresh_slot(
        self,
        *,
        apart_from: str | None = None,
        image: Image | None = None,
        cwd: str | Cwd | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Fresh]:
        """Implement `RolloutHandle.fresh_slot`."""
        return Opening("rollout.fresh_slot(…)", self._fresh_slot(apart_from, image, cwd, env))

    @asynccontextmanager
    async def _fresh_slot(
        self, apart_from: str | None, image: Image | None, cwd: str | Cwd | None, env: Mapping[str, str] | None
    ) -> AsyncIterator[Fresh]:
        environment, item = self._context.environment, self._trajectory.item
        lease = self._context.backend.lease(
            f"{self.trajectory_id}-verify",
            profile=self.slot.profile if image is None else environment.profile(item) or self._context.profile,
            image=image,
            cwd=cwd,
            env=environment.variables(item) if env is None else env,
            as_image=environment.as_image,
            network=environment.network(item),
            phase=Phase.VERIFY,
            traffic=self._trajectory.traffic,
            group=self.group,
            verification=True,
            apart_from=apart_from,
        )
        slot = await self._watch(lease.__aenter__())
        try:
            fresh = Fresh(
                self._context.backend, slot, self._note_error, group=self.group, calls=self.calls, log=self.log
            )
            fresh.limit = self.limit
            fresh.alone = fresh.sandbox_id == apart_from
            yield fresh
        finally:
            await lease.__aexit__(*sys.exc_info())

    async def check_afresh(
        self,
        lay_out: Callable[[Fresh], Awaitable[object]],
        check: Callable[[Fresh], Awaitable[T]],
        *,
        disturbed: Callable[[T], str | None],
    ) -> T:
        """Implement `RolloutHandle.check_afresh`."""
        async with self.fresh_slot() as fresh:
            place = fresh.sandbox_id
            try:
                outcome = await _lay_out_and_check(lay_out, check, fresh)
            except Disturbed as error:
                reason = error.message
            else:
                if (why := disturbed(outcome)) is None:
                    return outcome
                reason = why
        self._note_repeated(reason)
        self.emptied = True
        with suppress(SlotLost):  # a lost slot needs no emptying: it is not used any more
            await self._backend.empty(self.slot)
        async with self.fresh_slot(apart_from=place) as fresh:
            return await self._watch(_lay_out_and_check(lay_out, check, fresh))

    async def check_again(self, leased: SlotHandle, reason: str, check: Callable[[], Awaitable[T]]) -> T:
        """Implement `RolloutHandle.check_again`."""
        self._note_repeated(reason)
        leased.alone = True
        async with leased.processor():
            return await check()

    def _note_repeated(self, reason: str) -> None:
        self._trajectory.repeated = reason
        log.warning("trajectory %s: its check is repeated: %s", self.trajectory_id, reason)

    async def enter_phase(self, phase: Phase) -> None:
        """Give the agent's slot, if there is one, the network of a phase. See `ToolBackend.enter_phase`."""
        if self._context.needs_slot:
            await self._watch(self._backend.enter_phase(self.slot, phase))

    def record_patch(self, patch: str) -> None:
        """Implement `RolloutHandle.record_patch`."""
        self._trajectory.patch = patch


def _answer(result: ExecutionResult, redact: Redact | None) -> ToolAnswer:
    """Return the answer to the model for the result of a tool."""
    payload, error = result.to_tool_result(), None
    exit_code = payload.get("exit_code", result.metadata.get("exit_code"))
    if not isinstance(exit_code, int) or exit_code < 0:  # no command, or one that did not start
        exit_code = None
    if result.metadata.get("invalid_arguments"):
        payload = {"error": result.error, "invalid_arguments": True}  # an error of the call, so that agents count it
        error = CallError(CallErrorKind.INVALID_ARGUMENTS, result.error)
    elif result.error_kind is ErrorKind.TIMEOUT:
        error = CallError(CallErrorKind.TIME_LIMIT, result.error)
    elif result.error and exit_code is None:
        error = CallError(CallErrorKind.FAILED, result.error)
    text = json.dumps(plain(payload, lambda text: sayable(redact(text) if redact else text)), ensure_ascii=False)
    return ToolAnswer(text, error, exit_code, result.metadata.get("bytes_dropped", 0))


async def _lay_out_and_check(
    lay_out: Callable[[Fresh], Awaitable[object]], check: Callable[[Fresh], Awaitable[T]], fresh: Fresh
) -> T:
    try:
        await lay_out(fresh)
    except CommandError as error:
        if error.code not in DISTURBANCES:
            raise
        raise Disturbed(error.message, slot_id=error.slot_id) from error
    return await check(fresh)


def begin(context: RolloutContext, item: Item, item_id: str, group: str, rollout_index: int) -> Trajectory:
    """Return the record of a rollout that begins now, and notify the observers."""
    environment = context.environment.name
    trajectory = Trajectory(
        environment,
        item_id,
        group,
        rollout_index,
        context.agent.name,
        context.backend_name,
        item=item,
        seed=context.seed,
        versions=context.versions,
    )
    context.hooks.events.emit(
        "trajectory_started", trajectory_id=trajectory.trajectory_id, environment=environment, item_id=item_id
    )
    return trajectory


async def run_rollout(context: RolloutContext, item: Item, trajectory: Trajectory) -> Trajectory:
    """Run one rollout, from the lease of its slot to the release. Ordinary failures are recorded, not raised.

    Neither an infrastructure failure nor a missed deadline becomes a reward. After an infrastructure failure, the
    rollout is restarted on a fresh slot, up to a limit.

    Args:
        trajectory: the record to fill, even if the rollout is cancelled.

    Returns:
        The same trajectory, scored or with a failure.

    Raises:
        UsageError, PolicyError: neither this nor any other rollout can get a slot with these settings.
    """
    lost_in: str | None = None

    async def attempt(ends: _Ends) -> None:
        nonlocal lost_in
        await _attempt(context, item, trajectory, ends)
        before, lost_in = lost_in, trajectory.lost_in
        lost_again = context.environment.scored and lost_in is not None and lost_in == before
        with suppress(HermesError):
            if lost_again and await _verify_untouched(context, item, trajectory, ends):
                trajectory.blame_work(f"its sandbox was lost twice in stage {lost_in!r}, while an untouched one lasts")

    return await _by_deadline(context, trajectory, attempt)


async def run_rescoring(context: RolloutContext, item: Item, patch: str, trajectory: Trajectory) -> Trajectory:
    """Like `run_rollout`, but score a patch with the environment's `score_patch`, without an agent."""
    return await _by_deadline(context, trajectory, lambda ends: _score_patch(context, item, patch, trajectory, ends))


@dataclass(frozen=True)
class _Ends:
    """Times on the event loop's clock at which the parts of a rollout must end; None is no limit."""

    agent: float | None = None
    verification: float | None = None

    @classmethod
    def of(cls, limits: Limits) -> _Ends:
        """Return the times for a rollout that begins now."""
        if (deadline_s := limits.deadline_s) is None:
            return cls()
        verification = _now() + deadline_s - min(RELEASE_S, RELEASE_SHARE * deadline_s)
        return cls(verification - min(limits.verify_timeout, VERIFY_SHARE * deadline_s), verification)

    @property
    def too_late(self) -> bool:
        """Return whether no time is left for an agent that begins now."""
        return self.agent is not None and self.agent <= _now()

    def of_verification(self, limit_s: float) -> float:
        """Return the maximum seconds for a verification that begins now, at most `limit_s`."""
        return limit_s if self.verification is None else min(limit_s, max(0.0, self.verification - _now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _by_deadline(
    context: RolloutContext, trajectory: Trajectory, attempt: Callable[[_Ends], Awaitable[None]]
) -> Trajectory:
    """Attempt the rollout until its deadline. After the deadline, its clean-up goes on in the background."""
    name, deadline_s = f"rollout {trajectory.trajectory_id}", context.limits.deadline_s
    work = _until_no_infra(context, trajectory, attempt)
    if await context.running.run(work, name, deadline_s):
        return trajectory
    trajectory.give_up(f"not over at its deadline of {deadline_s:g} s")
    log.warning("trajectory %s: not over at its deadline of %g s", trajectory.trajectory_id, deadline_s)
    if trajectory.slot is not None:  # even if a hook ignores its cancellation
        context.running.clean_up(context.backend.release(trajectory.slot, reset_workspace=True), f"release of {name}")
    return trajectory


async def _until_no_infra(
    context: RolloutContext, trajectory: Trajectory, attempt: Callable[[_Ends], Awaitable[None]]
) -> None:
    """Attempt the rollout, and again after infrastructure failures, while time for an agent is left."""
    ends = _Ends.of(context.limits)
    for attempts_left in range(context.limits.infra_retries, -1, -1):
        await attempt(ends)
        failure = trajectory.failure
        if failure is None or failure.kind is not FailureKind.INFRA or not attempts_left or ends.too_late:
            return
        log.warning("trajectory %s: %s; begun anew", trajectory.trajectory_id, failure.message)
        trajectory.begin_again()


async def _attempt(
    context: RolloutContext, item: Item, trajectory: Trajectory, ends: _Ends, *, verification: bool = False
) -> None:
    """Lease a slot, and run the rollout in the slot once. With `verification`, the slot may be one reserved for
    verifications."""
    hooks = context.hooks
    trajectory.tool_schemas = context.tool_schemas
    with trajectory.records_failure():
        leased = _lease(context, item, trajectory, verification=verification)
        async with leased as rollout, AsyncExitStack() as servers:
            arguments = HookArguments(item, rollout, rollout.exec_tool)
            with trajectory.stage("setup"):
                prompt = context.environment.initial_messages(item)
                async with _within(rollout, context.limits.setup_timeout, SetupFailed):
                    await _make_cwd(rollout, context.environment.cwd(item))
                    meta = await rollout.calls.all_awaited(hooks.setup(arguments))
                    arguments = replace(arguments, workspace_meta=meta)
                    await _check_user(rollout)
                    rollout.servers = await servers.enter_async_context(_mcp_servers(context, item, rollout))
                    rollout.offer(rollout.servers.tools)
            try:
                await rollout.enter_phase(Phase.AGENT)
                with trajectory.stage("agent"):
                    work = _AgentWork(context, trajectory, rollout, arguments, ends)
                    trajectory.result = await work.run(prompt)
                await servers.aclose()
                if context.environment.scored:
                    with trajectory.stage("verify"):
                        if context.needs_slot:
                            await rollout.enter_phase(Phase.VERIFY)
                            await rollout.kill_everything()
                        try:
                            verify = partial(hooks.verify, arguments, trajectory.result)
                            score = await _verify_or_blame(context, item, trajectory, rollout, verify, ends=ends)
                        except WorkAtFault as fault:
                            score = 0.0, {"reason": fault.message}
                        trajectory.score(*score)
                else:
                    trajectory.score(None)
            except SlotUnclean:
                if rollout.unclean is None:
                    raise
            if rollout.unclean is not None:
                reward = 0.0 if context.environment.scored else None
                trajectory.score(reward, {"reason": f"the agent's slot: {rollout.unclean.message}"})


async def _score_patch(context: RolloutContext, item: Item, patch: str, trajectory: Trajectory, ends: _Ends) -> None:
    """Lease a slot and verify a patch in it."""
    environment = check_scores_patches(context.environment)
    with trajectory.records_failure():
        async with _lease(context, item, trajectory, phase=Phase.VERIFY) as rollout:
            with trajectory.stage("verify"):
                try:
                    limit_s = ends.of_verification(context.limits.verify_timeout)
                    score = await _run_verification(
                        rollout, partial(environment.score_patch, item, patch, rollout), limit_s
                    )
                except WorkAtFault as fault:
                    score = 0.0, {"reason": fault.message}
                trajectory.score(*score)


async def _run_verification(rollout: Rollout, hook: Callable[[], Awaitable[T]], limit_s: float) -> T:
    """Return the result of a hook that verifies the agent's work.

    Raises:
        WorkAtFault: the hook could not finish because of the work.
        VerifierError: the hook was too slow, and not because of a command in a slot.
    """
    try:
        async with _within(rollout, limit_s, VerifierError):
            return await rollout.calls.all_awaited(hook())
    except CommandError as error:
        if not rollout.is_of_the_work(error):
            raise
        raise WorkAtFault(f"the verification met what the agent left: {error.message}") from error
    except VerifierError as error:
        if not rollout.overran:
            raise
        raise WorkAtFault(f"the verification of what the agent left was {error.message}") from error


async def _verify_or_blame(
    context: RolloutContext,
    item: Item,
    trajectory: Trajectory,
    rollout: Rollout,
    hook: Callable[[], Awaitable[T]],
    *,
    ends: _Ends,
) -> T:
    """Return the result of a hook that verifies the agent's work. If there is no result, the verification of an
    untouched environment decides whether the work is at fault.

    Raises:
        WorkAtFault: there is no result, because of the work.
        VerifierError, SetupFailed, Disturbed: there is no result, and the work is not the cause.
    """

    async def verify() -> T:
        return await _run_verification(rollout, hook, ends.of_verification(context.limits.verify_timeout))

    async def can_verify_untouched() -> bool:
        if not rollout.used or rollout.emptied or trajectory.is_infra:
            return False
        return await _verify_untouched(context, item, trajectory, ends)

    return await attribute_failure(verify, can_verify_untouched)


async def _verify_untouched(context: RolloutContext, item: Item, trajectory: Trajectory, ends: _Ends) -> bool:
    """Return whether the verification gives a result in another slot, where no agent has worked.

    Raises:
        InfraError: no other slot could be leased, or it was lost.
    """
    identity = trajectory.environment, trajectory.item_id, trajectory.group, trajectory.rollout_index
    control = Trajectory(*identity, NopAgent.name, trajectory.backend, item=item)
    ends = replace(ends, agent=ends.verification)  # the agent's time may be over, but `nop` needs none
    async with context.controls:
        await _attempt(replace(context, agent=NopAgent()), item, control, ends, verification=True)
    if control.failure is not None and control.failure.kind is FailureKind.INFRA:
        raise InfraError(f"an untouched environment can't be verified either: {control.failure.message}")
    return control.failure is None


@dataclass
class _AgentWork:
    """The agent's part of one attempt: its task, the user's messages between parts, and the end of its time."""

    context: RolloutContext
    trajectory: Trajectory
    rollout: Rollout
    arguments: HookArguments
    ends: _Ends

    def __post_init__(self) -> None:
        part_s = self.context.environment.agent_timeout_s(self.arguments.item)
        self.clock = AgentTime(self.rollout, self.context.limits.rollout_timeout, part_s)

    async def run(self, prompt: list[Message]) -> AgentResult:
        """Let the agent work until it is done or its time is up. Its work until then counts in both cases.

        Raises:
            ModelError: the model failed, took too long, or never answered.
            InfraError: no time is left for an agent.
        """
        agent, rollout = self.context.agent, self.rollout
        if self.ends.too_late:
            raise InfraError("the rollout's deadline leaves no time for the agent", hint="raise deadline")
        waited_before_s = self.trajectory.result.waited_s
        task = self._task(prompt)
        try:
            async with asyncio.timeout_at(self.ends.agent) as end:
                async with asyncio.timeout(self.clock.part_s) as rollout.limit:
                    result = await agent.run(task)
            if not isinstance(result, AgentResult):
                message = f"agent {agent.name!r} returned {result!r:.80}, and not the task's result"
                raise PluginError(message, hint="end `run` with `return task.result`")
            return result
        except ModelError:
            task.result.stop(StopReason.MODEL_ERROR)
            raise
        except TimeoutError as error:
            if not end.expired() and (rollout.limit is None or not rollout.limit.expired()):
                raise  # raised by the agent, not by the time limit here
            if task.result.stop_reason is StopReason.MODEL_ERROR:
                text, hint = "the model had failed when the agent's time was up", "check its endpoint"
                raise ModelError(text, hint=hint) from error
            if not rollout.used and len(task.result.messages) <= len(prompt):
                hint = "check its endpoint, or raise the time limit"
                raise ModelError("the model never answered", hint=hint) from error
            # Turns have the waits of answered requests. The rest is the wait of the last request.
            waited_s = task.result.waited_s - waited_before_s - sum(turn.waited_s for turn in task.result.turns)
            if end.expired() and waited_s > ENDPOINT_S:
                hint = "look at what keeps its endpoint busy, lower the concurrency, or raise deadline"
                raise ModelError("the model's endpoint did not work until the rollout's deadline", hint=hint) from error
            task.result.stop(StopReason.TIME_LIMIT)
            return task.result

    def _task(self, prompt: list[Message]) -> AgentTask:
        context, trajectory, rollout = self.context, self.trajectory, self.rollout
        return AgentTask(
            trajectory_id=trajectory.trajectory_id,
            messages=[sayable_message(message) for message in prompt],
            tool_schemas=list(trajectory.tool_schemas),
            tool_handler=rollout.tool_handler,
            mcp_tools={
                server: {name: tool.name for name, tool in tools.items()}
                for server, tools in rollout.servers.by_server.items()
            },
            skills=context.environment.skills(trajectory.item),
            solve=self._solve,
            cheat=self._cheat,
            waiting=ModelTime(rollout, context.limits.model_timeout).waiting,
            parallel_safe=frozenset(name for name, tool in rollout.tools.items() if tool.parallel_safe),
            seed_key=f"{trajectory.item_id}:{trajectory.rollout_index}",
            follow_up=self._follow_up,
            slot=rollout.agent_slot() if context.needs_slot else None,
            result=trajectory.result,
        )

    async def _solve(self) -> None:
        self.rollout.used = True
        await self.rollout.calls.all_awaited(self.context.hooks.solve(self.arguments))

    async def _cheat(self, name: str) -> None:
        rollout = self.rollout
        if self.context.needs_slot:  # without a slot, there is nothing to change
            rollout.used = True
            as_agent = replace(self.arguments, exec_tool=partial(rollout.exec_tool, user=rollout.agent_user))
            await rollout.calls.all_awaited(self.context.hooks.cheat(name, as_agent))

    async def _follow_up(self) -> Message | None:
        follow_up = await self._ask_user()
        if follow_up is None:
            return None
        with self.rollout.clock_stopped():
            await self.rollout.servers.reopen()  # the hook may have killed all processes of the slot
        self.clock.begin_part(follow_up.agent_timeout_s)
        return {"role": "user", "content": sayable(follow_up.text)}

    async def _ask_user(self) -> FollowUp | None:
        """Ask the environment for the user's next message, now that the agent is done. The agent's clock is stopped
        meanwhile.

        Returns None if there is no message, or if the hook could not finish because of the agent's work: then the
        verification will have the same problem.

        Raises:
            VerifierError: the hook failed, and not because of the work; or the hook returned an invalid value.
        """
        context, trajectory, rollout = self.context, self.trajectory, self.rollout
        agents_limit, agents_stage = rollout.limit, trajectory.commands.stage
        trajectory.commands.stage = "verify"
        await rollout.enter_phase(Phase.VERIFY)
        try:
            with rollout.clock_stopped():
                ask = partial(context.hooks.follow_up, self.arguments, trajectory.result)
                answer = await _verify_or_blame(context, self.arguments.item, trajectory, rollout, ask, ends=self.ends)
        except WorkAtFault:
            return None
        finally:
            rollout.limit, trajectory.commands.stage = agents_limit, agents_stage
            await rollout.enter_phase(Phase.AGENT)
        if answer is not None and not isinstance(answer, str | FollowUp):
            raise VerifierError(
                f"continue_trajectory of {context.environment.name!r} gave {answer!r}",
                hint="return a FollowUp, a text, or None",
            )
        return FollowUp(answer) if isinstance(answer, str) else answer


@asynccontextmanager
async def _lease(
    context: RolloutContext,
    item: Item,
    trajectory: Trajectory,
    *,
    verification: bool = False,
    phase: Phase = Phase.SETUP,
) -> AsyncIterator[Rollout]:
    """Lease the rollout's slot and release it, and time both. If the slot can't be reset, the pool handles this, and
    the score stays valid. A rollout that needs no slot gets none."""
    if not context.needs_slot:
        yield Rollout(context, trajectory, None)
        return
    profile, image = context.environment.profile(item), context.environment.image(item)
    network = context.environment.network(item)
    lease = context.backend.lease(
        trajectory.trajectory_id,
        profile=profile or context.profile,
        image=image,
        cwd=context.environment.cwd(item),
        env=context.environment.variables(item),
        as_image=context.environment.as_image,
        network=network,
        phase=phase,
        traffic=trajectory.traffic,
        group=trajectory.group,
        verification=verification,
    )
    with trajectory.stage("acquire"):
        try:
            for other in context.environment.images(item):  # before the agent works, as the check needs them
                if other != image:
                    await context.backend.prepare_image(other, profile=profile or context.profile)
            slot = await lease.__aenter__()
        except (UsageError, PolicyError) as error:
            if isinstance(error, CostLimitReached) or (profile is image is network is None):
                raise
            # Only this item asks for something impossible, so other rollouts can go on.
            raise SetupFailed(error.message, hint=error.hint) from error
    trajectory.slot = slot
    try:
        yield Rollout(context, trajectory, slot)
    finally:
        with trajectory.measure("release"):
            try:
                await lease.__aexit__(*sys.exc_info())
            except HermesError as error:
                log.warning("trajectory %s: the slot was not released cleanly: %s", trajectory.trajectory_id, error)


@asynccontextmanager
async def _mcp_servers(context: RolloutContext, item: Item, rollout: Rollout) -> AsyncIterator[OpenServers]:
    """Connect to the MCP servers of the run and of the item.

    Raises:
        SetupFailed: a server of the item can't be used, or is not allowed for items.
        InfraError: a server of the run can't be used.
    """
    own = {**context.environment.mcp_servers(item)}
    if own and not takes_mcp(context.agent):
        raise SetupFailed(
            f"the item has MCP servers, and agent {context.agent.name!r} can't be given any",
            hint="use an agent that takes them: `hermes-rl agents NAME` says whether it does",
        )
    of_item = own.keys() - context.mcp_servers.keys()
    for name in of_item:
        try:
            check_server_name(name)
        except UsageError as error:
            raise SetupFailed(error.message, hint=error.hint) from error
        if own[name].on_driver:
            raise SetupFailed(
                f"the item's MCP server {name!r} is not a program in the slot, and the driver does not reach or run "
                "what an item names",
                hint="if you trust it, give the run a server of this name: --mcp FILE",
            )
    commands = context.backend.commands(rollout.slot) if context.needs_slot else None
    if commands is not None and (user := rollout.agent_user) is not None:
        commands = AsUser(commands, user)
    async with open_servers({**own, **context.mcp_servers}, commands, of_item=of_item) as opened:
        yield opened


async def _make_cwd(rollout: Rollout, cwd: str | Cwd | None) -> None:
    """Make the directory in which the item's commands start, if it is missing.

    Raises:
        SetupFailed: the directory can't be made.
    """
    if cwd is None:
        return
    directory = start_directory(cwd, rollout.slot.image) or rollout.slot.workspace_dir
    argv = ["mkdir", "-p", "--", directory]
    made = await rollout.commands.run(argv, cwd=rollout.slot.workspace_dir, merge_stderr=True)
    if not made.ok:
        raise SetupFailed(
            f"the item's cwd {directory!r} can't be made: {made.text.strip()}",
            hint="name a directory of its image, or one below the workspace",
        )


async def _check_user(rollout: Rollout) -> None:
    """Make sure that commands can run as the agent's user.

    Raises:
        SetupFailed: no command can run as the agent's user.
    """
    if (user := rollout.agent_user) is None:
        return
    done = await rollout.as_user(user).run(["id", "-u"], cwd="/")
    if not done.ok:
        raise SetupFailed(
            f"the agent can't be user {user!r}: {done.error_text.strip()[-300:] or done.returncode}",
            hint="the slot must be root, and have this user, and setpriv or su",
        )


@asynccontextmanager
async def _within(rollout: Rollout, seconds: float, error: type[HermesError]) -> AsyncIterator[None]:
    """Cancel the block if it takes longer than `seconds`, and raise `error`."""
    try:
        async with asyncio.timeout(seconds) as rollout.limit:
            yield
    except TimeoutError as cause:
        if rollout.limit is None or not rollout.limit.expired():
            raise
        raise error(f"not done after {seconds:g} s", hint="raise the limit, or look for what hangs") from cause
