"""The record of a rollout: a class in memory, one line of JSON in files. Only this module knows the line's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hermes_core.agents.base import CallRecord, Message, TurnRecord, Usage
from hermes_core.errors import FailureKind, UsageError
from hermes_core.records.jsonable import json_line, json_value
from hermes_core.records.tokens import TokenSequence
from hermes_core.sandbox.commands import SandboxImage
from hermes_core.validation import problem_text

VERSION = 2
"""The version of lines that this module writes. It also reads older ones. A line without `version` is of version 1."""

STAGES = ("acquire", "setup", "agent", "verify", "release")
"""The stages of a rollout, in order. `timings` has the seconds of each."""

Times = tuple[float | None, float | None]
"""Start and end of something, in seconds since the epoch."""


@dataclass(frozen=True)
class Failure:
    """Why a rollout failed."""

    kind: FailureKind
    stage: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Return the failure as JSON values."""
        return {"kind": str(self.kind), "stage": self.stage, "message": self.message}


@dataclass(frozen=True)
class ToolCalls:
    """Counts of the model's tool calls by how they ended; `AgentResult` explains each count."""

    attempted: int = 0
    schema_valid: int = 0
    executed_ok: int = 0
    exec_error: int = 0


@dataclass(frozen=True)
class SandboxCommand:
    """A command that the environment's hooks or its reference solution ran in a sandbox. Times are seconds since the
    epoch."""

    stage: str
    """The stage that ran it: `setup`, `agent` (the reference solution), or `verify`."""
    command: str
    started: float
    ended: float
    exit_code: int | None = None
    """None if the command was killed or could not be run; `output` then has the reason."""
    output: str = ""
    """The command's output, standard error last; long output is cut in the middle."""
    bytes_dropped: int = 0
    """Number of bytes of the command's output that are not in `output`."""


@dataclass(frozen=True)
class Record:
    """The record of one rollout: plain values, without secrets, long texts cut. See `docs/reference/records.md`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, arbitrary_types_allowed=True
    )
    """How pydantic checks records and their parts."""

    trajectory_id: str
    environment: str
    item_id: str
    group: str
    rollout_index: int
    agent: str
    backend: str
    model: str | None = None
    """The model that was asked for."""
    seed: int | None = None
    """The seed of the run."""
    item: Mapping[str, Any] = field(default_factory=dict)
    """The item's metadata."""
    started: float | None = None
    """When the rollout began, in seconds since the epoch; None in records of version 1."""
    ended: float | None = None
    reward: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the verification returned in addition to the reward."""
    failure: Failure | None = None
    patch: str | None = None
    messages: Sequence[Message] = ()
    turns: tuple[TurnRecord, ...] = ()
    """The model's answers, as far as the agent records them."""
    calls: tuple[CallRecord, ...] = ()
    """The model's tool calls, as far as the agent records them."""
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    """The tools that the model was offered, in the OpenAI function form."""
    sequences: tuple[TokenSequence, ...] = ()
    """The tokens, as arrays; empty without a token-exact server."""
    tokens_refused: str | None = None
    """Why the server's tokens can't be trained on, or None."""
    forks: Mapping[str, int] = field(default_factory=dict)
    """How many requests to a token-exact server left something behind, by cause."""
    stop_reason: str | None = None
    timings: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(f"{each}_s" for each in STAGES))
    """Seconds of each stage: `acquire_s`, and so on."""
    waited_s: float = 0.0
    """Seconds spent waiting for the endpoint: for its rate limits, and between two attempts."""
    program: Mapping[str, Any] | None = None
    """For an agent that is a program, how the program ended: see `AgentResult.program`."""
    tool_calls: ToolCalls = field(default_factory=ToolCalls)
    usage: Usage = field(default_factory=Usage)
    """Tokens and cost, summed over all requests."""
    network: Mapping[str, Any] | None = None
    """For each phase with `network: allow`, what programs reached and what they were refused; None if there is none."""
    sandbox_commands: tuple[SandboxCommand, ...] = ()
    """The commands that the environment's hooks ran in sandboxes."""
    isolation: str | None = None
    """The isolation level that the agent's slot was granted; None if it never got one."""
    image: SandboxImage | None = None
    """The image of the agent's sandbox; None if its backend has no images."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of hermes-rl, Python, and the plugins' distributions."""
    infra_retries: int = 0
    """Number of restarts of the rollout after infrastructure failures."""
    check_repeated: str | None = None
    """The reason why the rollout's check was run a second time, or None."""
    cut: tuple[str, ...] = ()
    """The names of the texts that were cut."""

    @property
    def message_times(self) -> list[Times | None]:
        """Return for each message the times of its making: by the model for an answer, by a tool for a tool message.
        None for other messages."""
        times: list[Times | None] = [None] * len(self.messages)
        parts: tuple[TurnRecord | CallRecord, ...] = (*self.turns, *self.calls)
        for part in parts:
            if 0 <= part.message < len(times):
                times[part.message] = (part.started, part.ended)
        return times

    @property
    def weight_versions(self) -> list[str]:
        """Return the versions of the policy's weights that gave answers, in the order of their first answers."""
        named = (version for turn in self.turns for _, version in [*turn.parts, [0, turn.weight_version]])
        return list(dict.fromkeys(str(version) for version in named if version is not None))

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object of version `VERSION`. Long fields come last, so that `parse_outline` can
        skip them."""
        return {
            "version": VERSION,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "failure": self.failure and self.failure.to_json(),
            "timings": dict(self.timings),
            **({"program": dict(self.program)} if self.program is not None else {}),
            **({"network": dict(self.network)} if self.network is not None else {}),
            "tool_calls": asdict(self.tool_calls),
            "usage": asdict(self.usage),
            **({"forks": dict(self.forks)} if self.forks else {}),
            "turns": [
                {key: value for key, value in vars(turn).items() if key != "parts" or value} for turn in self.turns
            ],
            "calls": [{**vars(call), "error": call.error and call.error.to_json()} for call in self.calls],
            "cut": list(self.cut),
            "image": self.image and {"name": self.image.name, "digest": self.image.digest},
            "versions": dict(self.versions),
            "item": dict(self.item),
            "details": dict(self.details),
            "patch": self.patch,
            "sandbox_commands": [{**vars(command)} for command in self.sandbox_commands],
            "tool_schemas": list(self.tool_schemas),
            "message_times": [times and list(times) for times in self.message_times],
            "messages": list(self.messages),
            "sequences": [sequence.lists() for sequence in self.sequences],
        }

    def line(self) -> bytes:
        """Return the record as one line of a JSONL file."""
        return json_line(self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Record:
        """Return the record for a value from `parse_line`.

        Raises:
            ValueError: the value is not a record.
        """
        try:
            whole = value if value.get("version", 1) > 1 else _from_version_1(value)
            whole = {"program": None, "network": None, "forks": {}, **whole}
            read = {each.name: whole[each.name] for each in fields(cls)}
            return _adapter().validate_python({**read, "messages": [_message(each) for each in read["messages"]]})
        except ValidationError as error:
            raise ValueError(problem_text(error)) from error
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no record: {error!r}") from error


_AS_THEY_ARE = (
    *("trajectory_id", "environment", "item_id", "group", "rollout_index", "agent", "backend", "model", "seed"),
    *("started", "ended", "reward", "tokens_refused", "stop_reason", "waited_s", "isolation"),
    *("infra_retries", "check_repeated"),
)
"""Fields that are the same in `Record` and in a line."""


@cache
def _adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def _message(value: Mapping[str, Any]) -> Message:
    """Return a message of a reliable form: with a role and a content, and if it has calls, with a list of mappings.

    Raises:
        TypeError, AttributeError, KeyError, ValueError: the value is no message.
    """
    functions = [call.get("function") or {} for call in value.get("tool_calls") or ()]
    if not all(
        isinstance(text, str) for text in (value["role"], *(function.get("name", "") for function in functions))
    ):
        raise ValueError("a message's role, or the name of a call, is no text")
    return {**value} if "content" in value else {**value, "content": ""}


_NOTES = {"infra_retries": int, "check_repeated": str, "tokens_refused": str, "cut": list}
"""Keys that version 1 has in `details` although they do not come from the verification, with their types."""

_OF_SEQUENCE = ("tokens", "masks", "logprobs")
"""The lists of a sequence. In version 1, a line with only one sequence has these lists at its top level."""


def _from_version_1(value: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a line of version 1 to version 2. Fields that version 1 does not have are empty."""
    details = dict(value["details"])
    notes = {name: details.pop(name) for name, kind in _NOTES.items() if isinstance(details.get(name), kind)}
    sequences = value.get("sequences", ())
    if value["tokens"] is not None:
        sequences = [{name: value[name] for name in _OF_SEQUENCE}]
    return {**_EMPTY, **value, "details": details, "sequences": sequences, **notes}


_EMPTY = Record("", "", "", "", 0, "", "").to_json()


def parse_line(line: bytes, place: str) -> dict[str, Any]:
    """Return the JSON object of a line that was written by this version or an earlier one.

    Args:
        place: the file and line number, for messages.

    Raises:
        ValueError: the line is not a JSON object, or is incomplete.
        UsageError: the line was written by a newer version.
    """
    value = json_value(line)
    if not isinstance(value, dict) or not line.endswith(b"\n"):
        raise ValueError("no whole JSON object")
    return _of_known_version(value, place)


_AFTER_OUTLINE = b',"cut":['
"""The first key that an outline leaves out. In a line of JSON these bytes are always a key, because quotes in a text
are escaped."""


def parse_outline(line: bytes, place: str) -> dict[str, Any]:
    """Like `parse_line`, but if possible skip the values after `calls`, which are empty in the result.

    This takes a tenth of the time, because a conversation and its tokens are most of a line.
    """
    end = line.find(_AFTER_OUTLINE)
    if end > 0 and line.endswith(b"}\n"):
        # If the key belongs to a nested object, the shortened line is not JSON: the outer objects are not closed.
        with suppress(ValueError):
            return {**_EMPTY, **_of_known_version(json_value(line[:end] + b"}"), place)}
    return parse_line(line, place)


def _of_known_version(value: dict[str, Any], place: str) -> dict[str, Any]:
    version = value.get("version", 1)
    if not isinstance(version, int):
        raise ValueError(f"no version: {version!r}")
    if version > VERSION:
        raise UsageError(
            f"{place}: a record of version {version}; this hermes-rl reads versions up to {VERSION}",
            hint="upgrade hermes-rl to the version that wrote it",
        )
    return value


def record_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a record of version `VERSION`."""
    schema: dict[str, Any] = json.loads(
        resources.files("hermes_core.records").joinpath("record.schema.json").read_bytes()
    )
    return schema
