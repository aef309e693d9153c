"""Plain texts for records: of messages and arguments as models and endpoints write them, of times, and of failures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hermes_core.agents.replies import decode_arguments
from hermes_core.records.jsonable import json_text, json_value

_OF_ONE = re.compile(
    r"slot_\d+|tmp\.\w{10}|\.agent-\w{6}|trajectory \w+|\d+\.\d+ ?s\b|127\.0\.0\.1:\d+"
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z?"
)


def without_what_differs(text: str) -> str:
    """Return a text without the parts that differ even between equal reports of two rollouts: names of slots, temporary
    folders and rollouts, ports, session ids, times."""
    return _OF_ONE.sub("…", text)


def what_differs(text: str) -> list[str]:
    """Return the parts that `without_what_differs` leaves out, in their order."""
    return [found[0] for found in _OF_ONE.finditer(text)]


def text_of(content: Any) -> str:
    """Return a message's content as text. If the content is a list of parts, parts that are no text become JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(
        text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)
        for part, text in zip(content, texts, strict=True)
    )


def list_text(values: list[Any]) -> str:
    """Return the parts of a list, and of lists nested in it, as lines of text."""
    return "\n".join(list_text(part) if isinstance(part, list) else text_of(part) for part in values)


def parse_container(text: str) -> dict[str, Any] | list[Any] | None:
    """Parse a text that is a JSON object or list. Return None for other text, and for JSON that some parsers refuse."""
    try:
        value = json_value(text.encode()) if text.lstrip().startswith(("{", "[")) else None
        json_text(value)
    except ValueError:
        return None
    return value


def arguments_of(written: Any) -> dict[str, Any] | None:
    """Return a tool call's arguments as they were parsed when the call was made; None if they are no JSON object, or
    have values that some parsers refuse, such as a number beyond 64 bits."""
    arguments = decode_arguments(written).arguments
    try:
        json.loads(json_text(arguments), parse_int=_of_64_bits)
    except ValueError:
        return None
    return arguments


def _of_64_bits(digits: str) -> int:
    if not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("a number beyond 64 bits")
    return number


def moment(seconds: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC; a time beyond the calendar becomes the nearest day in it."""
    return datetime.fromtimestamp(min(max(0.0, seconds), _LAST), UTC).isoformat()


_LAST = datetime(9999, 12, 30, tzinfo=UTC).timestamp()


def failure_name(kind: str, stage: str | None) -> str:
    """Return the kind of a failure, and its stage if the kind does not imply it."""
    return f"{kind} failure" if stage in (None, kind) else f"{kind} failure at {stage}"
