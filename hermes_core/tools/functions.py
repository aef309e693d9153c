"""Makes tools from ordinary functions: parameters from the type hints, descriptions from the docstring."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from hermes_core.errors import ConfigError
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.base import CallContext, Tool, ToolHandlerFunction, ToolOutcome
from hermes_core.tools.schema import parameters_schema
from hermes_core.validation import words
from hermes_core.workers import Workers

PLAIN_CALLS = 32
"""Maximum number of calls of one plain (not `async`) function at the same time. Each call takes a thread."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+\S.*(?:\n|$)|[ \t]*\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")


def function_tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    where: Literal["sandbox", "driver"] | None = None,
    toolsets: str | Iterable[str] = (),
    parallel_safe: bool = False,
    timeout_s: float | None = None,
    requires: str | Iterable[str] = (),
) -> Tool:
    """Make a tool from a function.

        async def count_words(ctx: CallContext, path: str) -> int:
            \"\"\"Count the words of a text file.

            Args:
                path: The file, relative to the workspace.
            \"\"\"

    The model sees every parameter, except a first parameter of type `CallContext` (or called `ctx`), which gets the
    call's context. All types that pydantic knows are allowed, such as `Annotated[int, Field(ge=1, description="…")]`.
    The docstring describes the tool; its section `Args:` describes parameters without a description in their types.

    A plain function runs in a thread, and can only be a tool of the driver. The return value is the answer to the
    model: a text, a mapping, an `ExecutionResult`, or any other JSON value.

    Args:
        name: None is the function's name.
        description: None is the docstring.
        where: None is `sandbox` for a function that takes the context, and `driver` for any other.
        toolsets: toolsets that the tool joins.
        parallel_safe: see `Tool`.
        timeout_s: see `Tool`.
        requires: see `Tool`.

    Raises:
        ConfigError: the function can't be a tool; the error says what is missing.
    """
    if not inspect.isroutine(function):
        raise ConfigError(f"{function!r} is not a function", hint="give a function or a method")
    name = name or function.__name__
    explained, arguments = _parse_docstring(function)
    takes_context, params = _parameters(name, function, arguments)
    is_async = inspect.iscoroutinefunction(function)
    where = where or ("sandbox" if takes_context else "driver")
    if where == "sandbox" and not takes_context:
        hint = "make `ctx: CallContext` its first parameter, or say where='driver'"
        raise _unfit(name, "runs in a slot, and does not take the call's context", hint)
    if where == "sandbox" and not is_async:
        raise _unfit(name, "runs in a slot, and is not async", "write `async def`, or say where='driver'")
    if not (description or explained).strip():
        raise _unfit(name, "has no description", "write a docstring: models choose tools by it")
    return Tool(
        name=name,
        params=params,
        handler=_handler(function, takes_context=takes_context, is_async=is_async),
        description=description or explained,
        where=where,
        toolsets=words(toolsets),
        parallel_safe=parallel_safe,
        timeout_s=timeout_s,
        requires=words(requires),
    )


def _unfit(name: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"the function of tool {name!r} {problem}", hint=hint)


def _parameters(name: str, function: Callable[..., Any], described: Mapping[str, str]) -> tuple[bool, type[BaseModel]]:
    """Return whether the function takes the context, and a pydantic model of its other parameters."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        hint = "types have to be importable when the tool is defined, so not below `if TYPE_CHECKING`"
        raise _unfit(name, f"has a type that can't be resolved: {error}", hint) from error
    parameters = list(inspect.signature(function).parameters.values())
    takes_context = bool(parameters) and _is_context(parameters[0], hints)
    own = parameters[1:] if takes_context else parameters
    for parameter in own:
        _check_parameter(name, parameter, hints)
    if unknown := described.keys() - {parameter.name for parameter in parameters}:
        hint = "the section `Args:` of a docstring names only parameters"
        raise _unfit(name, f"describes {sorted(unknown)[0]!r}, which it does not take", hint)
    # The fields have other names than the parameters, which could clash with methods of pydantic's models.
    fields: dict[str, Any] = {
        f"{each.name}_": (hints[each.name], _field(each, hints[each.name], described.get(each.name))) for each in own
    }
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
        parameters_schema(model)
    except (PydanticUserError, TypeError, ValueError) as error:
        hint = "use str, int, float, bool, list, dict, Literal, an enum, a dataclass or a pydantic class"
        raise _unfit(
            name, f"takes what JSON can't describe: {_find_indescribable(own, hints) or error}", hint
        ) from error
    for parameter in own:
        _check_default(name, parameter, hints[parameter.name])
    return takes_context, model


def _find_indescribable(parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any]) -> str:
    """Return a text with the first parameter whose type JSON can't describe, and this type; empty if there is none."""
    for parameter in parameters:
        try:
            TypeAdapter(hints[parameter.name]).json_schema()
        except (PydanticUserError, TypeError, ValueError):
            return f"parameter {parameter.name!r} of type {inspect.formatannotation(hints[parameter.name])}"
    return ""


def _check_default(name: str, parameter: inspect.Parameter, hint: Any) -> None:
    if parameter.default is parameter.empty:
        return
    try:
        TypeAdapter(hint).validate_python(parameter.default)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        problem = (
            f"has the default {parameter.default!r} for parameter {parameter.name!r}, which does not fit: {message}"
        )
        advice = "write `TYPE | None = None`" if parameter.default is None else "use a default of the parameter's type"
        raise _unfit(name, problem, advice) from error


def _is_context(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    return hints.get(parameter.name, CallContext if parameter.name == "ctx" else None) is CallContext


def _check_parameter(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    what = f"parameter {parameter.name!r}"
    if parameter.kind not in _NAMED or parameter.name.startswith("_"):
        raise _unfit(name, f"has {what}, which can't be given by name", "use named parameters, without `*` and `/`")
    if parameter.name not in hints:
        raise _unfit(name, f"has {what} without a type", f"write `{parameter.name}: str`, or another type")
    if hints[parameter.name] is CallContext:
        raise _unfit(name, f"takes the context as {what}", "make it the first parameter")
    if isinstance(parameter.default, FieldInfo):
        raise _unfit(name, f"has a Field as the default of {what}", "write `Annotated[TYPE, Field(…)] = DEFAULT`")


def _field(parameter: inspect.Parameter, hint: Any, described: str | None) -> Any:
    options: dict[str, Any] = {"alias": parameter.name}
    if described and FieldInfo.from_annotation(hint).description is None:
        options["description"] = described
    return Field(... if parameter.default is parameter.empty else parameter.default, **options)


def _handler(function: Callable[..., Any], *, takes_context: bool, is_async: bool) -> ToolHandlerFunction:
    workers = None if is_async else Workers(PLAIN_CALLS)

    async def handler(ctx: CallContext, params: BaseModel) -> ToolOutcome:
        arguments = {field.removesuffix("_"): getattr(params, field) for field in type(params).model_fields}
        call = functools.partial(function, *((ctx,) if takes_context else ()), **arguments)
        if workers is None:
            return _outcome(await call())
        loop = asyncio.get_running_loop()
        return _outcome(await loop.run_in_executor(workers, contextvars.copy_context().run, call))

    return handler


def _outcome(value: Any) -> ToolOutcome:
    """Turn a function's return value into the outcome of a tool. A value of any other type becomes JSON text."""
    if isinstance(value, str | ExecutionResult):
        return value
    plain = to_jsonable_python(value)
    return plain if isinstance(plain, dict) else json.dumps(plain, ensure_ascii=False)


def _parse_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the docstring without its section `Args:`, and the parameters' descriptions from this section."""
    text = inspect.getdoc(function) or ""
    section = _ARGUMENTS.search(text)
    if section is None:
        return text.strip(), {}
    rest = f"{text[: section.start()].rstrip()}\n\n{text[section.end() :].lstrip()}".strip()
    return rest, _arguments(section[1].splitlines())


def _arguments(lines: Sequence[str]) -> dict[str, str]:
    lines = [line for line in lines if line.strip()]
    margin = len(lines[0]) - len(lines[0].lstrip())
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        begun = _ARGUMENT.fullmatch(line.strip()) if len(line) - len(line.lstrip()) <= margin else None
        if begun is not None:
            name, found[begun[1]] = begun[1], begun[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
