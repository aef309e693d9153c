"""Lines of a ledger as entries."""

from dataclasses import dataclass
from datetime import date

from ledgerline.amounts import parse_amount


class ParseError(ValueError):
    """A line that is no entry; `line` is its number, the first being 1."""

    def __init__(self, line, message):
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True)
class Entry:
    """One movement of money."""

    day: date
    cents: int
    what: str
    tags: tuple = ()

    @property
    def month(self):
        """The month as `2024-03`."""
        return f"{self.day:%Y-%m}"


def parse_ledger(text):
    """The entries of a ledger, in the order of their days; entries of one day stay as they are written."""
    entries = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith(";"):
            continue
        entries.append(parse_entry(line, number))
    return sorted(entries, key=lambda entry: entry.day)


def parse_entry(line, number=1):
    """The entry of one line."""
    words = line.split()
    if len(words) < 2:
        raise ParseError(number, "a date and an amount are needed")
    try:
        day = date.fromisoformat(words[0])
    except ValueError:
        raise ParseError(number, f"not a date: {words[0]!r}") from None
    try:
        cents = parse_amount(words[1])
    except ValueError as error:
        raise ParseError(number, str(error)) from None
    tags = []
    what = []
    for word in words[2:]:
        if word.startswith("#") and len(word) > 1:
            tag = word[1:].lower()
            if tag not in tags:
                tags.append(tag)
        else:
            what.append(word)
    return Entry(day, cents, " ".join(what), tuple(tags))
