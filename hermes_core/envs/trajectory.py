"""The record of one rollout: what happened, what it was worth, and why it has no reward if it has none."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from hermes_core.agents.base import AgentResult
from hermes_core.agents.failures import EndpointDown
from hermes_core.envs.tokens import tokens_of
from hermes_core.errors import (
    DatasetError,
    FailureKind,
    HermesError,
    InfraError,
    PolicyError,
    SetupFailed,
    UsageError,
    VerifierError,
)

log = logging.getLogger(__name__)

STAGES = ("acquire", "setup", "agent", "verify", "release")
"""The stages of a rollout, in order; each has its seconds in `timings`."""

MAX_TEXT = 1 << 20
"""Characters of one string that a record keeps; what was longer is named in `details["cut"]`."""

MAX_PATCH = 64 << 20
"""Characters of a patch that a record keeps: a longer one is left out, as half a patch is worth nothing."""

MAX_DEPTH = 64
"""Levels of a nested value that a record keeps."""

MAX_MESSAGE = 4000
"""Characters of a failure's message."""

Redact = Callable[[str], str]


@dataclass(frozen=True)
class Failure:
    """Why a rollout has no reward."""

    kind: FailureKind
    stage: str
    message: str


@dataclass(eq=False)
class Trajectory:
    """One rollout in the making. Its methods are what `run_rollout` is written in; `to_record` is what is kept."""

    environment: str
    item_id: str
    group: str
    rollout_index: int
    agent: str
    backend: str
    trajectory_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    reward: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    patch: str | None = None
    result: AgentResult = field(default_factory=AgentResult)
    """What the agent said and did; grows while it works."""
    timings: dict[str, float] = field(default_factory=dict)
    infra_retries: int = 0
    """How often this rollout was begun anew after an infrastructure failure."""
    repeated: str | None = None
    """Why its check was run a second time, if it was."""
    _infra: InfraError | None = field(default=None, init=False)
    _failed_stage: str | None = field(default=None, init=False)

    def begin_again(self) -> None:
        """Forget an attempt that the infrastructure spoiled."""
        self.infra_retries += 1
        self.reward, self.details, self.failure, self.patch, self.repeated = None, {}, None, None, None
        self.result, self.timings = AgentResult(), {}
        self._infra = self._failed_stage = None

    def note_infra(self, error: InfraError) -> None:
        """Remember the first infrastructure failure: it decides, whatever a hook makes of it."""
        self._infra = self._infra or error

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Take down the seconds that a stage takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.timings[f"{name}_s"] = round(time.monotonic() - started, 6)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage. Leaving it raises the infrastructure failure noted in it, if there was one."""
        with self.timed(name):
            try:
                yield
                self._raise_infra(None)
            except BaseException as error:
                self._failed_stage = self._failed_stage or name
                if isinstance(error, Exception):
                    self._raise_infra(error)
                raise

    def _raise_infra(self, cause: Exception | None) -> None:
        if self._infra is not None and self._infra is not cause:
            raise self._infra from cause

    @contextmanager
    def records_failure(self) -> Iterator[None]:
        """Turn what a rollout can meet into `failure`. Cancellation is recorded too, and goes on.

        Raises:
            UsageError, PolicyError: no slot can be had the way it was asked for, by this rollout or any other.
            EndpointDown: the model answers nobody. It is recorded, too.
        """
        try:
            yield
        except asyncio.CancelledError:
            if self.reward is None:
                self._fail(FailureKind.CANCELLED, "the rollout was cancelled")
            raise
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

    def _fail(self, kind: FailureKind, message: str) -> None:
        self.reward = None
        self.failure = Failure(kind, self._failed_stage or "acquire", message[:MAX_MESSAGE])

    def score(self, reward: float, details: Mapping[str, Any]) -> None:
        """Take the reward and its details.

        Raises:
            VerifierError: the reward is not a finite number.
        """
        if not math.isfinite(reward):
            raise VerifierError(f"the verification gave the reward {reward!r}", hint="a reward is a finite number")
        self.reward, self.details = reward, dict(details)

    def to_record(self, redact: Redact | None = None) -> dict[str, Any]:
        """The record as it is written: JSON values only, secrets redacted, overlong strings cut and named."""
        result = self.result
        clean = _Cleaner(redact)
        exact = tokens_of(result.managed_state)
        only = exact.only.lists() if exact.only else {}
        record: dict[str, Any] = {
            "trajectory_id": self.trajectory_id,
            "environment": self.environment,
            "item_id": self.item_id,
            "group": self.group,
            "rollout_index": self.rollout_index,
            "agent": self.agent,
            "backend": self.backend,
            "reward": self.reward,
            "details": clean(self.details, "details"),
            "failure": None,
            "patch": clean.patch(self.patch),
            "messages": clean(result.messages, "messages"),
            "tokens": only.get("tokens"),
            "masks": only.get("masks"),
            "logprobs": only.get("logprobs"),
            "stop_reason": str(result.stop_reason) if self._agent_ran() else None,
            "timings": {f"{stage}_s": self.timings.get(f"{stage}_s") for stage in STAGES},
            "tool_calls": {
                "attempted": result.tool_calls_attempted,
                "schema_valid": result.tool_calls_schema_valid,
                "executed_ok": result.tool_calls_executed_ok,
                "exec_error": result.tool_calls_exec_error,
            },
        }
        if self.failure is not None:
            message = clean.redact(self.failure.message)
            record["failure"] = {"kind": str(self.failure.kind), "stage": self.failure.stage, "message": message}
        if self.infra_retries:
            record["details"]["infra_retries"] = self.infra_retries
        if self.repeated is not None:
            record["details"]["check_repeated"] = clean.redact(self.repeated)
        if len(exact.sequences) > 1:  # the conversation's past was changed on the way
            record["sequences"] = [sequence.lists() for sequence in exact.sequences]
        if exact.refused:
            record["details"]["tokens_refused"] = exact.refused
        if clean.cut:
            record["details"]["cut"] = clean.cut
        return record

    def _agent_ran(self) -> bool:
        return "agent_s" in self.timings


def failure_kind(error: Exception, stage: str) -> FailureKind:
    """What an error in a stage means for the trainer: whose doing it was."""
    if isinstance(error, InfraError):
        return FailureKind.INFRA
    if stage == "setup" or isinstance(error, (SetupFailed, DatasetError)):
        return FailureKind.SETUP
    if stage in ("acquire", "kill", "release"):
        return FailureKind.INFRA
    return FailureKind.MODEL if stage == "agent" else FailureKind.VERIFIER


def dump_record(record: Mapping[str, Any]) -> bytes:
    """One line of `trajectories.jsonl`. Pure ASCII: no reader can take a character of it for the end of the line."""
    return json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def plain(value: Any, redact: Redact | None = None) -> Any:
    """The value as plain JSON: strings redacted and bounded, numbers finite, everything else as text."""
    return _Cleaner(redact)(value, "")


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"


class _Cleaner:
    """Copies a value into plain JSON: strings redacted and bounded, numbers finite, everything else as text."""

    def __init__(self, redact: Redact | None) -> None:
        self.redact: Redact = redact or (lambda text: text)
        self.cut: list[str] = []

    def __call__(self, value: Any, path: str, depth: int = 0) -> Any:
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self._text(value, path)
        if depth < MAX_DEPTH and isinstance(value, Mapping):
            named = [(self._text(str(key), path), part) for key, part in value.items()]
            return {name: self(part, f"{path}.{name}", depth + 1) for name, part in named}
        if depth < MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
            return [self(part, f"{path}.{index}", depth + 1) for index, part in enumerate(value)]
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):  # its text would nest as deep, without end
            return f"[nested more than {MAX_DEPTH} levels deep]"
        if isinstance(value, Real):
            return self(float(value), path)
        return self._text(str(value), path)

    def patch(self, patch: str | None) -> str | None:
        if patch is not None and len(patch) > MAX_PATCH:
            self.cut.append(f"patch: {len(patch)} characters, left out")
            return None
        return None if patch is None else self.redact(patch)

    def _text(self, text: str, path: str) -> str:
        text = self.redact(text).encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is no JSON text
        if len(text) <= MAX_TEXT:
            return text
        self.cut.append(f"{path}: {len(text)} characters, {MAX_TEXT} kept")
        half = MAX_TEXT // 2
        return f"{text[:half]}\n[… {len(text) - MAX_TEXT} characters left out …]\n{text[-half:]}"
