"""The canonical form of a message: the part that stays the same when a program sends a conversation again.

Agents send answers back in forms of their own: arguments of calls without spaces or with sorted keys, an empty text as
null, marks for a cache. Two messages with the same canonical form have the same content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hermes_core.agents.replies import sayable

_EXACT = 1 << 53
"""The largest magnitude up to which JavaScript, and so programs in JavaScript, can represent every whole number."""
_SPACE = b" \t\n\r\v\f"
_THINKING = ("reasoning_content", "reasoning", "thinking")
"""The fields in which messages carry the model's thinking."""


@dataclass(frozen=True)
class Canonical:
    """The canonical form of a message, comparable and hashable.

    It has no ids of messages and calls, no marks for caches, and no field that only one provider's API has.
    """

    role: str
    text: str
    """The message's texts, joined by line breaks; in the model's answer, without white space at both ends."""
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """The name and the `canonical_arguments` of each call."""
    tool_call_id: str = ""
    """In a tool's message, the id of the call that it answers."""
    images: tuple[tuple[int, str], ...] = ()
    """For each image or other part that is no text, its position in `text` and its SHA-256."""

    @property
    def without_thinking(self) -> Canonical:
        """Return the form without the model's thinking, which some programs do not send back."""
        return replace(self, thinking="") if self.thinking else self


def canonical(message: Mapping[str, Any]) -> Canonical:
    """Return the canonical form of a message in the OpenAI form. Never raises: programs may send anything."""
    role = str(message.get("role") or "")
    text, images = _content(message.get("content"))
    if role != "assistant":
        return Canonical(role, text, tool_call_id=str(message.get("tool_call_id") or ""), images=images)
    thinking = next((said for key in _THINKING if isinstance(said := message.get(key), str) and said), "")
    text, thinking = sayable(text).strip(), sayable(thinking).strip()
    return Canonical(role, text, thinking, tuple(_calls(message.get("tool_calls"))), images=images)


def digest(forms: Sequence[Canonical], *more: Any) -> str:
    """Return a hash of canonical forms and other JSON values, which is the same in every process."""
    found = hashlib.sha256()

    def add(text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        found.update(b"%d:" % len(data))
        found.update(data)

    for form in forms:
        for text in (form.role, form.text, form.thinking, form.tool_call_id, _dump([form.calls, form.images])):
            add(text)
    add(_dump(more))
    return found.hexdigest()


def canonical_arguments(written: Any) -> str:
    """Return the arguments of a call as canonical JSON: keys sorted, without spaces, with one form of escapes and
    numbers. A text that is not JSON is returned unchanged, after a mark with which no JSON begins."""
    if isinstance(written, str):
        try:
            value = _JSON.decode(written.strip() or "{}")
        except (ValueError, RecursionError):
            return f"!{sayable(written)}"
    else:
        value = {} if written is None else written
    try:
        return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return f"!{written!r}"


def strip_spaces(text: str) -> bytes:
    """Return a text as UTF-8 without white space, which agents may change, so that the text can be found in others.
    Searching in bytes takes little time and memory, whatever the text is."""
    return text.encode("utf-8", "surrogatepass").translate(None, _SPACE)


def join_texts(texts: Sequence[str]) -> str:
    """Return the several texts of a message as one."""
    return "\n".join(texts)


def _calls(raw: Any) -> list[tuple[str, str]]:
    found = []
    for call in raw if isinstance(raw, Sequence) and not isinstance(raw, str | bytes) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            found.append((str(function.get("name") or ""), canonical_arguments(function.get("arguments"))))
    return found


def _content(content: Any) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the text of a message's content, and the position in the text and the hash of each other part."""
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        return "" if content is None else canonical_arguments(content), ()
    texts: list[str] = []
    others: list[tuple[int, str]] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            others.append((len(join_texts(texts)), _sha256(_other(part))))
    return join_texts(texts), tuple(others)


def _other(part: Any) -> str:
    """Return an identifying text for a content part that is no text. For an image this is its URL, which may hold the
    whole image."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    address = image.get("url") if isinstance(image, Mapping) else image
    return address if isinstance(address, str) else canonical_arguments(part)


def _plain(value: Any) -> Any:
    """Return a JSON value with each number in one form: 1.0 becomes 1, and a large integer the nearest float."""
    if isinstance(value, str):
        return sayable(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) >= _EXACT:
            value = float(value) if abs(value) < 1 << 1023 else repr(value)
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value
    if isinstance(value, Mapping):
        return {sayable(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not JSON")


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
