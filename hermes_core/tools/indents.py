"""Gives lines the indents of the text into which they are put, whatever unit of indentation the quotation has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

_WIDTHS = (1, 2, 3, 4, 8)
"""Numbers of blanks that can be a unit of indentation. Any other number only aligns a line with a part of the line
above."""


def indent(line: str) -> str:
    """Return the blanks at the start of the line."""
    return line[: len(line) - len(line.lstrip(" \t"))]


def reindent(new: Sequence[str], quoted: Sequence[str], found: Sequence[str], unit: Callable[[], str]) -> list[str]:
    """Return the lines `new` with their indents changed in the way in which `quoted` and `found` differ.

    Args:
        unit: returns `unit_of` the whole text; called only if needed.
    """
    pairs = _pairs(quoted, found)
    if all(q == f for q, f in pairs):
        return list(new)
    known = dict(reversed(pairs))  # if an indent has several counterparts, the first counts
    convert = _conversion(pairs, unit_of([*quoted, *new]), unit_of(found) or unit())
    return [_reindent_line(line, known, convert) if line.strip() else line for line in new]


def is_shifted(quoted: Sequence[str], found: Sequence[str]) -> bool:
    """Return whether `found` has the same blanks added before every line of `quoted`, or removed from every line."""
    return _uniform(_pairs(quoted, found))


def _pairs(quoted: Sequence[str], found: Sequence[str]) -> list[tuple[str, str]]:
    return [(indent(q), indent(f)) for q, f in zip(quoted, found, strict=False) if q.strip() and f.strip()]


def _uniform(pairs: Sequence[tuple[str, str]]) -> bool:
    for each in (pairs, [(f, q) for q, f in pairs]):
        prefix = each[0][0].removesuffix(each[0][1]) if each else ""
        if each and all(longer == prefix + shorter for longer, shorter in each):
            return True
    return False


def unit_of(lines: Iterable[str]) -> str:
    """Return the unit of indentation: the most frequent additional blanks of a line below a less indented line; empty
    if there are none."""
    indents = [indent(line) for line in lines if line.strip()]
    steps = Counter(own[len(above) :] for above, own in pairwise(indents) if own.startswith(above))
    return next((step for step, _ in steps.most_common() if len(step) in _WIDTHS), "")


def _conversion(pairs: Sequence[tuple[str, str]], quoted_unit: str, unit: str) -> Callable[[str], str]:
    """Return a function that converts indents of the quotation to indents of the text."""
    found = "".join(f for _, f in pairs)
    if found and ("\t" in found) != ("\t" in unit):  # the text has tabs and spaces, and here not those of its unit
        unit = "\t" if "\t" in found else ""
    in_tabs = ("\t" in unit) != ("\t" in quoted_unit)
    levels = [(q.count(quoted_unit or " "), q, f) for q, f in pairs]
    scaled = any(n for n, *_ in levels) and all(q == quoted_unit * n and f == unit * n for n, q, f in levels)
    if not quoted_unit or not unit or not (in_tabs or scaled or not _uniform(pairs)):
        return str

    def convert(blanks: str) -> str:
        rest = blanks
        while rest.startswith(quoted_unit):
            rest = rest[len(quoted_unit) :]
        return unit * ((len(blanks) - len(rest)) // len(quoted_unit)) + rest

    return convert


def _reindent_line(line: str, known: dict[str, str], convert: Callable[[str], str]) -> str:
    own = indent(line)
    if bases := [each for each in known if own.startswith(each)]:
        base = max(bases, key=len)
        return known[base] + convert(own[len(base) :]) + line[len(own) :]
    least = min(known, key=len)
    if least.startswith(own):  # indented less than all quoted lines
        removed = convert(least[len(own) :])
        return known[least][: max(0, len(known[least]) - len(removed))] + line[len(own) :]
    return line
