"""Replacing text that a model quotes from memory: exactly, or by the first of several looser ways that finds it.

The ways, in order; each is tried only when those before it found nothing:

1. `exact`: as given.
2. `trailing_whitespace`: blanks at the ends of lines do not count.
3. `indentation_shift`: all lines are indented by the same amount more, or less; the replacement is shifted likewise.
4. `indentation`: blanks at both ends of lines do not count; the replacement's indents change as the lines' did.
5. `whitespace`: a run of blanks counts as one, too.
6. `edges`: 2 to 5 once more, without the blank lines before and after the quotation and the replacement.
7. `escapes`: a backslash and `n`, `t`, `r`, a quote or a backslash stand for the character itself.
8. `punctuation`: typographic quotes, dashes and spaces count as the plain ones.
9. `anchors`: the first and the last line match and what lies between is alike (three lines or more, one place only).

2 to 6 and 9 match whole lines. Nothing outside a match is ever changed. A quotation without any visible character is
looked for by `exact` only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hermes_core.errors import HermesError

ALIKE = 0.8
"""Minimum similarity, from 0 to 1, of the text between two anchors."""

# The comparison takes quadratic time in the worst case, and the text is the model's, so it is limited.
_MAX_ANCHORED = 20
_MAX_WORDS = 500
_MAX_CHARS = 20_000
_NEAREST_LINES = 1000
_NEAREST_CHARS = 200

_ESCAPED = re.compile(r"""\\([ntr"'\\])""")
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r"}

# Each character is replaced by exactly one, so positions in the plain text and the original are the same.
_PLAIN = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u202f\u3000", " ")
)


class ReplaceError(HermesError):
    """The text to replace is missing, occurs more than once, or the replacement changes nothing."""


@dataclass(frozen=True)
class Match:
    """A place in the text, with its replacement."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Replacement:
    """A finished replacement: the new text, the way that found the place, and the number of places."""

    text: str
    strategy: str
    count: int


def replace_text(text: str, old: str, new: str, *, replace_all: bool = False) -> Replacement:
    """Replace `old` with `new` in `text`: in its only place, or everywhere if `replace_all`.

    Raises:
        ReplaceError: `old` is empty, equals `new`, is not found, or is found more than once without `replace_all`.
    """
    if not old:
        raise ReplaceError("the text to replace is empty", hint="quote the lines to change, or use write_file")
    if old == new:
        raise ReplaceError("the text to replace and its replacement are the same", hint="it cannot be configured")
    if old in text:
        return _replace_exact(text, old, new, replace_all)
    for name, find in _LOOSER_WAYS.items() if old.strip() else ():
        matches = find(text, old, new)
        if len(matches) > 1 and not (replace_all and name != "anchors"):
            raise _ambiguous(text, len(matches), [match.start for match in matches])
        if matches:
            return _put(text, matches, name)
    raise ReplaceError("the text to replace was not found", hint=_nearest(text, old))


def _replace_exact(text: str, old: str, new: str, replace_all: bool) -> Replacement:
    count = text.count(old)
    if not replace_all:
        places = [text.index(old)]
        while len(places) < 5 and (place := text.find(old, places[-1] + 1)) >= 0:
            places.append(place)  # overlapping ones too, because they are just as ambiguous
        if len(places) > 1:
            raise _ambiguous(text, max(count, len(places)), places)
    return Replacement(text.replace(old, new), "exact", count)


def _ambiguous(text: str, count: int, places: Sequence[int]) -> ReplaceError:
    lines = ", ".join(str(text.count("\n", 0, place) + 1) for place in places[:5])
    message = f"the text to replace is there {count} times (line {lines}{', …' if count > 5 else ''})"
    return ReplaceError(message, hint="quote more of the lines around it, or set replace_all")


def _put(text: str, matches: Sequence[Match], strategy: str) -> Replacement:
    parts, end, count = [], 0, 0
    for match in matches:
        if match.start >= end:
            parts += [text[end : match.start], match.new]
            end, count = match.end, count + 1
    return Replacement("".join([*parts, text[end:]]), strategy, count)


# Matching whole lines.

LineKey = Callable[[str], str]


def without_trailing(line: str) -> str:
    """Return the line as `trailing_whitespace` compares it."""
    return line.rstrip()


def without_indent(line: str) -> str:
    """Return the line as `indentation` compares it."""
    return line.strip()


def with_single_blanks(line: str) -> str:
    """Return the line as `whitespace` compares it."""
    return " ".join(line.split())


def find_lines(lines: Sequence[str], wanted: Sequence[str], key: LineKey, start: int = 0) -> Iterator[int]:
    """Yield the indices at or after `start` where `wanted` occurs in `lines`. Lines are compared by `key`.

    Of overlapping places, only the second is yielded.
    """
    if not wanted:
        return
    # Search in one text: `str.find` takes linear time, even if the lines are similar.
    text = "\n" + "".join(f"{key(line)}\n" for line in lines[start:])
    quoted = "\n" + "".join(f"{key(line)}\n" for line in wanted)
    number, counted = start, 0
    for place in find_apart(text, quoted, shared=1):
        number, counted = number + text.count("\n", counted, place), place
        yield number


def find_apart(text: str, old: str, *, shared: int = 0) -> Iterator[int]:
    """Yield where `old` occurs in `text`: places that don't overlap, and the second one if it overlaps the first.

    The second one makes the place ambiguous. Finding all overlapping places would take quadratic time.

    Args:
        shared: how many characters at its end may also begin the next occurrence.
    """
    first = text.find(old)
    if first < 0:
        return
    yield first
    after = first + len(old) - shared
    if 0 <= (second := text.find(old, first + 1)) < after:
        yield second
    while (place := text.find(old, after)) >= 0:
        yield place
        after = place + len(old) - shared


def reindent(new: Sequence[str], quoted: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return the lines `new`, with their indents changed in the same way as from `quoted` to `found`."""
    pairs = [(indent(q), indent(f)) for q, f in zip(quoted, found, strict=False) if q.strip() and f.strip()]
    shift = _shift(pairs)
    translation = dict(reversed(pairs))  # if lines disagree, the first one counts
    return [_reindented(line, shift, translation) if line.strip() else line for line in new]


def indent(line: str) -> str:
    """Return the blanks at the start of the line."""
    return line[: len(line) - len(line.lstrip(" \t"))]


def _shift(pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return `(removed, added)`: the one prefix that all lines lack or have in excess; None if they differ
    otherwise."""
    if not pairs:
        return None
    quoted, found = pairs[0]
    if found.endswith(quoted):
        added = found[: len(found) - len(quoted)]
        return ("", added) if all(f == added + q for q, f in pairs) else None
    if quoted.endswith(found):
        removed = quoted[: len(quoted) - len(found)]
        return (removed, "") if all(q == removed + f for q, f in pairs) else None
    return None


def _reindented(line: str, shift: tuple[str, str] | None, translation: dict[str, str]) -> str:
    own = indent(line)
    if shift is not None:
        removed, added = shift
        kept = own.removeprefix(removed) if own.startswith(removed) else ""
        return added + kept + line[len(own) :]
    known = max((each for each in translation if own.startswith(each)), key=len, default=None)
    return line if known is None else translation[known] + line[len(known) :]


def _by_lines(text: str, old: str, new: str, key: LineKey, *, fix: bool, uniform: bool = False) -> list[Match]:
    """Return the matches of whole lines.

    Args:
        key: returns the part of a line that is compared.
        fix: whether to give the replacement the indents of the matched lines.
        uniform: whether all lines must be shifted by the same prefix.
    """
    closed = old.endswith("\n")
    quoted = (old[:-1] if closed else old).split("\n")
    lines = text.split("\n")
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    matches = []
    for n in find_lines(lines, quoted, key):
        last = n + len(quoted) - 1
        found = lines[n : last + 1]
        if uniform and not _is_shifted(quoted, found):
            continue
        put = "\n".join(reindent(new.split("\n"), quoted, found)) if fix else new
        end = starts[last] + len(lines[last])
        if closed and last + 1 < len(lines):
            end += 1  # the quotation's last newline is the line's own
        elif closed:
            put = put.removesuffix("\n")
        matches.append(Match(starts[n], end, put))
    return matches


def _is_shifted(quoted: Sequence[str], found: Sequence[str]) -> bool:
    return _shift([(indent(q), indent(f)) for q, f in zip(quoted, found, strict=True) if q.strip()]) is not None


def _trailing_whitespace(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, without_trailing, fix=False)


def _indentation_shift(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, without_indent, fix=True, uniform=True)


def _indentation(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, without_indent, fix=True)


def _whitespace(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, with_single_blanks, fix=True)


def _edges(text: str, old: str, new: str) -> list[Match]:
    trimmed_old, trimmed_new = _without_blank_edges(old), _without_blank_edges(new)
    if trimmed_old in (old, trimmed_new):
        return []
    for find in (_trailing_whitespace, _indentation_shift, _indentation, _whitespace):
        if matches := find(text, trimmed_old, trimmed_new):
            return matches
    return []


def _without_blank_edges(text: str) -> str:
    lines = text.split("\n")
    visible = [n for n, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[visible[0] : visible[-1] + 1]) if visible else ""


def _escapes(text: str, old: str, new: str) -> list[Match]:
    meant = _unescape(old)
    return _places(text, meant, _unescape(new)) if meant != old and meant.strip() else []


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: _UNESCAPED.get(match[1], match[1]), text)


def _punctuation(text: str, old: str, new: str) -> list[Match]:
    return _places(text.translate(_PLAIN), old.translate(_PLAIN), new)


def _places(text: str, old: str, new: str) -> list[Match]:
    return [Match(place, place + len(old), new) for place in find_apart(text, old)]


# Similar text.


def _anchors(text: str, old: str, new: str) -> list[Match]:
    quoted = _without_blank_edges(old).split("\n")
    if not 3 <= len(quoted) <= _MAX_WORDS:
        return []
    lines = text.split("\n")
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    firsts = [n for n, line in enumerate(lines) if line.strip() == quoted[0].strip()][:_MAX_ANCHORED]
    matches = []
    for first in firsts:
        last = _anchored_end(lines, first, quoted)
        if last is not None:
            found = lines[first : last + 1]
            put = reindent(_without_blank_edges(new).split("\n"), [quoted[0], quoted[-1]], [found[0], found[-1]])
            matches.append(Match(starts[first], starts[last] + len(lines[last]), "\n".join(put)))
    return matches


def _anchored_end(lines: Sequence[str], first: int, quoted: Sequence[str]) -> int | None:
    """Return the line that ends the text most similar to `quoted` that begins at `first`; None if nothing is similar
    enough."""
    end = quoted[-1].strip()
    farthest = min(len(lines), first + len(quoted) + len(quoted) // 2)
    lasts = [n for n in range(first + 1, farthest) if lines[n].strip() == end][:_MAX_ANCHORED]
    # Among equally similar ones, take the one with the nearest length.
    ranked = [
        (_likeness(lines[first + 1 : last], quoted[1:-1]), -abs(last - first + 1 - len(quoted)), last) for last in lasts
    ]
    best = max(ranked, default=None)
    return best[2] if best is not None and best[0] >= ALIKE else None


def _likeness(one: Sequence[str], other: Sequence[str]) -> float:
    texts = ["\n".join(lines) for lines in (one, other)]
    if max(map(len, texts)) > _MAX_CHARS:
        return 0.0
    words = [re.findall(r"\w+|\S", text) for text in texts]
    if max(map(len, words)) > _MAX_WORDS:
        return 0.0
    return difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).ratio()


def _nearest(text: str, old: str) -> str:
    """Return the place that the model may have meant: the line most similar to the first visible one of its
    quotation."""
    wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")[:_NEAREST_CHARS]
    numbers: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and len(numbers) < _NEAREST_LINES:
            numbers.setdefault(line.strip()[:_NEAREST_CHARS], number)
    close = difflib.get_close_matches(wanted, numbers, n=1)
    again = "read the file again and quote the lines as they are"
    return f"the nearest is line {numbers[close[0]]}, {close[0]!r}: {again}" if close else again


_LOOSER_WAYS: dict[str, Callable[[str, str, str], list[Match]]] = {
    "trailing_whitespace": _trailing_whitespace,
    "indentation_shift": _indentation_shift,
    "indentation": _indentation,
    "whitespace": _whitespace,
    "edges": _edges,
    "escapes": _escapes,
    "punctuation": _punctuation,
    "anchors": _anchors,
}
