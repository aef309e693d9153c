"""A household ledger in plain text: read it, add it up, print it."""

from ledgerline.amounts import format_amount, parse_amount
from ledgerline.entries import Entry, ParseError, parse_ledger
from ledgerline.report import balances, by_tag, monthly, render_table

__all__ = [
    "Entry",
    "ParseError",
    "balances",
    "by_tag",
    "format_amount",
    "monthly",
    "parse_amount",
    "parse_ledger",
    "render_table",
]
