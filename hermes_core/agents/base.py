"""What an agent is: the task it is given, the settings it is made with, and the result that it leaves."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, SecretStr

Message = dict[str, Any]
"""One message of a chat in the OpenAI form; always has the keys `role` and `content`."""

ToolHandler = Callable[[str, Mapping[str, Any], str], Awaitable[str]]
"""`await handler(tool_name, arguments, task_id)` runs one tool call and gives what the model is told, as JSON text.

`InfraError`, `StaleSlotError` and cancellation end the rollout; whatever else it raises becomes a tool result.
"""


MASKED = -100
"""The mask of a token that the model did not write."""


def text_checksum(text: str, before: int = 0) -> int:
    """CRC-32 of a text that follows one with the checksum `before`.

    Spaces are left out: some tokenizers drop the one that a part of a text begins with.
    """
    return zlib.crc32(text.replace(" ", "").encode("utf-8", "surrogatepass"), before)


class StopReason(StrEnum):
    """Why an agent stopped."""

    FINISHED = "finished"
    """The model answered without calling a tool: it says that it is done."""
    MAX_TURNS = "max_turns"
    """The turns that it was allowed are used up."""
    LENGTH = "length"
    """The last answer was cut off at `max_tokens` and called no tool."""
    CONTEXT_LENGTH = "context_length"
    """The conversation no longer fits the model's context."""
    REFUSED = "refused"
    """The endpoint or the chat template took the prompt, and takes it no more with what was said since."""
    CONTENT_FILTER = "content_filter"
    """The endpoint withheld the answer."""
    EMPTY_RESPONSE = "empty_response"
    """The model said nothing and called nothing."""
    TIME_LIMIT = "time_limit"
    """The rollout's time was up. Set by whoever keeps that time, never by an agent."""
    MODEL_ERROR = "model_error"
    """The endpoint failed; `ModelError` was raised."""
    INTERRUPTED = "interrupted"
    """Not ended yet, or ended from outside: cancelled, or by an infrastructure failure."""


@dataclass(frozen=True)
class ToolError:
    """One tool call that could not be made, or whose tool said that it failed."""

    turn: int
    """The turn that made the call; the first is 1."""
    tool_name: str
    arguments: str
    """As the model wrote them."""
    error: str
    tool_result: str
    """What the model was told."""


@dataclass
class Usage:
    """Tokens as the endpoint counted them, summed over all requests; 0 where it does not count."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class AgentResult:
    """What an agent did. It grows while the agent runs and can be read at any moment.

    `messages` is always a conversation that an endpoint would take: a tool call that has not ended yet is already
    followed by a tool message, which says that it was interrupted until its real answer replaces that.
    """

    messages: list[Message] = field(default_factory=list)
    """The whole conversation, the prompt included."""
    managed_state: Mapping[str, Any] | None = None
    """The token-exact record that the server keeps of this conversation (`server.get_state()`), untouched; None when
    it keeps none. Nothing here is ever made up from text."""
    turns_used: int = 0
    """Answers that the model gave."""
    finished_naturally: bool = False
    """Whether the model itself ended the conversation (`StopReason.FINISHED`)."""
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    """The model's reasoning in each of its answers, None where it gave none."""
    tool_errors: list[ToolError] = field(default_factory=list)
    stop_reason: StopReason = StopReason.INTERRUPTED
    tool_calls_attempted: int = 0
    """Calls that the model made, well-formed or not."""
    tool_calls_schema_valid: int = 0
    """Calls of a tool that exists, whose arguments needed no repair and were not refused by its schema."""
    tool_calls_executed_ok: int = 0
    """Calls that the tool answered without an error. A command that exits non-zero counts: that is data."""
    tool_calls_exec_error: int = 0
    """Calls that the tool answered with an error, bad arguments included."""
    usage: Usage = field(default_factory=Usage)

    def stop(self, reason: StopReason) -> None:
        """Set the reason, and `finished_naturally` in accordance with it."""
        self.stop_reason = reason
        self.finished_naturally = reason is StopReason.FINISHED


@dataclass(frozen=True)
class AgentTask:
    """One task for an agent: a prompt, the tools, and a way to call them."""

    trajectory_id: str
    messages: list[Message]
    """The prompt. Agents never change this list or its messages."""
    tool_schemas: list[dict[str, Any]]
    """The tools in the OpenAI function form; their names are all that may be called."""
    tool_handler: ToolHandler
    solve: Callable[[], Awaitable[None]]
    """Apply the environment's reference solution in the agent's slot; raises where there is none."""
    parallel_safe: frozenset[str] = frozenset()
    """Tools whose calls within one turn may run at the same time."""
    seed_key: str | None = None
    """What tells this rollout from the others in every run alike (item and rollout index), for sampling seeds; the
    trajectory id if None."""
    waiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """`async with task.waiting():` around each request to a model: that time is not the agent's. It has a limit of its
    own, over which it raises `ModelError`."""
    result: AgentResult = field(default_factory=AgentResult)
    """The result in the making: `run` fills and returns this very object. So whoever cancels `run`, or gets an
    exception from it, still holds what was said and done so far."""


@runtime_checkable
class Agent(Protocol):
    """Turns a prompt into tool calls until done. One agent runs many tasks, at the same time as well.

    It is made with an `AgentSettings`. A class with settings of its own names a subclass of that as `config_class`.
    """

    name: str

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until done, and return `task.result`.

        Raises:
            ModelError: the endpoint failed; its `result` is `task.result`.
            InfraError, StaleSlotError: as the tool handler or `solve` raised them.
        """
        ...

    async def aclose(self) -> None:
        """Close what the agent holds open. Idempotent."""
        ...


class AgentSettings(BaseModel):
    """How an agent is to work. Frozen; unknown keys are errors. `oracle` and `nop` need none of it.

    Agents subclass it to add settings of their own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    """The model's name as the endpoint knows it."""
    base_url: str | None = None
    """The OpenAI-compatible endpoint, which usually ends in `/v1`. None is OpenAI's own."""
    api_key: SecretStr | None = None
    """The endpoint's key. None is for an endpoint that needs none."""
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
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds for one request, from the first byte sent to the last byte received."""
    endpoint_patience_s: float = Field(default=300.0, ge=0)
    """Seconds for which requests to a failing endpoint are repeated, from the first failure on. Then the run ends."""
    max_retries: int | None = Field(default=None, ge=0)
    """Maximum number of retries of one request after a temporary failure. None retries for `endpoint_patience_s`."""
    max_retry_wait_s: float = Field(default=60.0, ge=0)
    """Maximum wait in seconds before a retry, whatever `Retry-After` says."""
    max_response_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Maximum size of one response in bytes."""
