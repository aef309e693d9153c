"""Chooses the parser for a model's calls: the parser that reads the calls that the model's chat template writes."""

from __future__ import annotations

from collections.abc import Mapping

from hermes_core.agents.exact.chat import PROBE_TOOL, Chat, WrittenCall
from hermes_core.agents.parsers.base import Parser
from hermes_core.errors import ConfigError

AUTO = "auto"
"""The setting that chooses the parser automatically."""


def reads(parser: Parser, call: WrittenCall) -> bool:
    """Return whether the parser reads exactly this one call, and treats none of it as text."""
    found = parser.parse(call.text, [PROBE_TOOL])
    if found.problems or len(found.calls) != 1 or found.content.strip():
        return False
    (read,) = found.calls
    return read.name == call.name and read.arguments == call.arguments and not read.repaired


def matching_parser(name: str, parsers: Mapping[str, Parser], chat: Chat, *, tools: bool = True) -> Parser:
    """Return the parser with this name. For `auto`, return the first of `parsers` that reads the calls of the template.

    Args:
        name: the name of one of `parsers`, or `auto`.
        parsers: all parsers by name, more likely ones first.
        tools: whether there are tools; without tools there are no calls, and nothing is checked.

    Raises:
        ConfigError: the parser does not read the template's calls. The error names the parsers that do.
    """
    if not tools:
        return parsers[name]
    written = list(chat.write_calls())
    if not written:
        raise ConfigError(
            f"the chat template of {chat.name} does not write a model's calls: no parser can be checked against it",
            hint="set chat_template to one that writes `tool_calls` as the model does",
        )
    if name != AUTO and any(reads(parsers[name], call) for call in written):
        return parsers[name]
    able = [parser for parser in parsers if parser != AUTO and any(reads(parsers[parser], call) for call in written)]
    if not able:
        shown = " ".join(written[0].text.split())[:200]
        raise ConfigError(
            f"no parser reads the calls that the chat template of {chat.name} writes: {shown}",
            hint="write one (docs/reference/parsers.md), or set chat_template to one whose calls a parser reads",
        )
    if name != AUTO:
        raise ConfigError(
            f"the parser {name!r} does not read the calls that the chat template of {chat.name} writes: "
            "all of them would be taken for text",
            hint=f"set tool_call_parser={able[0]}" + (f" (or {', '.join(able[1:])})" if able[1:] else ""),
        )
    return parsers[min(able, key=lambda each: not _writes_the_same(parsers[each], written))]


def _writes_the_same(parser: Parser, written: list[WrittenCall]) -> bool:
    """Return whether the parser writes the call exactly as the template does, which distinguishes versions of a
    format."""
    render = getattr(parser, "render", None)
    return render is not None and any(render([call]).strip() in call.text for call in written)
