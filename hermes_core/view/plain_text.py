"""Plain texts of a record: messages and arguments as models and endpoints write them, and what a failure is called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def text_of(content: Any) -> str:
    """Return the text of a message's content, which may also be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(part, str) for part in parts):
            return "\n".join(map(str, parts))
    return json.dumps(content, ensure_ascii=False)


def listed(values: list[Any]) -> str:
    """Return the parts of a list as lines of text, also those of lists in it."""
    return "\n".join(listed(part) if isinstance(part, list) else text_of(part) for part in values)


def parsed(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def failure_name(kind: str, stage: str | None) -> str:
    """Return what failed, and where if the kind does not say it."""
    return f"{kind} failure" if stage in (None, kind) else f"{kind} failure at {stage}"
