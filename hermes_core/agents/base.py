"""The base classes of agents: the task an agent is given, its settings, and its result."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, Self, Union, get_args, get_origin, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from hermes_core.agents.endpoint.settings import EndpointSettings
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Diagnosis

Message = dict[str, Any]
"""One message of a chat in the OpenAI form. It always has the keys `role` and `content`."""

MASKED = -100
"""The mask of a token that the model did not write."""


class StopReason(StrEnum):
    """Why an agent stopped."""

    FINISHED = "finished"
    """The model answered without calling a tool, which says that it is done."""
    MAX_TURNS = "max_turns"
    """The maximum number of turns was reached."""
    LENGTH = "length"
    """The last answer was cut off at `max_tokens` and called no tool."""
    CONTEXT_LENGTH = "context_length"
    """The conversation no longer fits the model's context."""
    REFUSED = "refused"
    """The endpoint or the chat template accepted the prompt, but not the conversation that followed."""
    CONTENT_FILTER = "content_filter"
    """The endpoint withheld the answer."""
    EMPTY_RESPONSE = "empty_response"
    """The model's answer had no text and no calls."""
    TIME_LIMIT = "time_limit"
    """The rollout's time was up. Set by the code that measures the time, never by an agent."""
    MODEL_ERROR = "model_error"
    """The endpoint failed; `ModelError` was raised."""
    INTERRUPTED = "interrupted"
    """The run has not ended yet, or was ended from outside: by cancellation or an infrastructure failure."""
    PROGRAM_FAILED = "program_failed"
    """The agent is a program, and ended by itself in the middle of its work, or said that it failed."""


@dataclass(frozen=True)
class ToolError:
    """A tool call that could not be made, or whose tool reported an error."""

    turn: int
    """The turn that made the call; the first is 1."""
    tool_name: str
    arguments: str
    """The arguments as the model wrote them."""
    error: str
    tool_result: str
    """The answer that the model got."""


Part = list[int | str | None]
"""A pair, as JSON has it: a number of tokens, and the version of the policy's weights that sampled these tokens, which
is None if the endpoint names no version."""


@dataclass(frozen=True)
class TurnRecord:
    """One answer of the model. Times are seconds since the epoch."""

    message: int
    """The index of the answer in the conversation."""
    model: str | None = None
    """The name that the endpoint gives to the model that answered; else the model that was requested."""
    started: float = 0.0
    """When the request was sent for the first time."""
    ended: float = 0.0
    """When the answer had arrived."""
    waited_s: float = 0.0
    """Seconds between `started` and `ended` in which the request waited for the endpoint's rate limit, or for its own
    next attempt."""
    prompt_tokens: int = 0
    """Tokens of the conversation before the answer; 0 if the endpoint does not report them."""
    completion_tokens: int = 0
    """Tokens of the answer; 0 if the endpoint does not report them."""
    cached_tokens: int | None = None
    """How many of `prompt_tokens` came from the endpoint's cache; None if the endpoint does not report this number."""
    reasoning_tokens: int | None = None
    """How many of `completion_tokens` are reasoning; None if the endpoint does not report this number."""
    cost: float | None = None
    """Price of the answer in US dollars; None if it is not known."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that were sent: `temperature`, `max_tokens`, and the keys of `extra_body`, such as `seed`."""
    stop_reason: str | None = None
    """The endpoint's `finish_reason`."""
    weight_version: str | None = None
    """The version of the policy's weights, as the endpoint names it; None if the endpoint names no version."""
    compacted: bool = False
    """Whether the answer is a summary. The user's next message repeats the task and contains the summary, and the
    conversation goes on from this message. Of all earlier messages, the model then sees only those before the task."""
    parts: list[Part] = field(default_factory=list)
    """The parts of an answer that was broken off and continued, for example at an update of the weights: for each part,
    its number of tokens and the version of the weights that sampled them. Empty for any other answer."""


class CallErrorKind(StrEnum):
    """Why a tool call was answered with an error."""

    UNKNOWN_TOOL = "unknown_tool"
    """There is no such tool, or the model was not offered it."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments are not JSON, or the tool does not take them."""
    FAILED = "failed"
    """The tool failed."""
    TIME_LIMIT = "time_limit"
    """The tool's own time limit passed."""
    INTERRUPTED = "interrupted"
    """The rollout ended before the tool had answered."""


@dataclass(frozen=True)
class CallError:
    """Why a tool call was answered with an error."""

    kind: CallErrorKind
    message: str

    def to_json(self) -> dict[str, str]:
        """Return the error as JSON values."""
        return {"kind": str(self.kind), "message": self.message}


_INTERRUPTED = CallError(CallErrorKind.INTERRUPTED, "interrupted before the tool had answered")


class ToolAnswer(str):
    """The answer to a tool call, as JSON text for the model, with the error and other facts for the call's record."""

    __slots__ = ("bytes_dropped", "error", "exit_code")

    error: CallError | None
    """Why the call failed; None if it did not fail."""
    exit_code: int | None
    """The exit status of the command that the call ran; None if it ran no command, or the command has no status."""
    bytes_dropped: int
    """Bytes of the command's output that are missing in the answer."""

    def __new__(
        cls, text: str, error: CallError | None = None, exit_code: int | None = None, bytes_dropped: int = 0
    ) -> Self:
        answer = super().__new__(cls, text)
        answer.error, answer.exit_code, answer.bytes_dropped = error, exit_code, bytes_dropped
        return answer

    @classmethod
    def refusal(cls, error: CallError) -> Self:
        """Return the answer to a call that was not carried out."""
        return cls(json.dumps({"error": error.message}, ensure_ascii=False), error)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the answer with this JSON text. A text with an exit code is no error, because its command ran."""
        if '"error"' not in text and '"exit_code"' not in text:
            return cls(text)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return cls(text)
        if not isinstance(answer, dict):
            return cls(text)
        if (exit_code := answer.get("exit_code")) is not None or not answer.get("error"):
            return cls(text, exit_code=exit_code if isinstance(exit_code, int) else None)
        kind = CallErrorKind.INVALID_ARGUMENTS if answer.get("invalid_arguments") else CallErrorKind.FAILED
        return cls(text, CallError(kind, str(answer["error"])))


ToolHandler = Callable[[str, Mapping[str, Any], str], Awaitable[str]]
"""`await handler(tool_name, arguments, task_id)` runs one tool call and returns the answer to the model, as JSON text
or as a `ToolAnswer`.

`InfraError`, `StaleSlotError` and cancellation end the rollout; any other exception becomes a tool result.
"""


@dataclass(frozen=True)
class CallRecord:
    """One tool call of the model. Times are seconds since the epoch."""

    turn: int
    """The index of the answer that made the call, in `AgentResult.turns`."""
    message: int
    """The index of the call's tool message in the conversation."""
    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them."""
    started: float | None = None
    """When the call began; None if it never did."""
    ended: float | None = None
    """When the call had been answered; None if it never was."""
    error: CallError | None = None
    """Why the call failed; None if the tool answered it without an error. A non-zero exit status of a command is no
    error, but reaching the time limit is one."""
    exit_code: int | None = None
    """The exit status of the command that the call ran; None if it ran no command, or the command has no status."""
    bytes_dropped: int = 0
    """Bytes of the command's output that are missing in the answer."""


@dataclass
class Usage:
    """Token counts that the endpoint reports, summed over all requests; 0 if the endpoint reports none."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """How many of `prompt_tokens` came from the endpoint's cache."""
    cost: float | None = None
    """Price of all requests in US dollars; None if it is not known."""

    def add(self, other: Usage) -> None:
        """Add another count."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + other.cost


@dataclass
class AgentResult:
    """The result of an agent's work. It is filled while the agent runs and can be read at any moment.

    `messages` is always a conversation that an endpoint accepts. A tool call that has not ended yet is already followed
    by a tool message that says that the call was interrupted; the real answer replaces this message.
    """

    messages: list[Message] = field(default_factory=list)
    """The whole conversation, including the prompt."""
    model: str | None = None
    """The name of the model that the agent asks; None if it asks no model."""
    turns: list[TurnRecord] = field(default_factory=list)
    """The model's answers, as far as the agent records them."""
    calls: list[CallRecord] = field(default_factory=list)
    """The model's tool calls, in the order of `messages`, as far as the agent records them."""
    waited_s: float = 0.0
    """Seconds spent waiting for the endpoint: for its rate limits, and between two attempts."""
    managed_state: Mapping[str, Any] | None = None
    """The token-exact record that the server keeps of this conversation (`server.get_state()`), unchanged; None if the
    server keeps no record. Tokens are never reconstructed from text."""
    turns_used: int = 0
    """Number of answers that the model gave."""
    finished_naturally: bool = False
    """Whether the model itself ended the conversation (`StopReason.FINISHED`)."""
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    """The model's reasoning in each of its answers; None for an answer without reasoning."""
    tool_errors: list[ToolError] = field(default_factory=list)
    stop_reason: StopReason = StopReason.INTERRUPTED
    tool_calls_attempted: int = 0
    """Calls that the model made, well-formed or not."""
    tool_calls_schema_valid: int = 0
    """Calls of an existing tool whose arguments needed no repair and passed its schema."""
    tool_calls_executed_ok: int = 0
    """Calls that the tool answered without an error. A command that ended with a non-zero exit status or at its time
    limit counts, too, because its answer is data."""
    tool_calls_exec_error: int = 0
    """Calls that the tool answered with an error, bad arguments included."""
    usage: Usage = field(default_factory=Usage)
    tool_schemas: Sequence[Mapping[str, Any]] | None = None
    """The tools that the model was offered last, if the agent is a program with tools of its own; else None, which
    means the tools of the task."""
    program: Mapping[str, Any] | None = None
    """If the agent is a program, how the program ended: `exit_code`, `signal`, the end of its `output` and the number
    of `output_bytes`, the counts of the `requests` that it made, the `refusal` of the last request that was refused,
    the names of settings that were `overridden`, and the program's messages in ACP as `acp`."""

    def add_turn(self, answer: Message, *, started: float, reasoning: str | None = None, **about: Any) -> range:
        """Add an answer of the model to the conversation and to `turns`, and its tool calls to `calls`.

        Each call gets a tool message that says that the call was interrupted. `run_calls` replaces this message by the
        real answer. So the conversation is complete at any moment.

        Args:
            answer: the assistant's message in the OpenAI form; its content may be missing.
            started: when the answer was requested, in seconds since the epoch.
            reasoning: the model's reasoning, for `reasoning_per_turn`.
            about: other fields of the `TurnRecord`, such as `model`, `prompt_tokens` and `completion_tokens`.

        Returns:
            The indexes of the answer's tool calls in `calls`, for `run_calls`.
        """
        turn = TurnRecord(
            **{"message": len(self.messages), "model": self.model, "ended": time.time(), **about}, started=started
        )
        number, first = len(self.turns), len(self.calls)
        self.messages.append(answer if "content" in answer else {**answer, "content": ""})
        for call in answer.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            self.calls.append(CallRecord(number, len(self.messages), call["id"], name, arguments, error=_INTERRUPTED))
            interrupted = str(ToolAnswer.refusal(_INTERRUPTED))
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": interrupted})
        self.turns.append(turn)
        self.turns_used += 1
        self.reasoning_per_turn.append(reasoning)
        self.usage.add(Usage(1, turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens or 0, turn.cost))
        return range(first, len(self.calls))

    def stop(self, reason: StopReason) -> None:
        """Set the stop reason, and `finished_naturally` to match."""
        self.stop_reason = reason
        self.finished_naturally = reason is StopReason.FINISHED


Fill = Callable[[SlotCommands, str], Awaitable[None]]
"""Fills a new, empty directory. The arguments are the commands of the preparation user, and the directory's absolute
path."""


@dataclass(frozen=True)
class AgentSlot:
    """The slot of a rollout, for an agent that is a program in this slot."""

    commands: SlotCommands
    """The slot's commands, which run as the agent's user and start in the item's working directory."""
    prepare: Callable[[str, Fill], Awaitable[str]]
    """`await prepare(key, build)` returns the path of a directory that slots can read and not write. `build` fills the
    directory once per sandbox and key. The time that this takes does not count as the agent's."""


async def nothing_more() -> Message | None:
    """Return None: the user says nothing when the agent is done."""
    return None


@dataclass(frozen=True)
class AgentTask:
    """One task for an agent: a prompt, the tools, and a way to call them."""

    trajectory_id: str
    messages: list[Message]
    """The prompt. Agents never change this list or its messages."""
    tool_schemas: list[dict[str, Any]]
    """The tools in the OpenAI function form. Only these may be called."""
    tool_handler: ToolHandler
    solve: Callable[[], Awaitable[None]]
    """Apply the environment's reference solution in the agent's slot; raises if there is none."""
    cheat: Callable[[str], Awaitable[None]] | None = None
    """Do the environment's cheat of this name in the agent's slot; None if there are none."""
    parallel_safe: frozenset[str] = frozenset()
    """Tools whose calls within one turn may run at the same time."""
    seed_key: str | None = None
    """A key for sampling seeds, made of the item and the rollout's index, so that it is the same in every run. None
    means the trajectory id."""
    waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Use `async with task.waiting():` around each request to a model. The time in the block does not count as the
    agent's. It has a limit of its own, and `ModelError` is raised when this limit is exceeded."""
    follow_up: Callable[[], Awaitable[Message | None]] = nothing_more
    """Await `follow_up()` when the model is done. It returns the user's next message, with which the conversation goes
    on, or None at the end. It may check the work and take minutes, which do not count as the agent's time. An agent
    that never awaits it works only on the first part of its task."""
    mcp_tools: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The tools of MCP servers: for each server, a mapping from the server's name of a tool to the name that the tool
    has in `tool_schemas`."""
    skills: str | None = None
    """The directory in the slot that has the task's skills, for an agent that is a program in the slot."""
    slot: AgentSlot | None = None
    """The slot, for an agent that is a program in it; None if the rollout has no slot."""
    result: AgentResult = field(default_factory=AgentResult)
    """The result, which `run` fills and returns: this very object. So if `run` is cancelled or raises, the caller still
    has everything that was said and done before."""


@runtime_checkable
class Agent(Protocol):
    """Base class of agents. An agent works on a task with tool calls until it is done. One agent can run many tasks at
    the same time.

    It is made with an `AgentSettings`. A class with settings of its own names a subclass of `AgentSettings` as
    `config_class`.
    """

    name: str
    """The agent's name. An agent may have three more attributes: `version: str | None`, which the records name;
    `in_slot: bool`, which says that the agent is a program in the slot with tools of its own, so its rollouts always
    have a slot, but none of the run's tools; and `takes_mcp: bool`, which says that such a program gets the tools of
    MCP servers."""

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until done, and return `task.result`.

        Raises:
            ModelError: the endpoint failed; the error's `result` is `task.result`.
            InfraError, StaleSlotError: as the tool handler or `solve` raised them.
        """
        ...

    async def aclose(self) -> None:
        """Close what the agent holds open. Idempotent."""
        ...


@runtime_checkable
class CanCheckEndpoint(Protocol):
    """An agent whose model can be checked. A run checks the model before it makes its first sandbox."""

    async def check_endpoint(self) -> None:
        """Check that the model can be used.

        Raises:
            ModelError: the model can't be used.
        """
        ...


@runtime_checkable
class InstallableProgram(Protocol):
    """The program that agents run in their slots, as the attribute `program` of their factory. `hermes-rl agents` shows
    and fetches it, and `hermes-rl doctor` checks it."""

    @property
    def name(self) -> str:
        """Return the program's name."""
        ...

    @property
    def version(self) -> str | None:
        """Return the version that `fetch` fetches; None if it is not known."""
        ...

    def describe(self) -> Mapping[str, str | Sequence[str]]:
        """Return texts by topic that say how the program is fetched and run. Empty texts are not shown."""
        ...

    def check(self) -> Diagnosis:
        """Return whether the driver has the program, or could fetch it.

        Raises:
            ConfigError: this machine can't have such a program.
        """
        ...

    async def fetch(self, version: str | None = None) -> Path | None:
        """Fetch the program, unless the driver already has it. Return its folder on the driver; None for a program that
        is part of the sandbox, and so is never fetched.

        Args:
            version: the version to fetch; None is the version that the program names.

        Raises:
            ConfigError: the program can't be fetched.
        """
        ...

    async def check_slot(self, commands: SlotCommands) -> None:
        """Check that a slot has what the program needs.

        Raises:
            SetupFailed: something is missing.
        """
        ...


def is_in_slot(agent: Agent) -> bool:
    """Return whether an agent is a program in the slot."""
    return bool(getattr(agent, "in_slot", False))


def takes_mcp(agent: Agent) -> bool:
    """Return whether an agent can be given the tools of MCP servers."""
    return not is_in_slot(agent) or bool(getattr(agent, "takes_mcp", False))


class ModelChoice(BaseModel):
    """One of several models of a run. What is None here is as in the agent's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    weight: float = Field(default=1.0, gt=0)
    """How often it is drawn, compared with the others."""
    model: str | None = None
    """The model's name as the endpoint knows it. None is the choice's own name."""
    base_url: str | None = None
    """Its endpoint. The agent's `api_key` is not sent there."""
    api_key: SecretStr | None = None
    """The key of its endpoint."""
    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    extra_body: dict[str, Any] | None = None
    """More keys for the JSON body of each request, instead of the agent's."""

    @model_validator(mode="before")
    @classmethod
    def _only_a_weight(cls, value: Any) -> Any:
        return {"weight": value} if isinstance(value, int | float | str) else value


class AgentSettings(EndpointSettings):
    """Settings of an agent. Frozen; unknown keys are errors. `oracle` and `nop` use none of them.

    Agents subclass it to add settings of their own.
    """

    models: dict[str, ModelChoice] | None = None
    """Several models by name, instead of `model`: each rollout draws one, by its weight (`{"small": 3, "large": 1}`).
    The draw depends on `seed`, the item and the number of the rollout, so it is the same when a run is resumed."""
    max_turns: int = Field(default=30, ge=1)
    """Maximum number of model answers in one rollout."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature. None is the endpoint's default."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one answer. None is the endpoint's default."""
    extra_body: dict[str, Any] | None = None
    """More keys for the JSON body of each request, such as provider preferences and template arguments."""
    seed: int | None = None
    """Sampling seed. Each rollout sends a seed that is derived from this one and its task's `seed_key`."""
    cache_control: bool = False
    """Whether to mark in each request what the endpoint is to keep in its cache. Anthropic's models need it, for
    example behind OpenRouter; other endpoints may refuse such requests."""

    def each_model(self) -> dict[str, Self]:
        """Return the settings for each of `models`, by its name."""
        found = {}
        for name, choice in (self.models or {}).items():
            own = {key: value for key in choice.model_fields_set if (value := getattr(choice, key)) is not None}
            weightless = {key: value for key, value in own.items() if key != "weight"}
            elsewhere = {"api_key": None} if choice.base_url else {}
            found[name] = self.model_copy(update={"models": None, "model": name, **elsewhere, **weightless})
        return found


def find_retyped_settings(kind: type[AgentSettings]) -> list[str]:
    """Return the fields of `AgentSettings` to which this subclass gives another type. A type that only lacks None does
    not count as another."""
    return [
        name
        for name, field in AgentSettings.model_fields.items()
        if not _choices(kind.model_fields[name].annotation) <= _choices(field.annotation)
    ]


def _choices(annotation: Any) -> set[Any]:
    """Return the types of a union; for any other annotation, the annotation alone."""
    return set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}
