"""The tool registry: tools, toolsets and distributions by name, and the only way to call a tool."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hermes_core.aio import exits_are_errors
from hermes_core.errors import (
    CommandError,
    ConfigError,
    ErrorKind,
    HermesError,
    InfraError,
    PluginError,
    PolicyError,
    StaleSlotError,
    ToolArgumentError,
    UnknownNameError,
)
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.base import CallContext, Tool, ToolOutcome
from hermes_core.tools.schema import function_schema, parse_arguments
from hermes_core.tools.toolsets import ALL, Distribution, Toolset
from hermes_core.validation import words

logger = logging.getLogger(__name__)

DRIVER_TIMEOUT_S = 180.0
"""Time limit in seconds of a driver tool if neither the tool nor its caller sets one."""

_Named = TypeVar("_Named", Tool, Toolset, Distribution)


class ToolRegistry:
    """Tools, toolsets and distributions, in the order in which they were added.

    Args:
        explain: called with a kind (`tool`, `toolset` or `distribution`) and a name that is missing. Returns an error
            if the reason is known (two plugins claim the name, or the plugin is broken), else None.
    """

    def __init__(self, explain: Callable[[str, str], HermesError | None] | None = None) -> None:
        self._explain = explain
        self._tools: dict[str, Tool] = {}
        self._toolsets: dict[str, Toolset] = {}
        self._distributions: dict[str, Distribution] = {}

    def add(self, tool: Tool) -> None:
        """Add a tool.

        Raises:
            PluginError: another tool has this name.
        """
        _add("tool", self._tools, tool)

    def add_toolset(
        self, name: str, tools: str | Iterable[str] = (), includes: str | Iterable[str] = (), *, summary: str = ""
    ) -> None:
        """Add a named group of tools, which can include other groups. Names of members are looked up only when the
        group is used.

        Raises:
            PluginError: another toolset has this name.
            ConfigError: the name is reserved.
        """
        _add("toolset", self._toolsets, Toolset(name, words(tools), words(includes), summary))

    def add_distribution(self, name: str, percent: Mapping[str, float], *, summary: str = "") -> None:
        """Add a weighted choice of toolsets. Each toolset is drawn independently, with its probability in percent.

        Raises:
            PluginError: another distribution has this name.
            ConfigError: a probability is not within 0 to 100, or all are 0.
        """
        _add("distribution", self._distributions, Distribution(name, dict(percent), summary))

    def with_toolsets(self, names: Iterable[str]) -> ToolRegistry:
        """Return a copy that also has these toolsets. New toolsets are empty."""
        copy = ToolRegistry(self._explain)
        copy._tools, copy._distributions = dict(self._tools), dict(self._distributions)
        copy._toolsets = {**{name: Toolset(name) for name in names}, **self._toolsets}
        return copy

    def get(self, name: str) -> Tool:
        """Return the tool with this name.

        Raises:
            UnknownNameError: there is no such tool.
            PluginError: two plugins claim this name.
        """
        try:
            return self._tools[name]
        except KeyError:
            raise self.missing("tool", name, self._tools) from None

    def missing(self, what: str, name: str, known: Iterable[str], *, where: str = "") -> HermesError:
        """Return the error for a missing tool, toolset or distribution; `where` names the place that asked for it."""
        return self._reason(what, name) or UnknownNameError(what, name, known, where=where)

    def _reason(self, what: str, name: str) -> HermesError | None:
        return self._explain(what, name) if self._explain is not None else None

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def names(self) -> list[str]:
        """Return the names of all tools."""
        return list(self._tools)

    @property
    def toolsets(self) -> Mapping[str, Toolset]:
        """Return all toolsets, including those that only tools name and that were never added."""
        named = {name for tool in self._tools.values() for name in tool.toolsets}
        known = {**{name: Toolset(name) for name in sorted(named)}, **self._toolsets}
        return {name: toolset for name, toolset in known.items() if self._reason("toolset", name) is None}

    @property
    def distributions(self) -> Mapping[str, Distribution]:
        """Return all distributions."""
        return dict(self._distributions)

    def schemas(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Return the function schemas of these tools (all, if None), for a chat completion request.

        Raises:
            UnknownNameError: one of the tools does not exist.
        """
        return [function_schema(self.get(name)) for name in (self.names() if names is None else names)]

    async def call(self, tool: Tool, ctx: CallContext, args: Mapping[str, Any] | str) -> ExecutionResult:
        """Call a tool. Errors of the tool or the caller become an answer to the model, in the result.

        Raises:
            InfraError: the sandbox, or the connection to it, failed.
            StaleSlotError: the slot's lease has ended.
        """
        result = await _run(tool, ctx, args)
        if ctx.slot is not None and not result.slot_id:
            result = replace(result, slot_id=ctx.slot.slot_id)
        return result


def _add(what: str, known: dict[str, _Named], new: _Named) -> None:
    if new.name in known:
        raise PluginError(f"{what} {new.name!r} is registered twice", hint="give one of them another name")
    known[new.name] = new


async def _run(tool: Tool, ctx: CallContext, args: Mapping[str, Any] | str) -> ExecutionResult:
    limit: float | None = None  # the caller ends sandbox tools: a lost channel is not the tool's fault
    if tool.where == "driver":
        limit = tool.time_limit(ctx.timeout_s, DRIVER_TIMEOUT_S)
        ctx = replace(ctx, commands=None, slot=None, timeout_s=limit)
    else:
        ctx.require_commands()
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit):
            with exits_are_errors():
                outcome = await tool.handler(ctx, parse_arguments(tool, args))
        return _result(outcome)
    except (InfraError, StaleSlotError):
        raise
    except ToolArgumentError as error:
        return _failure(str(error), ErrorKind.COMMAND, invalid_arguments=True)
    except CommandError as error:
        return _failure(_message(error), ErrorKind.COMMAND, code=error.code)
    except PolicyError as error:
        return _failure(_message(error), ErrorKind.POLICY)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # This call was not cancelled, but something inside the tool. Passed on, the error would end the whole run.
        logger.exception("tool %s was cancelled from within in trajectory %s", tool.name, ctx.trajectory_id)
        return _failure(f"{tool.name} failed: it was cancelled from within", ErrorKind.COMMAND)
    except Exception as error:
        # A handler that keeps the limit itself raises this error, too. An earlier error has another cause.
        if isinstance(error, TimeoutError) and ctx.timeout_s and time.monotonic() - began >= 0.99 * ctx.timeout_s:
            logger.warning("tool %s was not done in time in trajectory %s", tool.name, ctx.trajectory_id)
            message = f"{tool.name} was not done within its time limit of {ctx.timeout_s:g} s"
            return _failure(message, ErrorKind.TIMEOUT, timed_out=True)
        logger.exception("tool %s failed in trajectory %s", tool.name, ctx.trajectory_id)
        return _failure(f"{tool.name} failed: {type(error).__name__}: {error}", ErrorKind.COMMAND)


def _result(outcome: ToolOutcome) -> ExecutionResult:
    if isinstance(outcome, str):
        return ExecutionResult(success=True, output=outcome)
    if isinstance(outcome, ExecutionResult):
        json.dumps(outcome.to_tool_result())  # raises now if the outcome is not JSON
        return outcome
    if not isinstance(outcome, Mapping):
        raise TypeError(f"its handler returned {outcome!r:.80}, and not a text or a mapping")
    text = json.dumps(outcome, ensure_ascii=False)
    error = outcome.get("error")
    kind = ErrorKind.COMMAND if error else None
    output = str(outcome["output"]) if "output" in outcome else text
    return ExecutionResult(not error, output, str(error or ""), error_kind=kind, answer=dict(outcome))


def _message(error: HermesError) -> str:
    """Return the error's message without ids of sandboxes, which mean nothing to a model."""
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _failure(error: str, kind: ErrorKind, **metadata: Any) -> ExecutionResult:
    return ExecutionResult(False, error=error, error_kind=kind, metadata=metadata, answer={"error": error})


def expand_toolset(registry: ToolRegistry, name: str) -> list[str]:
    """Return the tools of a toolset, each once. Tools of its `includes` come first.

    Raises:
        UnknownNameError: the toolset does not exist, or names a tool or toolset that does not exist.
        ConfigError: toolsets include each other in a circle; the message shows the circle.
    """
    return [*dict.fromkeys(tool for each in _with_included(registry, name, ()) for tool in _own_tools(registry, each))]


def _with_included(registry: ToolRegistry, name: str, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the toolsets that a toolset includes, at any depth, and then its own name."""
    if name in ALL:
        yield name
        return
    if name in path:
        circle = " -> ".join((*path[path.index(name) :], name))
        raise ConfigError(f"toolsets include each other in a circle: {circle}", hint="remove one of these `includes`")
    toolsets = registry.toolsets
    if name not in toolsets:
        where = f"(included by {path[-1]!r})" if path else ""
        raise registry.missing("toolset", name, [*toolsets, ALL[0]], where=where)
    for included in toolsets[name].includes:
        yield from _with_included(registry, included, (*path, name))
    yield name


def _own_tools(registry: ToolRegistry, name: str) -> Iterator[str]:
    """Yield the names of a toolset's tools, without those of its `includes`."""
    if name in ALL:
        yield from registry.names()
        return
    for tool in registry.toolsets[name].tools:
        if tool not in registry:
            raise registry.missing("tool", tool, registry.names(), where=f"(of toolset {name!r})")
        yield tool
    yield from (tool for tool in registry.names() if name in registry.get(tool).toolsets)


def resolve_tools(
    registry: ToolRegistry,
    enabled_toolsets: Sequence[str] | None = None,
    disabled_toolsets: Sequence[str] | None = None,
    distribution: str | None = None,
    seed: int | str = 0,
) -> list[str]:
    """Return the names of the tools that a rollout's model may call, in the registry's order.

    Args:
        enabled_toolsets: the toolsets to load; an empty list loads no tools. If both this and `distribution` are None,
            all tools are loaded and a warning is logged.
        disabled_toolsets: toolsets whose tools are left out, even if other toolsets contain them.
        distribution: draw the toolsets from this distribution instead of naming them.
        seed: seed of the draw. Different seeds give rollouts different choices.

    Raises:
        ConfigError: both toolsets and a distribution were named, or toolsets form a circle.
        UnknownNameError: a toolset or the distribution does not exist.
    """
    if enabled_toolsets is not None and distribution is not None:
        message = (
            f"both toolsets ({', '.join(enabled_toolsets) or 'none'}) and the distribution {distribution!r} were named"
        )
        raise ConfigError(message, hint="name toolsets or a distribution, not both")
    left_out = _tools_of(registry, disabled_toolsets or ())
    if enabled_toolsets is None and distribution is None:
        enabled_toolsets = ("all",)
        logger.warning("no toolsets and no distribution were named: all %d tools are loaded", len(registry.names()))
    enabled = _tools_of(registry, _choose_toolsets(registry, enabled_toolsets, distribution, seed))
    return [tool for tool in registry.names() if tool in enabled and tool not in left_out]


def resolve_servers(
    registry: ToolRegistry,
    servers: Iterable[str],
    *,
    enabled_toolsets: Sequence[str] | None = None,
    disabled_toolsets: Sequence[str] | None = None,
    distribution: str | None = None,
    seed: int | str = 0,
) -> list[str]:
    """Return the MCP servers whose tools a rollout's model may call. A server has a toolset with its own name, and may
    be called if that toolset is chosen. For the arguments and errors, see `resolve_tools`.
    """
    chosen = _choose_toolsets(registry, enabled_toolsets, distribution, seed)
    enabled, left_out = (
        {each for name in names for each in _with_included(registry, name, ())}
        for names in (chosen, disabled_toolsets or ())
    )
    return [name for name in servers if enabled & {name, *ALL} and not left_out & {name, *ALL}]


def _choose_toolsets(
    registry: ToolRegistry, enabled_toolsets: Sequence[str] | None, distribution: str | None, seed: int | str
) -> Sequence[str]:
    """Return the toolsets that are named, or drawn from the distribution."""
    if distribution is None:
        return enabled_toolsets or ()
    if distribution not in registry.distributions:
        raise registry.missing("distribution", distribution, registry.distributions)
    return registry.distributions[distribution].sample(seed)


def _tools_of(registry: ToolRegistry, toolsets: Iterable[str]) -> set[str]:
    return {tool for toolset in toolsets for tool in expand_toolset(registry, toolset)}
