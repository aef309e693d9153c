"""Plans for answers: words that a random model is forced to write, with gaps that it fills itself."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hermes_testing.tiny_model.engine import Plan
from hermes_testing.tiny_model.folder import chat_format

from hermes_core.agents.compaction import REQUEST


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
            the whole text, as a model's own tokens often do. Special tokens stay whole.
    """
    plan: list[Collection[int] | None] = []
    for part in parts:
        if isinstance(part, Gap):
            plan += [part.among] * part.tokens
        else:
            pieces = [part] if cuts is None else _cut(part, _marks(tokenizer), cuts)
            plan += [(token,) for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return [*plan, (tokenizer.eos_token_id,)]


def _marks(tokenizer: Any) -> re.Pattern[str]:
    """Return what finds the special tokens in a text."""
    return re.compile("|".join(re.escape(str(each)) for each in tokenizer.added_tokens_decoder.values()))


def _cut(text: str, marks: re.Pattern[str], cuts: random.Random) -> list[str]:
    inside = {place for found in marks.finditer(text) for place in range(found.start() + 1, found.end())}
    places = {cuts.randrange(len(text) + 1) for _ in range(len(text) // 8)} - inside
    return [text[begin:end] for begin, end in pairwise(sorted({0, len(text), *places}))]


def ordinary(tokenizer: Any) -> frozenset[int]:
    """Return all tokens except the special ones. A sequence of them need not be UTF-8."""
    return frozenset(range(len(tokenizer))) - frozenset(tokenizer.added_tokens_decoder)


def letters(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are lower-case ASCII letters. A sequence of them is a word that never needs quotes."""
    words = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)))
    return frozenset(token for token, text in words if text.isascii() and text.isalpha() and text.islower())


class WildPlans:
    """Plans for answers as wild as models': thoughts of any bytes, several calls, broken and endless ones.

    Args:
        tokenizer: the model's.
        form: its chat format.
        turns: the number of answers after which nearly no call is made.
    """

    def __init__(self, tokenizer: Any, form: str, turns: int = 5) -> None:
        self._tokenizer, self._form, self._turns = tokenizer, chat_format(form), turns
        self._anything, self._words = ordinary(tokenizer), letters(tokenizer)

    def __call__(self, prompt: Sequence[int], chance: random.Random) -> Plan:
        """Return the plan of an answer to this prompt: calls until the last turn or so, then words; or a summary if
        one is asked for."""
        text = self._tokenizer.decode(prompt)
        turn = text.count(self._form.result)
        said: list[str | Gap] = []
        if self._form.thinks:
            said += ["<think>\n", Gap(chance.randrange(20), self._anything), "\n</think>\n\n"]
        elif self._form.calls_per_answer > 1:
            said += [Gap(chance.randrange(12), self._anything), "\n"]
        if REQUEST in text:
            said += ["I did ", Gap(chance.randrange(60), self._anything)]
        elif turn < 1 + chance.randrange(self._turns):
            for number in range(chance.choice((1, 1, self._form.calls_per_answer))):
                said += ["\n"] * bool(number) + self._call(chance)
        else:
            said += ["Done ", Gap(chance.choice((1, 5, 300)), self._anything)]
        return make_plan(self._tokenizer, said, chance if chance.random() < 0.7 else None)

    def _call(self, chance: random.Random) -> list[str | Gap]:
        command = json.dumps({"command": "echo WORD > out.txt # é 日本 \U0001f980"}, ensure_ascii=chance.random() < 0.5)
        before, after = self._form.call.format(name='"terminal"', arguments=command).split("WORD")
        if chance.random() < 0.1:
            after = after.replace('"}', "")  # broken: the model is told, and goes on
        return [before, Gap(1 + chance.randrange(4), self._words), after]
