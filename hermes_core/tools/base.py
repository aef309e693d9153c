"""The type of a tool: its name, parameters and handler, and the context that each call gets."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Le
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from hermes_core.errors import ConfigError, UsageError
from hermes_core.sandbox.commands import ExecutionResult, Slot, SlotCommands
from hermes_core.tools.json_schema import check_schema
from hermes_core.tools.toolsets import ALL
from hermes_core.validation import words

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The pattern of function names that model endpoints accept."""


class ToolParams(BaseModel):
    """Base class for the parameters of core's tools. Unknown arguments are errors. The model reads each
    `Field(description=…)`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _at_most(cls, value: Any, info: ValidationInfo) -> Any:
        """Lower a number above its maximum to the maximum."""
        limits: list[Any] = [
            limit.le for limit in cls.model_fields[str(info.field_name)].metadata if isinstance(limit, Le)
        ]
        return min(value, *limits) if limits and type(value) is int else value


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
"""Text that can be written as UTF-8: without single halves of surrogate pairs, which JSON can carry."""

CommandText = Annotated[Text, AfterValidator(_without_nul)]
"""Text without NUL bytes, for a command, an argument or a path."""


_HOME = "hermes.home"


@dataclass(frozen=True)
class CallContext:
    """The context of a call, for the tool's handler.

    Handlers must end within `timeout_s`. The caller may cancel a handler that runs a few seconds longer.
    """

    trajectory_id: str | None = None
    timeout_s: float | None = None
    """The caller's time limit for this call, in seconds. A model may ask for a shorter limit, but not for a longer one.
    None is no limit."""
    commands: SlotCommands | None = None
    """The commands of the slot; None for tools that run in the driver."""
    slot: Slot | None = None
    watch: Callable[[str, float], float] | None = None
    """`watch(process_id, interval_s)` begins to deliver updates on a background process to all subscribers, and returns
    the actual interval in seconds. None if updates can't be delivered."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that the tools keep for this trajectory, from call to call, until the lease ends."""

    async def path(self, path: str) -> str:
        """Return a path in the slot with `~` replaced by the slot's home directory."""
        if path.partition("/")[0] != "~":
            return path
        if _HOME not in self.state:
            result = await self.require_commands().run(["sh", "-c", 'printf %s "$HOME"'], timeout_s=self.timeout_s)
            self.state[_HOME] = result.text
        return f"{self.state[_HOME]}{path[1:]}"

    def require_commands(self) -> SlotCommands:
        """Return the slot's commands.

        Raises:
            UsageError: the call was made without a slot.
        """
        if self.commands is None:
            raise UsageError(
                "this tool runs in a slot and was called without one", hint="call it through a tool backend"
            )
        return self.commands


ToolOutcome = ExecutionResult | Mapping[str, Any] | str
"""The types that a handler may return: a full result, a mapping with the answer to the model, or the output as text."""

ToolHandlerFunction = Callable[[CallContext, Any], Awaitable[ToolOutcome]]
"""A handler. It takes the context and the validated arguments: an instance of `params` if this is a pydantic model, a
dict if it is a schema."""


@dataclass(frozen=True)
class Tool:
    """A tool that the model can call. `function_tool` makes one from a function.

    Raises:
        ConfigError: a field has an invalid value; the error says what to change.
    """

    name: str
    params: type[BaseModel] | Mapping[str, Any]
    """The parameters: a pydantic model, or a JSON schema of type `object`."""
    handler: ToolHandlerFunction
    description: str
    where: Literal["sandbox", "driver"] = "sandbox"
    """Where the handler runs. `sandbox` handlers get the slot's commands; `driver` handlers run in the driver's process
    without them."""
    toolsets: tuple[str, ...] = ()
    """The toolsets that the tool joins. A toolset that does not exist yet is created."""
    parallel_safe: bool = False
    """Whether calls of this tool may run at the same time as other parallel-safe calls of the same turn."""
    timeout_s: float | None = None
    """Time limit of a call in seconds; the caller may set a shorter one. None is the caller's limit, or else the
    default: 180 for `driver` tools, the profile's `execution_timeout_s` for others. A `driver` tool is cancelled at its
    limit. A `sandbox` tool passes the limit to its commands as `ctx.timeout_s`, and is cancelled some time later,
    because its channel may be lost for a while."""
    checks_arguments: bool = True
    """Whether arguments are checked against `params` before the handler gets them, if that is a JSON schema. Set it to
    False for a schema of unknown origin: a check by it may take for ever."""
    requires: tuple[str, ...] = ()
    """What the tool needs to work, in words, for listings: an environment variable, a program."""

    def __post_init__(self) -> None:
        for several in ("toolsets", "requires"):
            object.__setattr__(self, several, words(getattr(self, several)))
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} can't be a tool's name", hint="use 1 to 64 letters, digits, '_' or '-'")
        if not isinstance(self.description, str) or not self.description.strip():
            raise ConfigError(f"tool {self.name!r} has no description", hint="write one: models choose tools by it")
        if self.where not in ("sandbox", "driver"):
            message = f"tool {self.name!r} has where={self.where!r}"
            raise ConfigError(message, hint="use 'sandbox', or 'driver' for a tool without access to the slot")
        if reserved := [name for name in self.toolsets if name in ALL]:
            message = (
                f"tool {self.name!r} joins the toolset {reserved[0]!r}, whose name is reserved: it means every tool"
            )
            raise ConfigError(message, hint="choose another name")
        limit = self.timeout_s
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf
        ):
            message = f"tool {self.name!r} has a time limit of {limit!r} seconds"
            raise ConfigError(message, hint="use a positive number, or None for the default")
        _check_handler(self.name, self.handler)
        _check_params(self.name, self.params)

    def time_limit(self, given: float | None, default: float) -> float:
        """Return the time limit of a call in seconds: the shorter one of the tool's limit and the caller's limit
        `given`, or the default if there is neither."""
        return min((limit for limit in (self.timeout_s, given) if limit is not None), default=default)


def _check_handler(tool: str, handler: Any) -> None:
    what = f"the handler of tool {tool!r}"
    if not callable(handler):
        raise ConfigError(f"{what} is {handler!r}, which can't be called", hint="give an async function")
    if not any(map(inspect.iscoroutinefunction, (handler, inspect.unwrap(handler), type(handler).__call__))):
        hint = "write `async def`; function_tool(function) makes a tool of a plain function"
        raise ConfigError(f"{what} is not async", hint=hint)
    try:
        inspect.signature(handler).bind(None, None)
    except TypeError as error:
        hint = "let it take the context and the arguments: `async def handler(ctx, params)`"
        raise ConfigError(f"{what} can't be called with two arguments: {error}", hint=hint) from error


def _check_params(tool: str, params: Any) -> None:
    if isinstance(params, Mapping):
        if wrapped := _find_wrapped_schema(params):
            message = f"the parameters of tool {tool!r} are the definition of a whole tool"
            raise ConfigError(message, hint=f"pass its {wrapped}")
        check_schema(tool, params)
    elif not (isinstance(params, type) and issubclass(params, BaseModel)):
        message = f"the parameters of tool {tool!r} are {params!r}"
        raise ConfigError(message, hint="give a pydantic class, or a JSON schema of type object")


def _find_wrapped_schema(params: Mapping[str, Any]) -> str:
    """If `params` is a whole tool in the form of OpenAI's or Anthropic's API, return the key with the schema; else an
    empty text."""
    if isinstance(params.get("function"), Mapping):
        return '`parameters`, here `["function"]["parameters"]`'
    if params.get("type") == "function" or ("name" in params and "parameters" in params):
        return "`parameters`"
    return "`input_schema`" if "input_schema" in params else ""
