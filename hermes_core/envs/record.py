"""The record of a rollout: a type inside, one line of JSON outside. Only this module knows the format of a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hermes_core.agents.base import Message
from hermes_core.envs.plain import json_line
from hermes_core.envs.tokens import TokenSequence
from hermes_core.errors import FailureKind, UsageError

VERSION = 1
"""The version of the lines that are written. Older versions can be read. A line without `version` has version 1."""

STAGES = ("acquire", "setup", "agent", "verify", "release")
"""The stages of a rollout, in order. `timings` has the seconds of each."""

_OF_SEQUENCE = ("tokens", "masks", "logprobs")


@dataclass(frozen=True)
class Failure:
    """Why a rollout has no reward."""

    kind: FailureKind
    stage: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Return the failure as JSON values."""
        return {"kind": str(self.kind), "stage": self.stage, "message": self.message}


@dataclass(frozen=True)
class ToolCalls:
    """How the model's tool calls ended; see `AgentResult` for each count."""

    attempted: int = 0
    schema_valid: int = 0
    executed_ok: int = 0
    exec_error: int = 0


@dataclass(frozen=True)
class Record:
    """The record of one rollout: plain values, without secrets, long texts cut. See `docs/records.md`."""

    trajectory_id: str
    environment: str
    item_id: str
    group: str
    rollout_index: int
    agent: str
    backend: str
    reward: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the verification returned in addition to the reward."""
    failure: Failure | None = None
    patch: str | None = None
    messages: Sequence[Message] = ()
    sequences: tuple[TokenSequence, ...] = ()
    """The tokens, as arrays; empty without a token-exact server."""
    tokens_refused: str | None = None
    """Why the server's tokens can't be trained on, or None."""
    stop_reason: str | None = None
    timings: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds per stage: `acquire_s`, and so on."""
    tool_calls: ToolCalls = field(default_factory=ToolCalls)
    infra_retries: int = 0
    """Number of restarts of the rollout after infrastructure failures."""
    check_repeated: str | None = None
    """Why its check was run a second time, or None."""
    cut: tuple[str, ...] = ()
    """The names of the texts that were cut."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values: a line of version `VERSION`."""
        only = self.sequences[0].lists() if len(self.sequences) == 1 else {}
        several = {"sequences": [sequence.lists() for sequence in self.sequences]} if len(self.sequences) > 1 else {}
        notes = {
            "infra_retries": self.infra_retries,
            "check_repeated": self.check_repeated,
            "tokens_refused": self.tokens_refused,
            "cut": list(self.cut),
        }
        return {
            "trajectory_id": self.trajectory_id,
            "environment": self.environment,
            "item_id": self.item_id,
            "group": self.group,
            "rollout_index": self.rollout_index,
            "agent": self.agent,
            "backend": self.backend,
            "reward": self.reward,
            "details": {**self.details, **{name: note for name, note in notes.items() if note}},
            "failure": self.failure and self.failure.to_json(),
            "patch": self.patch,
            "messages": list(self.messages),
            **{name: only.get(name) for name in _OF_SEQUENCE},
            "stop_reason": self.stop_reason,
            "timings": dict(self.timings),
            "tool_calls": asdict(self.tool_calls),
            **several,
        }

    def line(self) -> bytes:
        """Return the record as one line of a JSONL file."""
        return json_line(self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """Return the record for a value from `parse_line`.

        Raises:
            ValueError: it is not a record.
        """
        try:
            return cls(**_fields(value))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no record: {error!r}") from error


def _fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record from a line of version 1; other keys are left out."""
    details, failure = dict(value["details"]), value["failure"]
    notes = {name: details.pop(name) for name, kind in _NOTES.items() if isinstance(details.get(name), kind)}
    sequences = value.get("sequences", ())
    if value["tokens"] is not None:
        sequences = [{name: value[name] for name in _OF_SEQUENCE}]
    return {
        **{name: value[name] for name in _AS_THEY_ARE},
        "item_id": str(value["item_id"]),
        "rollout_index": int(value["rollout_index"]),
        "details": details,
        "failure": failure and Failure(FailureKind(failure["kind"]), failure["stage"], failure["message"]),
        "sequences": tuple(TokenSequence.of(**sequence) for sequence in sequences),
        "tool_calls": ToolCalls(**value["tool_calls"]),
        **notes,
        "cut": tuple(notes.get("cut", ())),
    }


_AS_THEY_ARE = (
    *("trajectory_id", "environment", "group", "agent", "backend", "reward"),
    *("patch", "messages", "stop_reason", "timings"),
)
_NOTES = {"infra_retries": int, "check_repeated": str, "tokens_refused": str, "cut": list}
"""Keys of a line's `details` that do not come from the verification, with their types."""


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """Return the JSON object of a line that was written by this version or an earlier one.

    Args:
        place: the file and line number, for messages.

    Raises:
        ValueError: it is not a JSON object, or incomplete.
        UsageError: it was written by a newer version.
    """
    value = json.loads(line)
    if not isinstance(value, dict) or not line.endswith(b"\n"):
        raise ValueError("no whole JSON object")
    version = value.get("version", 1)
    if not isinstance(version, int):
        raise ValueError(f"no version: {version!r}")
    if version > VERSION:
        raise UsageError(
            f"{place}: a record of version {version}; this hermes-rl reads versions up to {VERSION}",
            hint="upgrade hermes-rl to the version that wrote it",
        )
    return value
