"""Turns any value into plain JSON, without secrets and with long texts cut; reads and writes JSON text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

from pydantic_core import from_json

MAX_TEXT = 1 << 20
"""Maximum number of characters of one string in a record. Longer strings are cut, and `cut` lists their names."""

MAX_PATCH = 64 << 20
"""Maximum number of characters of a patch in a record. A longer patch is left out, because half a patch is useless."""

MAX_FIELD, MAX_FIELDS = 4000, 32_000
"""Maximum number of characters of one field of an item in a record, and of all such fields together."""

MAX_DEPTH = 64
"""Maximum depth of a nested value in a record."""

Redact = Callable[[str], str]
"""Removes the secrets from a text."""


def redact_value(value: Any, redact: Redact) -> Any:
    """Return JSON values without secrets. Unlike `plain`, this function cuts no text."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(key): redact_value(part, redact) for key, part in value.items()}
    if isinstance(value, list):
        return [redact_value(part, redact) for part in value]
    return value


def json_line(value: Any) -> bytes:
    """Return one line of a JSONL file. The line is pure ASCII, so that no reader takes one of its characters for a line
    end."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON text that every JSON parser accepts.

    Raises:
        ValueError: the value has a number that is not finite, half a surrogate pair, or more than about 200 levels.
    """
    try:
        text = json.dumps(value, allow_nan=False, indent=indent, separators=None if indent else (",", ":"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    from_json(text)
    return text


def json_value(text: bytes) -> Any:
    """Return the value of JSON text, in a third of the time that `json` takes. Numbers that are not finite become text;
    halves of surrogate pairs become `?`.

    Raises:
        ValueError: the text is not JSON, or has more than about 200 levels.
    """
    if not _INFINITE.search(text):
        with suppress(ValueError):
            return from_json(text, allow_inf_nan=False)
    try:
        value = json.loads(text, parse_constant=str, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return from_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


_INFINITE = re.compile(rb"[0-9][eE]\+?[0-9]{3,}[,\]}\s]|[0-9]{300}")
"""A pattern for numbers that may be too large for a float."""


def _finite(digits: str) -> float | str:
    return number if math.isfinite(number := float(digits)) else digits


def plain(value: Any, redact: Redact | None = None) -> Any:
    """Return the value as plain JSON: strings redacted and bounded, numbers finite, everything else as text."""
    return Cleaner(redact)(value, "")


def short_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a mapping that have at most `MAX_FIELD` characters, up to `MAX_FIELDS` in total."""
    kept, room = {}, MAX_FIELDS
    for name, part in value.items():
        size = len(str(name)) + _size(part, MAX_FIELD)
        if size <= min(MAX_FIELD, room):
            kept[name] = part
            room -= size
    return kept


def find_changed_fields(kept: Mapping[str, Any], value: Mapping[str, Any], redact: Redact | None = None) -> list[str]:
    """Return the names of a mapping's fields that have changed since its `short_fields` were kept as plain JSON.

    Fields that are new are left out; and so are values that are not plain JSON, because their text may differ from
    process to process.
    """
    now, clean = short_fields(value), Cleaner(redact)
    return [
        name
        for name, then in kept.items()
        if name not in now or (_is_plain(now[name]) and clean(now[name], name) != then)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int, float))


def _size(value: Any, most: int) -> int:
    """Return about how many characters a value has as JSON. Stops counting at more than `most`."""
    if isinstance(value, (str, bytes)):
        return len(value)
    size = 8  # for brackets, separators and numbers; also makes the count end for a value that contains itself
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        for part in (*value, *value.values()) if isinstance(value, Mapping) else value:
            if size > most:
                break
            size += _size(part, most - size)
    return size


class Cleaner:
    """Copies values into plain JSON. `cut` lists the names of cut texts; `redactions` counts texts that had a
    secret."""

    def __init__(self, redact: Redact | None) -> None:
        self.redact: Redact = redact or (lambda text: text)
        self.cut: list[str] = []
        self.redactions = 0

    def __call__(self, value: Any, path: str, depth: int = 0) -> Any:
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self._text(value, path)
        if depth < MAX_DEPTH and isinstance(value, Mapping):
            named = [(self._text(str(key), path), part) for key, part in value.items()]
            return {name: self(part, f"{path}.{name}", depth + 1) for name, part in named}
        if depth < MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
            return [self(part, f"{path}.{index}", depth + 1) for index, part in enumerate(value)]
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):  # `str(value)` would be nested just as deeply
            return f"[nested more than {MAX_DEPTH} levels deep]"
        if isinstance(value, Real):
            return self(float(value), path)
        return self._text(str(value), path)

    def patch(self, patch: str | None) -> str | None:
        """Return the patch without secrets; None for a patch that is too long."""
        if patch is not None and len(patch) > MAX_PATCH:
            self.cut.append(f"patch: {len(patch)} characters, left out")
            return None
        return None if patch is None else self.redact(patch)

    def _text(self, text: str, path: str) -> str:
        clean = self.redact(text)
        self.redactions += clean != text
        text = clean.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is not valid JSON text
        if len(text) <= MAX_TEXT:
            return text
        self.cut.append(f"{path}: {len(text)} characters, {MAX_TEXT} kept")
        half = MAX_TEXT // 2
        return f"{text[:half]}\n[… {len(text) - MAX_TEXT} characters left out …]\n{text[-half:]}"
