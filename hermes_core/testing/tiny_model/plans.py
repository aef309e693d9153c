"""Plans for answers: words that a random model is forced to write, with gaps that it fills itself."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hermes_core.testing.tiny_model.engine import Plan


@dataclass(frozen=True)
class Gap:
    """A gap for tokens that the model draws itself."""

    tokens: int
    among: Collection[int] | None = None
    """The tokens that it draws from; None means all of them, including the end of turn."""


def make_plan(tokenizer: Any, parts: Sequence[str | Gap], cuts: random.Random | None = None) -> Plan:
    """Return the plan for an answer made of `parts`, followed by the end of turn.

    Args:
        cuts: cuts the text at random places before it is tokenized, so that the tokens differ from the tokenizer's for
            the whole text, as a model's own tokens often do.
    """
    plan: list[Collection[int] | None] = []
    for part in parts:
        if isinstance(part, Gap):
            plan += [part.among] * part.tokens
        else:
            pieces = [part] if cuts is None else _cut(part, cuts)
            plan += [(token,) for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return [*plan, (tokenizer.eos_token_id,)]


def _cut(text: str, cuts: random.Random) -> list[str]:
    places = sorted({0, len(text), *(cuts.randrange(len(text) + 1) for _ in range(len(text) // 8))})
    return [text[begin:end] for begin, end in pairwise(places)]


def ordinary(tokenizer: Any) -> frozenset[int]:
    """Return all tokens except the special ones. A sequence of them need not be UTF-8."""
    return frozenset(range(len(tokenizer))) - frozenset(tokenizer.added_tokens_decoder)


def letters(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are lower-case ASCII letters. A sequence of them is a word that never needs quotes."""
    words = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)))
    return frozenset(token for token, text in words if text.isascii() and text.isalpha() and text.islower())
