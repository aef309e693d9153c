"""The tables of `hermes-rl plugins`, `envs`, `backends`, `tools` and similar commands, for people and as JSON."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hermes_core.agents.base import InstallableProgram
from hermes_core.cli.settings_table import settings_table
from hermes_core.errors import HermesError, UsageError
from hermes_core.plugins.registry import PluginEntry
from hermes_core.runs.options import BASELINES
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Backend, Network
from hermes_core.tools.base import Tool
from hermes_core.tools.registry import ToolRegistry, expand_toolset
from hermes_core.tools.schema import function_schema, parameters_schema, type_words
from hermes_core.tools.toolsets import Toolset

Cell = str | Sequence[str] | Mapping[str, Any]
"""A cell of a table: a text, several texts, or several texts for each of several kinds."""

Row = Mapping[str, Cell]
"""One row of a table: its cells by column. Every row of a table has the same columns."""

Tables = Mapping[str, Sequence[Row]]
"""Tables by title."""


DETAILS = frozenset({"hooks", "reason", "advice", "key", "schema"})
"""Columns that only the JSON has. For people, the reasons are printed on standard error."""


def list_entries(runtime: Runtime, what: str, name: str | None = None, *, taken: Collection[str] = ()) -> Tables:
    """Return the tables of a listing: all entries of a kind, or one entry with its details.

    Args:
        what: a kind of entry (`backend`, `environment`, `agent`, `parser`, `sink`, `command`, `tool`), or `plugin`.
        taken: names of built-in commands, which a plugin's command can't have.

    Raises:
        UnknownNameError: there is no such entry.
    """
    if what == "plugin":
        return {"plugins": _plugins(runtime)}
    if what == "tool":
        return _tools(runtime, name)
    registry = runtime.plugin_manager.registry(what)
    if name is None:
        return {f"{what}s": [_row(entry, taken) for entry in registry.entries()]}
    entry = registry.entry(name)
    use = {"use": _USES[what].format(entry.name)} if what in _USES else {}
    return {what: [{**_row(entry, taken), **use}], **(_DETAILS[what](runtime, entry) if what in _DETAILS else {})}


_USES = {"parser": "hermes-rl rollout ENV --parser {}", "sink": "hermes-rl rollout ENV --sink {}=TARGET"}
"""How to use an entry of a kind that has no settings."""


def _plugins(runtime: Runtime) -> list[Row]:
    """Return every plugin that was found: its origin, whether it is in use, and what it provides."""
    manager = runtime.plugin_manager
    rows: list[Row] = []
    for plugin in manager.plugins:
        provided: dict[str, list[str]] = {}
        for entry in manager.claims:
            if entry.plugin == plugin:
                provided.setdefault(entry.kind, []).append(entry.name)
        rows.append(
            {
                "name": plugin.name,
                "status": plugin.status.value,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "provides": provided,
                "hooks": plugin.hooks,
                "reason": plugin.reason,
                "advice": plugin.hint,
            }
        )
    return rows


def _of_backend(runtime: Runtime, entry: PluginEntry) -> Tables:
    backend = runtime.backend(entry.name)
    return {"capabilities": _capabilities(backend), "settings": _backend_settings(backend)}


def _of_environment(runtime: Runtime, entry: PluginEntry) -> Tables:
    return {"settings": settings_table(runtime.environment_class(entry.name).config_class, "env")}


def _of_agent(runtime: Runtime, entry: PluginEntry) -> Tables:
    program = getattr(entry.load(), "program", None)
    described = program.describe() if isinstance(program, InstallableProgram) else {}
    rows: list[Row] = [{"name": name, "value": value} for name, value in described.items() if value]
    config_class = runtime.agent_config_class(entry.name)
    return {
        **({"program": rows} if rows else {}),
        "settings": [] if entry.name in BASELINES else settings_table(config_class, "agent"),
    }


_DETAILS = {"backend": _of_backend, "environment": _of_environment, "agent": _of_agent}
"""Functions that return further tables for one entry, by kind."""


def _capabilities(backend: Backend) -> list[Row]:
    """Return the capabilities that the backend declares, and the settings that its profiles can't have."""
    can, unsupported = backend.capabilities, backend.config_class.unsupported
    limits_memory = can.memory_limit and "memory" not in unsupported
    rows: list[tuple[str, Cell, str]] = [
        ("isolation", [level.label for level in sorted(can.isolation)], "levels; a profile's settings may allow fewer"),
        ("network", _policies(backend), "network policies"),
        ("attach", _yes(can.attach), "`hermes-rl reap` and taking over sandboxes"),
        ("snapshot", _yes(can.snapshot), "sandboxes made from a snapshot of a prepared one"),
        ("builds", _yes(can.builds), "images built from a Dockerfile"),
        ("gpu", _yes(can.gpu), "sandboxes with GPUs"),
        ("memory_limit", _yes(limits_memory), "the setting `memory` is a limit"),
        ("on_driver_host", _yes(can.on_driver_host), "sandboxes run on this host"),
        ("not supported", unsupported, "settings that are refused"),
    ]
    return [{"name": name, "value": value, "summary": summary} for name, value, summary in rows if value]


def _yes(can: bool) -> str:
    return "yes" if can else "no"


def _policies(backend: Backend) -> list[str]:
    return [policy.value for policy in Network if policy in backend.capabilities.policies]


def _backend_settings(backend: Backend) -> list[Row]:
    """Return the settings that a profile can have, with the network policies that the backend allows."""
    kind = backend.config_class
    rows = settings_table(kind, "backend", hidden={"name", *kind.unsupported})
    policies = type_words({"enum": _policies(backend)})
    return [{**row, "type": policies} if row["key"] == "network" else row for row in rows]


def program_of(runtime: Runtime, name: str) -> InstallableProgram:
    """Return the program that an agent runs in its slots.

    Raises:
        UnknownNameError: there is no such agent.
        UsageError: the agent runs no program.
    """
    program = getattr(runtime.agents.entry(name).load(), "program", None)
    if not isinstance(program, InstallableProgram):
        raise not_installable(name)
    return program


def not_installable(name: str) -> UsageError:
    """Return the error for an agent without a program that could be fetched."""
    return UsageError(f"agent {name!r} is no program that could be installed", hint="`hermes-rl agents` lists them")


def _tools(runtime: Runtime, name: str | None = None) -> Tables:
    """Return tables of all tools, toolsets and distributions; or of one tool with its parameters; or of one toolset
    with its tools.

    Raises:
        UnknownNameError: there is neither a tool nor a toolset with that name.
    """
    known = runtime.tools
    entries = runtime.plugin_manager.registry("tool").entries()
    if name is None:
        return {
            "tools": [_tool_row(entry) for entry in entries],
            "toolsets": [_toolset_row(known, each) for each in known.toolsets.values()],
            "distributions": [
                {"name": name, "percent": [f"{toolset} {share:g}" for toolset, share in distribution.percent.items()]}
                for name, distribution in known.distributions.items()
            ],
        }
    if name in known.toolsets and name not in known:
        members = expand_toolset(known, name)
        return {
            "toolset": [_toolset_row(known, known.toolsets[name])],
            "tools": [_tool_row(entry) for entry in entries if entry.name in members],
        }
    tool = known.get(name)
    limit = "" if tool.timeout_s is None else f"{tool.timeout_s:g} s"
    row = {
        **_tool_row(runtime.plugin_manager.registry("tool").entry(name)),
        "time limit": limit,
        "schema": function_schema(tool),
    }
    return {"tool": [{**row, "summary": tool.description}], "parameters": _parameters(tool)}


def _tool_row(entry: PluginEntry) -> Row:
    return {
        "name": entry.name,
        "where": entry.value.where,
        "toolsets": entry.value.toolsets,
        **_origin(entry),
        "summary": re.split(r"(?<=[.:])\s", entry.summary, maxsplit=1)[0],
    }


def _toolset_row(known: ToolRegistry, toolset: Toolset) -> Row:
    return {
        "name": toolset.name,
        "tools": _members(known, toolset.name),
        "includes": toolset.includes,
        "summary": toolset.summary,
    }


def _parameters(tool: Tool) -> list[Row]:
    schema = parameters_schema(tool.params)
    required = schema.get("required", ())
    return [
        {
            "name": name,
            "type": type_words(each) + (", required" if name in required else ""),
            "default": json.dumps(each["default"], ensure_ascii=False) if "default" in each else "",
            "summary": each.get("description", ""),
        }
        for name, each in schema["properties"].items()
    ]


def as_json(tables: Tables) -> str:
    """Return one table as a list of objects, several as an object of lists."""
    data: Any = next(iter(tables.values())) if len(tables) == 1 else tables
    return json.dumps(data, indent=2, ensure_ascii=False, default=list)


def as_text(tables: Tables, *, terminal_width: int | None) -> str:
    """Return the tables for people: aligned lines, or paragraphs if the terminal is too narrow for aligned lines.

    Columns that are empty in every row, the title of an only table, and columns meant for programs are left out.

    Args:
        terminal_width: in columns; None if the output is not a terminal, so that lines may have any length.
    """
    parts = []
    for title, rows in tables.items():
        columns = [column for column in rows[0] if _is_shown(column, rows)] if rows else []
        lines = _align([columns, *([_text(row[column]) for column in columns] for row in rows)]) if rows else ["none"]
        if terminal_width is not None and max(map(len, lines)) > terminal_width:
            lines = _paragraphs(columns, rows, terminal_width)
        parts.append("\n".join([title, *lines] if len(tables) > 1 else lines))
    return "\n\n".join(parts)


def _is_shown(column: str, rows: Sequence[Row]) -> bool:
    return column not in DETAILS and any(row[column] for row in rows)


def _row(entry: PluginEntry, taken: Collection[str]) -> Row:
    row = {"name": entry.name, "aliases": entry.aliases, **_origin(entry), "summary": entry.summary}
    if entry.kind == "command":
        hidden = entry.name in taken
        row["use"] = "hidden by the program's own command of this name" if hidden else f"hermes-rl {entry.name} --help"
    return row


def _members(known: ToolRegistry, toolset: str) -> list[str]:
    """Return the names of the toolset's tools, or a text that says why the toolset can't be used."""
    try:
        return expand_toolset(known, toolset)
    except HermesError as error:
        return [f"({error})"]


def _origin(entry: PluginEntry) -> dict[str, Cell]:
    return {
        "plugin": entry.plugin.name,
        "distribution": f"{entry.plugin.distribution} {entry.plugin.version}".strip(),
        "needs": entry.requires,
    }


def _text(cell: Cell) -> str:
    if isinstance(cell, Mapping):
        return "; ".join(f"{kind} {_text(names)}" for kind, names in cell.items())
    return cell if isinstance(cell, str) else ", ".join(cell)


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _paragraphs(columns: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """Return a paragraph for each row: its name, and beside the name its summary, if any, and its other columns with
    their names."""
    name, *others = columns
    margin = 2 + max(len(_text(row[name])) for row in rows)
    lines = []
    for row in rows:
        paragraphs = [_text(row["summary"])] if row.get("summary") else []
        paragraphs.append(
            "; ".join(_name_cell(column, row[column]) for column in others if column != "summary" and row[column])
        )
        for text, first in zip(paragraphs, [_text(row[name]), *[""] * len(paragraphs)], strict=False):
            begin, fitted = first.ljust(margin), max(width, margin + 20)
            lines += textwrap.wrap(
                text, fitted, initial_indent=begin, subsequent_indent=" " * margin, break_on_hyphens=False
            )
    return lines


def _name_cell(column: str, cell: Cell) -> str:
    if isinstance(cell, Mapping):
        return "; ".join(f"{kind}: {_text(names)}" for kind, names in cell.items())
    return f"{column}: {_text(cell)}"
