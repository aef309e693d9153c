"""One rollout in progress: its events so far, and its reward or its failure."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_core.agents.base import AgentResult, CallRecord, TurnRecord
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.aio import exits_are_errors
from hermes_core.errors import (
    ChannelLost,
    DatasetError,
    FailureKind,
    HermesError,
    ImageError,
    InfraError,
    PolicyError,
    SandboxLost,
    SetupFailed,
    SlotLost,
    UsageError,
    VerifierError,
)
from hermes_core.records.jsonable import Cleaner, Redact, short_fields
from hermes_core.records.record import STAGES, Failure, Record, SandboxCommand, ToolCalls
from hermes_core.records.tokens import SPELT, tokens_of
from hermes_core.rollout.command_log import CommandLog
from hermes_core.sandbox.commands import Slot
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.egress.traffic import Traffic

log = logging.getLogger(__name__)

MAX_MESSAGE = 4000
"""Maximum number of characters of a failure's message."""


@dataclass(eq=False)
class Trajectory:
    """One rollout in progress. `run_rollout` uses its methods; `to_record` returns the record to keep."""

    environment: str
    item_id: str
    group: str
    rollout_index: int
    agent: str
    backend: str
    trajectory_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    item: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    """The seed of the run."""
    versions: Mapping[str, str] = field(default_factory=dict)
    tool_schemas: Sequence[dict[str, Any]] = ()
    """The tools that the model is offered."""
    slot: Slot | None = None
    """The agent's slot."""
    commands: CommandLog = field(default_factory=CommandLog)
    """The commands that the hooks ran."""
    traffic: Traffic = field(default_factory=Traffic)
    """What programs in the rollout's slots reached through a proxy, and what they were refused."""
    reward: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    patch: str | None = None
    result: AgentResult = field(default_factory=AgentResult)
    """The agent's conversation and calls so far."""
    timings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    infra_retries: int = 0
    """Number of restarts of this rollout after infrastructure failures."""
    repeated: str | None = None
    """The reason why the rollout's check was run a second time, or None."""
    _infra: InfraError | None = field(default=None, init=False)
    _failed_stage: str | None = field(default=None, init=False)
    _error: Exception | None = field(default=None, init=False)
    """The error of the stage that failed."""
    _ended: bool = field(default=False, init=False)
    """Whether the agent's work has its outcome. Later cancellations don't change the outcome."""
    _given_up: bool = field(default=False, init=False)
    """Whether the outcome is final although the rollout still runs."""

    def begin_again(self) -> None:
        """Forget an attempt that the infrastructure spoiled, except for its used tokens and its waits."""
        self.infra_retries += 1
        self.reward, self.details, self.failure, self.patch, self.repeated = None, {}, None, None, None
        self.result = AgentResult(usage=self.result.usage, waited_s=self.result.waited_s)
        self.timings = {}
        self.slot, self.commands, self.traffic = None, CommandLog(), Traffic()
        self._infra = self._failed_stage = self._error = None
        self._ended = False

    @property
    def is_infra(self) -> bool:
        """Return whether an infrastructure failure was noted, so that there will be no reward."""
        return self._infra is not None

    def note_infra(self, error: InfraError) -> None:
        """Remember the first infrastructure failure. This failure decides the outcome, even if a hook catches it."""
        self._infra = self._infra or error

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the seconds that a stage takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.timings[f"{name}_s"] = round(time.monotonic() - started, 6)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage. At its end, raise the infrastructure failure that was noted during the stage, if any."""
        self.commands.stage = name
        with self.measure(name):
            try:
                with exits_are_errors():
                    yield
                self._raise_infra(None)
            except BaseException as error:
                self._failed_stage = self._failed_stage or name
                if isinstance(error, Exception):
                    self._error = self._error or self._infra or error
                    self._raise_infra(error)
                raise

    def _raise_infra(self, cause: Exception | None) -> None:
        if self._infra is not None and self._infra is not cause:
            raise self._infra from cause

    @contextmanager
    def records_failure(self) -> Iterator[None]:
        """Turn ordinary failures into `failure`. Cancellation is recorded too, and raised again.

        Raises:
            UsageError, PolicyError: neither this nor any other rollout can get a slot with these settings.
            EndpointDown: the model's endpoint answers no request. This failure is recorded, too.
        """
        try:
            yield
        except Exception as error:
            stage = self._failed_stage or "acquire"
            if stage == "acquire" and isinstance(error, (UsageError, PolicyError)):
                self._fail(FailureKind.CANCELLED, _message(error))
                raise
            kind = failure_kind(error, stage)
            if not isinstance(error, HermesError):
                log.warning("trajectory %s: %s failed", self.trajectory_id, stage, exc_info=error)
            self._fail(kind, _message(error))
            if isinstance(error, EndpointDown):
                raise
        except BaseException as error:
            if not self._ended:
                how = "cancelled" if isinstance(error, asyncio.CancelledError) else f"ended by {type(error).__name__}"
                self._fail(FailureKind.CANCELLED, f"the rollout was {how}")
            raise

    def _fail(self, kind: FailureKind, message: str) -> None:
        if self._given_up:
            return
        self.reward = None
        self.failure = Failure(kind, self._failed_stage or "acquire", message[:MAX_MESSAGE])

    def give_up(self, reason: str) -> None:
        """Set the final outcome of a rollout at its deadline. The rollout may still run in the background.

        A score or a failure that is already set stays: then only the release of the slot is late. Otherwise the failure
        is that of the last error; without an error it is `infra`, because every other part has its own time limit.
        """
        error = self._error or self._infra
        if not self._ended and self.failure is None:
            self._failed_stage = self._failed_stage or self.commands.stage
            if error is None:
                self._fail(FailureKind.INFRA, reason)
            else:
                self._fail(failure_kind(error, self._failed_stage), _message(error))
        self._given_up = True

    def score(self, reward: float | None, details: Mapping[str, Any] | None = None) -> None:
        """Set the outcome: the reward, or None in an environment that gives none, and its details.

        Raises:
            VerifierError: the reward is not a finite number.
        """
        if reward is not None and not math.isfinite(reward):
            raise VerifierError(f"the verification gave the reward {reward!r}", hint="a reward is a finite number")
        if self._given_up:
            return
        self.reward, self.details, self._ended = reward, dict(details or {}), True

    @property
    def lost_in(self) -> str | None:
        """Return the stage in which the sandbox was lost, if the agent may have caused the loss; else None."""
        alone = self.slot is not None and self.slot.isolation == Isolation.DEDICATED.label
        lost = isinstance(self._infra, ChannelLost | SandboxLost | SlotLost)
        return self._failed_stage if alone and lost and self._failed_stage in ("agent", "verify") else None

    def blame_work(self, reason: str) -> None:
        """Set the outcome of a rollout whose failure its agent caused."""
        if not self._given_up:
            self.failure = None
        self.score(0.0, {"reason": reason})

    def to_record(self, redact: Redact | None = None) -> Record:
        """Return the record: plain values, without secrets. Long texts are cut, and `cut` names them."""
        result, failure = self.result, self.failure
        clean = Cleaner(redact)
        item = clean(short_fields(self.item), "item")
        redactions = clean.redactions
        messages = clean(result.messages, "messages")
        own = result.tool_schemas  # written by a program in the slot
        offered = self.tool_schemas if own is None else clean(list(own), "tool_schemas")
        exact = tokens_of(result.managed_state)
        if exact.sequences and clean.redactions > redactions:
            exact = replace(exact, sequences=(), refused=SPELT)
        return Record(
            trajectory_id=self.trajectory_id,
            environment=self.environment,
            item_id=self.item_id,
            group=self.group,
            rollout_index=self.rollout_index,
            agent=self.agent,
            backend=self.backend,
            model=result.model,
            seed=self.seed,
            item=item,
            started=self.started,
            ended=time.time(),
            reward=self.reward,
            details=clean(self.details, "details"),
            failure=failure and replace(failure, message=clean.redact(failure.message)),
            patch=clean.patch(self.patch),
            messages=messages,
            turns=tuple(_turn(turn, clean, f"turns.{index}") for index, turn in enumerate(result.turns)),
            calls=tuple(_call(call, clean, f"calls.{index}") for index, call in enumerate(result.calls)),
            tool_schemas=tuple(offered),
            sequences=exact.sequences,
            tokens_refused=exact.refused,
            forks=exact.forks,
            stop_reason=str(result.stop_reason) if "agent_s" in self.timings else None,
            timings={f"{stage}_s": self.timings.get(f"{stage}_s") for stage in STAGES},
            waited_s=round(result.waited_s, 6),
            program=None if result.program is None else clean(result.program, "program"),
            tool_calls=ToolCalls(
                attempted=result.tool_calls_attempted,
                schema_valid=result.tool_calls_schema_valid,
                executed_ok=result.tool_calls_executed_ok,
                exec_error=result.tool_calls_exec_error,
            ),
            usage=replace(result.usage),
            network=clean(self.traffic.to_json(), "network") or None,
            sandbox_commands=self._sandbox_commands(clean),
            isolation=self.slot.isolation if self.slot else None,
            image=self.slot.image if self.slot else None,
            versions=self.versions,
            infra_retries=self.infra_retries,
            check_repeated=self.repeated and clean.redact(self.repeated),
            cut=tuple(clean.cut),
        )

    def _sandbox_commands(self, clean: Cleaner) -> tuple[SandboxCommand, ...]:
        if self.commands.left_out:
            clean.cut.append(f"sandbox_commands: {self.commands.left_out} left out")
        return tuple(
            replace(command, command=clean.redact(command.command), output=clean.redact(command.output))
            for command in self.commands
        )


def _turn(turn: TurnRecord, clean: Cleaner, path: str) -> TurnRecord:
    names = ("model", "sampling", "weight_version", "parts")
    texts = {name: clean(getattr(turn, name), f"{path}.{name}") for name in names}
    return replace(turn, **texts)


def _call(call: CallRecord, clean: Cleaner, path: str) -> CallRecord:
    error = call.error and replace(call.error, message=clean.redact(call.error.message)[:MAX_MESSAGE])
    texts = {name: clean(getattr(call, name), f"{path}.{name}") for name in ("id", "name", "arguments")}
    return replace(call, error=error, **texts)


def failure_kind(error: Exception, stage: str) -> FailureKind:
    """Return the kind of failure for an error in a stage, which depends on the error's cause."""
    if isinstance(error, ImageError):
        return FailureKind.IMAGE
    if isinstance(error, InfraError):
        return FailureKind.INFRA
    if stage == "setup" or isinstance(error, (SetupFailed, DatasetError)):
        return FailureKind.SETUP
    if isinstance(error, VerifierError):  # also in stage `agent`, where hooks can verify parts of the work
        return FailureKind.VERIFIER
    if stage in ("acquire", "kill", "release"):
        return FailureKind.INFRA
    return FailureKind.MODEL if stage == "agent" else FailureKind.VERIFIER


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
