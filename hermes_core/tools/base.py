"""What a tool is: its name, its parameters, its handler, and the context that each call gets."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from hermes_core.errors import ConfigError, UsageError
from hermes_core.sandbox.commands import ExecutionResult, Slot, SlotCommands
from hermes_core.tools.json_schema import check_schema
from hermes_core.validation import words

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What model endpoints accept as a function's name."""


class ToolParams(BaseModel):
    """Base of our tools' parameters: unknown arguments are errors; the model reads each `Field(description=…)`."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} is half of a surrogate pair, which UTF-8 can't carry") from None
    return text


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0)) + 1} is a NUL byte, which commands and paths can't carry")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text that can be written as UTF-8 (JSON can carry halves of surrogate pairs, which can't)."""

CommandText = Annotated[Text, AfterValidator(_without_nul)]
"""Text that ends up as a command, an argument or a path: no NUL bytes."""


@dataclass(frozen=True)
class CallContext:
    """What a handler knows about its call.

    Handlers keep their own work within `timeout_s`; whoever calls them may cancel them some seconds later.
    """

    trajectory_id: str | None = None
    timeout_s: float | None = None
    """The caller's time limit for this call, in seconds; a model may ask for less, not for more. None is no limit."""
    commands: SlotCommands | None = None
    """What can be done in the slot; None for tools that run in the driver."""
    slot: Slot | None = None
    watch: Callable[[str, float], float] | None = None
    """`watch(process_id, interval_s)` has updates of a background process delivered to whoever subscribed; the interval
    in seconds that holds. None where nobody can."""
    state: dict[str, Any] = field(default_factory=dict)
    """The tools' own memory of this trajectory: kept from call to call, as long as the lease lives."""

    def require_commands(self) -> SlotCommands:
        """The slot's commands.

        Raises:
            UsageError: the call was made without a slot.
        """
        if self.commands is None:
            raise UsageError(
                "this tool runs in a slot and was called without one", hint="call it through a tool backend"
            )
        return self.commands


ToolOutcome = ExecutionResult | Mapping[str, Any] | str
"""What a handler may return: a full result, the answer to the model as a mapping, or just its output as text."""

ToolHandlerFunction = Callable[[CallContext, Any], Awaitable[ToolOutcome]]
"""Takes the context and the validated arguments: an instance of the model, or a dict where `params` is a schema."""


@dataclass(frozen=True)
class Tool:
    """Something that the model can call. `function_tool` makes one of a function.

    Raises:
        ConfigError: the name is not one that model endpoints accept, the schema is not valid, or the time limit is no
            positive number.
    """

    name: str
    params: type[BaseModel] | Mapping[str, Any]
    """What it takes: a pydantic model, or a JSON schema of type `object`."""
    handler: ToolHandlerFunction
    description: str
    where: Literal["sandbox", "driver"] = "sandbox"
    """`sandbox` handlers get the slot's commands; `driver` ones run in our process and never do."""
    toolsets: tuple[str, ...] = ()
    """The toolsets that it joins; one that does not exist yet is made."""
    parallel_safe: bool = False
    """Whether calls of one turn may run at the same time as others that are parallel-safe."""
    timeout_s: float | None = None
    """Seconds that a call may take, unless the caller allows less; None is the caller's limit, or the default: 180 for
    `driver` tools, the profile's `execution_timeout_s` for others. A `driver` tool is cut off then. A `sandbox` tool
    gives the limit to its commands, as `ctx.timeout_s`, and is cut off some time later, as its channel may be lost for
    a while."""
    requires: tuple[str, ...] = ()
    """What it needs to work, in words, for listings: an environment variable, a program."""

    def __post_init__(self) -> None:
        for several in ("toolsets", "requires"):
            object.__setattr__(self, several, words(getattr(self, several)))
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} can't be a tool's name", hint="use 1 to 64 letters, digits, '_' or '-'")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            message = f"tool {self.name!r} has a time limit of {self.timeout_s!r} seconds"
            raise ConfigError(message, hint="use a positive number, or None for the default")
        if isinstance(self.params, Mapping):
            check_schema(self.name, self.params)

    def time_limit(self, given: float | None, default: float) -> float:
        """The seconds that a call may take: the shorter one of its own limit and the caller's, or the default."""
        return min((limit for limit in (self.timeout_s, given) if limit is not None), default=default)
