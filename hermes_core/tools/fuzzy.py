"""Replaces text that a model quotes from memory. Finds it exactly, or by the first of several looser ways that
succeeds.

The ways, in order; each is tried only if the earlier ways found nothing:

1. `exact`: as given; then regardless of the kind of line ends, and of accents being composed or not.
2. `trailing_whitespace`: blanks at the ends of lines do not count.
3. `indentation_shift`: all lines have the same blanks more, or less, before them; the replacement is shifted likewise.
4. `indentation`: blanks at both ends of lines do not count; the replacement's indents change like those of the lines.
5. `whitespace`: in addition, a run of blanks equals a single blank.
6. `edges`: ways 2 to 5 again, without the blank lines before and after the quotation and the replacement.
7. `escapes`: a backslash and a quote equal the quote; then one before `n`, `t`, `r` or a backslash escapes, too.
8. `punctuation`: typographic quotes, dashes and spaces equal the plain ones.
9. `anchors`: the first and the last line match, and the text between them is similar (three lines or more, one place).

Ways 2 to 6 and 9 match whole lines. Nothing outside a match is changed. Within a match, parts that the quotation and
the replacement share stay as they are in the text. For a quotation without any visible character, only `exact` is
tried.
"""

from __future__ import annotations

import difflib
import functools
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hermes_core.errors import HermesError
from hermes_core.tools.indents import is_shifted, reindent, unit_of

ALIKE = 0.8
"""Minimum similarity, from 0 to 1, of the text between two anchors."""

# The comparison takes quadratic time in the worst case, and a model chooses the text, so its size is limited.
_MAX_ANCHORED = 20
_MAX_PARTS = 2000
_MAX_WORDS = 500
_MAX_CHARS = 20_000
_NEAREST_LINES = 1000
_NEAREST_CHARS = 200

_ESCAPED_QUOTE = re.compile(r"""\\(["'])""")
_ESCAPED = re.compile(r"""\\([ntr"'\\])""")
_UNESCAPED = {"n": "\n", "t": "\t", "r": "\r"}

# Each character is replaced by exactly one, so positions are the same in the plain text and in the original.
_PLAIN = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u202f\u3000", " ")
)


# The units that become one character in `_PlainText`: a line end, a letter with its accents, a syllable of Korean.
_LINE_END = re.compile(r"\r\n")
_UNIT = re.compile(
    "\r\n|[^\\W\\d_][\u0300-\u036f\u0653-\u0655\u093c\u3099\u309a]+|[\u1100-\u1112][\u1161-\u1175][\u11a8-\u11c2]?"
)

_WORD = r"\w+|\W"
_NEAR_CHARS = 10_000
"""Maximum number of characters that are searched for a line's end."""


class ReplaceError(HermesError):
    """The text to replace is not found or occurs more than once, or the replacement changes nothing."""


@dataclass(frozen=True)
class Match:
    """A place in the text, with its replacement."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Replacement:
    """A finished replacement: the new text, the way that found the places, and the number of places."""

    text: str
    strategy: str
    count: int


def replace_text(text: str, old: str, new: str, *, replace_all: bool = False) -> Replacement:
    """Replace `old` by `new` in `text`: in the only place, or everywhere if `replace_all`.

    Raises:
        ReplaceError: `old` is empty, equals `new`, is not found, or is found more than once without `replace_all`.
    """
    if not old:
        raise ReplaceError("the text to replace is empty", hint="quote the lines to change, or use write_file")
    if old == new:
        raise ReplaceError("the text to replace and its replacement are the same", hint="give another text for it")
    as_given, plain = _PlainText(text, units=False), _PlainText(text)
    ways = [("exact", _exact, as_given), ("exact", _exact, plain), *((*way, plain) for way in _LOOSER_WAYS.items())]
    for name, find, view in ways if old.strip() else ways[:2]:
        asked = (old, new) if view is as_given else (_PlainText(old).text, new.replace("\r\n", "\n"))
        matches = find(view.text, *asked)
        if len(matches) > 1 and not (replace_all and name != "anchors"):
            raise _ambiguous(view.text, len(matches), [match.start for match in matches])
        if matches:
            return _replace(view, matches, name)
    raise ReplaceError("the text to replace was not found", hint=_nearest(text, old))


def _ambiguous(text: str, count: int, places: Sequence[int]) -> ReplaceError:
    lines = ", ".join(dict.fromkeys(str(text.count("\n", 0, place) + 1) for place in places[:5]))
    message = f"the text to replace is there {count} times (line {lines}{', …' if count > 5 else ''})"
    return ReplaceError(message, hint="quote more of the lines around it, or set replace_all")


def _replace(text: _PlainText, matches: Sequence[Match], strategy: str) -> Replacement:
    parts, end, count = [], 0, 0
    for match in matches:
        if match.start >= end:
            parts += [text.original_of(end, match.start), text.replacement_of(match)]
            end, count = match.end, count + 1
    return Replacement("".join([*parts, text.original_of(end, len(text.text))]), strategy, count)


# The parts of a text that stay unchanged.


class _PlainText:
    """A text in the form in which models quote it, with plain line ends and composed accents; maps each part to the
    original.

    Args:
        units: whether to make line ends and accents plain; otherwise the plain text is the original.
    """

    def __init__(self, original: str, *, units: bool = True) -> None:
        self._original = original
        self._text_places, self._places = [0], [0]
        parts, end, length = [], 0, 0
        pattern = _LINE_END if original.isascii() else _UNIT
        for unit in pattern.finditer(original) if units else ():
            one = "\n" if unit[0] == "\r\n" else unicodedata.normalize("NFC", unit[0])
            if len(one) == 1:
                parts += [original[end : unit.start()], one]
                length, end = length + unit.start() - end + 1, unit.end()
                self._text_places.append(length)
                self._places.append(end)
        self.text = "".join([*parts, original[end:]])

    def _place(self, place: int) -> int:
        n = bisect_right(self._text_places, place) - 1
        return self._places[n] + place - self._text_places[n]

    def original_of(self, start: int, end: int) -> str:
        """Return the original of a part of the plain text."""
        return self._original[self._place(start) : self._place(end)]

    def replacement_of(self, match: Match) -> str:
        """Return the replacement of a match. Parts that it shares with the text stay; its lines end like those
        around."""
        found = self.text[match.start : match.end]
        newline = "\n"
        if "\n" in match.new and "\r\n" not in match.new:
            newline = newline_at(self._original, self._place(match.start))

        def original(part: slice) -> str:
            return self.original_of(match.start + part.start, match.start + part.stop)

        if original(slice(0, len(found))) == found:
            return match.new.replace("\n", newline)
        return _merge(found, match.new, original, newline)


def newline_at(text: str, place: int) -> str:
    """Return the end of the line at this place. If this is the last line and has no end, return that of the line
    before."""
    end = text.find("\n", place, place + _NEAR_CHARS)
    if end < 0:
        end = text.rfind("\n", max(0, place - _NEAR_CHARS), place)
    return "\r\n" if text[max(0, end - 1) : end] == "\r" else "\n"


def _merge(
    old: str, new: str, kept: Callable[[slice], str], newline: str = "\n", *, unit: str = r".*\n|.+", at: int = 0
) -> str:
    """Return `new`, with `kept(part)` in place of each part that is in `old`, too. Compares whole lines first, then
    words of the other lines.

    Args:
        newline: the line end for lines that are not in `old`.
        unit: a regular expression for the units to compare.
        at: the offset of `old`, to be added to positions for `kept`.
    """
    one, other = (re.findall(unit, text) for text in (old, new))
    places, other_places = (list(accumulate(map(len, each), initial=0)) for each in (one, other))
    parts, end, other_end = [], 0, 0
    for i, j, size in [*common_parts(one, other), (len(one), len(other), 0)]:
        gone, come = old[places[end] : places[i]], new[other_places[other_end] : other_places[j]]
        if gone and come and unit != _WORD:
            parts.append(_merge(gone, come, kept, newline, unit=_WORD, at=at + places[end]))
        else:
            parts.append(come.replace("\n", newline))
        parts.append(kept(slice(at + places[i], at + places[i + size])))
        end, other_end = i + size, j + size
    return "".join(parts)


def common_parts(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield the common parts of two sequences, in order, as `(start in one, start in other, length)`."""
    shorter = min(len(one), len(other))
    head = next((n for n in range(shorter) if one[n] != other[n]), shorter)
    tail = next((n for n in range(shorter - head) if one[-1 - n] != other[-1 - n]), shorter - head)
    yield 0, 0, head
    middle, other_middle = one[head : len(one) - tail], other[head : len(other) - tail]
    if max(len(middle), len(other_middle)) <= _MAX_PARTS:
        for i, j, size in difflib.SequenceMatcher(None, middle, other_middle).get_matching_blocks():
            yield head + i, head + j, size
    yield len(one) - tail, len(other) - tail, tail


def _exact(text: str, old: str, new: str) -> list[Match]:
    """Return the matches of the quotation. If it begins within a line's indent, the replacement's further lines are
    indented to fit this line."""
    matches = _places(text, old, new)
    if old[0] not in " \t" or "\n" not in new:
        return matches
    unit = functools.cache(lambda: unit_of(text.split("\n")))
    for n, match in enumerate(matches):
        before = "\n" + text[max(0, match.start - _NEAR_CHARS) : match.start]
        start = match.start - (len(before) - len(before.rstrip(" \t")))
        if start < match.start and before.rstrip(" \t").endswith("\n"):
            found = text[start : match.end].split("\n")
            put = reindent(new.split("\n"), old.split("\n"), found, unit)
            matches[n] = Match(start, match.end, "\n".join(put))
    return matches


# Matching whole lines.

LineKey = Callable[[str], str]


def compose(line: str) -> str:
    """Return the line with its accents composed."""
    return unicodedata.normalize("NFC", line)


def without_trailing(line: str) -> str:
    """Return the line as `trailing_whitespace` compares it."""
    return compose(line).rstrip()


def without_indent(line: str) -> str:
    """Return the line as `indentation` compares it."""
    return compose(line).strip()


def with_single_blanks(line: str) -> str:
    """Return the line as `whitespace` compares it."""
    return " ".join(compose(line).split())


def find_lines(lines: Sequence[str], wanted: Sequence[str], key: LineKey, start: int = 0) -> Iterator[int]:
    """Yield the indices at or after `start` where `wanted` occurs in `lines`. Lines are equal if their `key`s are.

    Of places that overlap the first place, only the second is yielded.
    """
    if not wanted:
        return
    # The lines are joined, because `str.find` takes linear time even if the lines are similar.
    text = "\n" + "".join(f"{key(line)}\n" for line in lines[start:])
    quoted = "\n" + "".join(f"{key(line)}\n" for line in wanted)
    number, counted = start, 0
    for place in find_apart(text, quoted, shared=1):
        number, counted = number + text.count("\n", counted, place), place
        yield number


def find_apart(text: str, old: str, *, shared: int = 0) -> Iterator[int]:
    """Yield the places of `old` in `text` that don't overlap, and also the second place if it overlaps the first.

    The second place is enough to make `old` ambiguous. Finding all overlapping places would take quadratic time.

    Args:
        shared: number of characters at the end of an occurrence that may also begin the next.
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


def _by_lines(text: str, old: str, new: str, key: LineKey, *, uniform: bool = False) -> list[Match]:
    """Return the matches of whole lines.

    Args:
        key: returns the part of a line to compare.
        uniform: whether all lines must have the same blanks more, or less, before them.
    """
    closed = old.endswith("\n")
    quoted, replacement = ((each.removesuffix("\n") if closed else each).split("\n") for each in (old, new))
    lines = text.split("\n")
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    matches = []
    unit = functools.cache(lambda: unit_of(lines))
    for n in find_lines(lines, quoted, key):
        last = n + len(quoted) - 1
        found = lines[n : last + 1]
        if uniform and not is_shifted(quoted, found):
            continue
        put, end = "\n".join(_lines_put(replacement, quoted, found, unit)), starts[last] + len(lines[last])
        if closed and last + 1 < len(lines):
            end += 1  # the quotation's last newline is this line's end
            put += "\n" * new.endswith("\n")
        matches.append(Match(starts[n], end, put))
    return matches


def _lines_put(new: Sequence[str], quoted: Sequence[str], found: Sequence[str], unit: Callable[[], str]) -> list[str]:
    """Return the lines that replace `found`: the lines `new`, indented like `found`. A line that is in both `new` and
    `quoted` is taken from `found` unchanged."""
    put = reindent(new, quoted, found, unit)
    for i, j, size in common_parts(quoted, new):
        put[j : j + size] = found[i : i + size]
    return put


def _trailing_whitespace(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, without_trailing)


def _indentation_shift(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, without_indent, uniform=True)


def _indentation(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, without_indent)


def _whitespace(text: str, old: str, new: str) -> list[Match]:
    return _by_lines(text, old, new, with_single_blanks)


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
    for escaped in (_ESCAPED_QUOTE, _ESCAPED):
        meant, put = (escaped.sub(lambda match: _UNESCAPED.get(match[1], match[1]), each) for each in (old, new))
        if meant != old and meant.strip() and (matches := _places(text, meant, put)):
            return matches
    return []


def _punctuation(text: str, old: str, new: str) -> list[Match]:
    matches = []
    for match in _places(text.translate(_PLAIN), old.translate(_PLAIN), new):
        found = text[match.start : match.end]
        matches.append(replace(match, new=_merge(old, new, found.__getitem__)))
    return matches


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
        last = _find_anchored_end(lines, first, quoted)
        if last is not None:
            found = lines[first : last + 1]
            edges = [quoted[0], quoted[-1]], [found[0], found[-1]]
            put = _lines_put(_without_blank_edges(new).split("\n"), *edges, lambda: unit_of(lines))
            matches.append(Match(starts[first], starts[last] + len(lines[last]), "\n".join(put)))
    return matches


def _find_anchored_end(lines: Sequence[str], first: int, quoted: Sequence[str]) -> int | None:
    """Return the index of the last line of the text that begins at line `first` and is most similar to `quoted`; None
    if no such text is similar enough."""
    end = quoted[-1].strip()
    farthest = min(len(lines), first + len(quoted) + len(quoted) // 2)
    lasts = [n for n in range(first + 1, farthest) if lines[n].strip() == end][:_MAX_ANCHORED]
    # Of equally similar texts, take the one with the nearest length.
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
    """Return text that the model may have meant: the line that is most similar to the first visible line of its
    quotation."""
    line_wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")[:_NEAREST_CHARS]
    numbers: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and len(numbers) < _NEAREST_LINES:
            numbers.setdefault(line.strip()[:_NEAREST_CHARS], number)
    close = difflib.get_close_matches(line_wanted, numbers, n=1)
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
