"""Settings on the command line: options that are made from a configuration class, and `--env.KEY=VALUE`."""

from __future__ import annotations

import collections.abc
import json
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from hermes_core.errors import ConfigError, UnknownNameError, UsageError

SECTIONS = ("env", "backend", "agent")
"""The sections that `--SECTION.KEY=VALUE` can name. The configuration file has these sections and `run`."""

Command = Callable[..., Any]

_DOTTED = "hermes_core.dotted"


class DottedCommand(click.Command):
    """A command that takes `--env.KEY=VALUE` (or `--env.KEY VALUE`) in addition to its own options.

    Args:
        sections: the members of `SECTIONS` that the command uses.
    """

    def __init__(self, *args: Any, sections: Sequence[str] = SECTIONS, **options: Any) -> None:
        *first, last = (f"--{section}.KEY=VALUE" for section in sections)
        epilog = f"Every other setting: {', '.join(first)} and {last}."
        super().__init__(*args, **{"epilog": epilog, **options})
        self.sections = tuple(sections)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the dotted options, and let click parse the other arguments."""
        rest, ctx.meta[_DOTTED] = split_dotted(args, self.sections)
        try:
            return super().parse_args(ctx, rest)
        except click.NoSuchOption as error:
            if error.option_name.startswith("--"):
                written = " or ".join(f"--{section}.{error.option_name[2:]}" for section in self.sections)
                message = f"{error.message.rstrip('.')}; if it is a setting, write {written}."
                raise click.NoSuchOption(error.option_name, message, error.possibilities, error.ctx) from error
            raise


class SettingOption(click.Option):
    """An option for one setting, with the setting's type, default and meaning.

    Args:
        declarations: the option's names, and the setting's name.
        model: the class that has the setting.
    """

    def __init__(self, declarations: Sequence[str], *, model: type[BaseModel], **attributes: Any) -> None:
        kinds = set(_kinds(model.model_fields[declarations[-1]].annotation))
        kind = next((kind for kind in (int, float, str) if kind in kinds), None)
        form: dict[str, Any] = {"is_flag": True} if bool in kinds else {"type": kind, "multiple": tuple in kinds}
        super().__init__(declarations, **{"default": None, **form, **attributes})  # None: not given here
        self.model = model

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the help. The help is read from the source of the class, and only for `--help`."""
        from hermes_core.cli.settings_table import help_text

        assert self.name is not None
        self.help = help_text(self.model, self.name) + (" Can be given more than once." if self.multiple else "")
        return super().get_help_record(ctx)


def setting_option(
    model: type[BaseModel], setting: str, *names: str, **attributes: Any
) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for a setting. Unless `names` are given, `some_setting` gets the option
    `--some-setting`.

    Args:
        attributes: arguments of `click.option`, such as `metavar`. Type, default and help come from the setting.
    """
    written = names or (f"--{setting.replace('_', '-')}",)
    return click.option(*written, setting, cls=SettingOption, model=model, **attributes)


def collect_settings(ctx: click.Context, model: type[BaseModel]) -> dict[str, Any]:
    """Return the settings of this class, or of a subclass, that were given by a `SettingOption`."""
    options = [option for option in ctx.command.params if isinstance(option, SettingOption)]
    names = [str(option.name) for option in options if issubclass(option.model, model)]
    return {name: ctx.params[name] for name in names if ctx.params.get(name) not in (None, ())}


Written = Mapping[str, str | None]
"""The dotted options of a section: maps keys to values as written, or to None where no value was written."""


def find_dotted_options(ctx: click.Context, section: str) -> Written:
    """Return the dotted options of one section."""
    found: Mapping[str, Written] = ctx.meta[_DOTTED]
    return found.get(section, {})


def split_dotted(
    args: Sequence[str], sections: Sequence[str] = SECTIONS
) -> tuple[list[str], dict[str, dict[str, str | None]]]:
    """Return the arguments without the dotted options, and the dotted options by section.

    Raises:
        UnknownNameError: there is no such section.
        UsageError: an option has no key.
    """
    rest: list[str] = []
    found: dict[str, dict[str, str | None]] = {}
    waiting = list(args)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        section, dot, key = option.removeprefix("--").partition(".")
        if argument == "--":
            rest += [argument, *waiting]
            break
        if not option.startswith("--") or not dot:
            rest.append(argument)
            continue
        if section not in sections:
            raise UnknownNameError("section of options", section, sections)
        if not key:
            raise UsageError(f"{argument!r} has no key", hint=f"write --{section}.KEY=VALUE")
        option_value: str | None = value
        if not equals:
            option_value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else None
        found.setdefault(section, {})[key.replace("-", "_")] = option_value
    return rest, found


def read_config(
    path: Path | None, known: Sequence[str] = (*SECTIONS, "run"), *, lists: Collection[str] = ()
) -> dict[str, Any]:
    """Return the sections of a configuration file by name. A section that the file does not have is an empty mapping.

    Args:
        known: the sections that the file can have.
        lists: the sections that can also be a list of mappings.

    Raises:
        UnknownNameError: the file has a section that is not in `known`.
        ConfigError: the file can't be read, or a section is neither a mapping nor an allowed list.
    """
    from hermes_core.settings import read_mapping

    sections: dict[str, Any] = {section: {} for section in known}
    for name, content in (read_mapping(path) if path is not None else {}).items():
        if name not in sections:
            raise UnknownNameError("section", name, sections, where=f"of {path}")
        if isinstance(content, str) and name in ("agent", "backend"):
            sections[name] = {"name": content}
        elif isinstance(content, Mapping):
            sections[name] = dict(content)
        elif name in lists and isinstance(content, list) and all(isinstance(each, Mapping) for each in content):
            sections[name] = content
        else:
            form = "mapping, or list of mappings" if name in lists else "mapping"
            raise ConfigError(f"section {name!r} of {path} is not a {form}", hint="write `key: value` lines below it")
    return sections


def merge_options(config: Mapping[str, Any], written: Written, model: type[BaseModel]) -> dict[str, Any]:
    """Return a section of the file, overridden by the command line's options. Each option's text is converted to the
    type that `model` declares for its key.

    `a.b` sets key `b` of the mapping `a`. A switch without a value is on. Unknown keys are left as they are, for the
    model's own check to refuse.

    Raises:
        UsageError: an option that is not a switch has no value.
    """
    values: dict[str, Any] = dict(config)
    for path, value in written.items():
        key, *inner = path.split(".")
        text = _value_of(path, value, model)
        if not inner:
            field = model.model_fields.get(key)
            values[key] = text if field is None else read_value(text, field.annotation)
            continue
        place = values[key] = dict(values[key]) if isinstance(values.get(key), Mapping) else {}
        for part in inner[:-1]:
            place[part] = dict(place[part]) if isinstance(place.get(part), Mapping) else {}
            place = place[part]
        place[inner[-1]] = text
    return values


def _value_of(path: str, given: str | None, model: type[BaseModel]) -> str:
    field = model.model_fields.get(path)
    if given is None and field is not None and bool not in _kinds(field.annotation):
        raise UsageError(f"the option for {path!r} has no value", hint=f"write --SECTION.{path}=VALUE")
    return "true" if given is None else given


def read_value(text: str, annotation: Any) -> Any:
    """Convert a text to the type that an annotation declares. If the type allows text, return the text unchanged.

    A list is JSON or comma-separated, a mapping is JSON, and `null` or `none` is None if that is allowed.
    """
    kinds = set(_kinds(annotation))
    if type(None) in kinds and text.lower() in ("null", "none"):
        return None
    if str in kinds:
        return text
    if kinds & {dict, collections.abc.Mapping, Any} or any(_is_model(kind) for kind in kinds):
        return _json_or_text(text)
    if kinds & {list, tuple, set, frozenset, collections.abc.Sequence}:
        if text.lstrip().startswith("["):
            return _json_or_text(text)
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows, without their parameters."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _kinds(part)
    elif origin is typing.Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    elif origin is typing.Literal:
        yield from (type(value) for value in typing.get_args(annotation))
    else:
        yield origin or annotation


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
