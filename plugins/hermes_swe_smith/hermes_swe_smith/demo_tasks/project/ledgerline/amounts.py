"""Amounts of money as whole cents: from text and back."""

import re

_AMOUNT = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<cents>\d{1,2}))?")


def parse_amount(text):
    """The cents that an amount like `-1,234.50` stands for; one in brackets is negative, as accountants write it."""
    text = text.strip()
    negative = text.startswith("(") and text.endswith(")")
    if negative:
        text = text[1:-1].strip()
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"not an amount: {text!r}")
    cents = (match["cents"] or "").ljust(2, "0")
    value = int(match["whole"].replace(",", "")) * 100 + int(cents)
    if match["sign"] == "-":
        value = -value
    return -value if negative else value


def format_amount(cents, *, plus=False):
    """The amount as text with two decimals and thousands separated; `plus` puts a sign before positive ones too."""
    whole, rest = divmod(abs(cents), 100)
    sign = "-" if cents < 0 else "+" if plus and cents > 0 else ""
    return f"{sign}{whole:,}.{rest:02}"
