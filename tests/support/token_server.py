"""A token-exact server that answers by a script, keeps what it saw and gave, and what of it a trainer must get."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from hermes_core.agents.exact.probe import TRIAL
from hermes_core.records.tokens import MASKED
from tests.support.http_server import listening
from tests.tiny_model.token_exactness import TrainedSequence, spans

PIECE = 7
"""The number of characters that are encoded by themselves: the answers have other tokens than their text would get."""


@dataclass(frozen=True)
class Given:
    """One completion, as the server gave it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = "stop"

    @property
    def whole(self) -> tuple[int, ...]:
        """The prompt and the completion."""
        return self.prompt + self.tokens


class TokenServer:
    """Speaks vLLM's `/generate`, and answers by a script: the text of the prompt in, the text of the answer out, or its
    tokens."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str | Sequence[int]]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.base_url = ""
        self.requests = 0
        self.logprobs = True
        self.trouble: int | str | None = None
        """A status to refuse everything with, or `hang`."""
        self._numbers = itertools.count()
        self.log: list[Given] = []
        """What it gave, without the answers that only try it out."""

    async def __aenter__(self) -> TokenServer:
        self._open = listening({"POST /generate": self._generate})
        self.base_url = await self._open.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.__aexit__(*error)

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        self.requests += 1
        body = await request.json()
        if self.trouble == "hang":
            await asyncio.sleep(60)
        if self.trouble is not None:
            return web.json_response({"error": "in trouble"}, status=int(self.trouble))
        given = self.given(body["prompt"]["prompt_token_ids"], body["max_tokens"])
        said = self.tokenizer.decode(given.tokens, skip_special_tokens=True)
        answer: dict[str, Any] = {"text": [said], "finish_reasons": [given.finish_reason]}
        if self.logprobs:
            pairs = zip(given.tokens, given.logprobs, strict=True)
            answer["logprobs"] = [[[{str(token): value}] for token, value in pairs]]
        return web.json_response(answer)

    def given(self, prompt: Sequence[int], max_tokens: int) -> Given:
        """Return the completion of a prompt, and keep it unless it only tries the server out."""
        asked = self.tokenizer.decode(prompt)
        said = self.script(asked)
        tokens = [*self._encode(said), self.tokenizer.eos_token_id] if isinstance(said, str) else list(said)
        reason = "stop" if len(tokens) <= max_tokens else "length"
        tokens = tokens[:max_tokens]
        logprobs = tuple(-(1 + next(self._numbers) % 997) / 1000 for _ in tokens)
        completion = Given(tuple(prompt), tuple(tokens), logprobs, reason)
        if asked != TRIAL:
            self.log.append(completion)
        return completion

    def _encode(self, text: str) -> list[int]:
        pieces = (text[begin : begin + PIECE] for begin in range(0, len(text), PIECE))
        return [token for piece in pieces for token in self.tokenizer.encode(piece, add_special_tokens=False)]


def differences(sequences: Iterable[TrainedSequence], log: Iterable[Given]) -> list[str]:
    """Return how the sequences differ from what a server gave: each is one prompt with its completion, and what is
    trained on in them are all completions, each once, under its own prompt and with its own logprobs."""
    given = Counter((each.prompt, each.tokens, each.logprobs) for each in log)
    wholes = {prompt + tokens for prompt, tokens, _ in given}
    trained: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = Counter()
    found = []
    for number, sequence in enumerate(sequences):
        tokens = tuple(sequence.tokens)
        if tokens not in wholes:
            found.append(f"sequence {number} is no prompt with its completion")
        if any(mask not in (MASKED, token) for mask, token in zip(sequence.masks, tokens, strict=True)):
            found.append(f"sequence {number} is trained on other tokens than it has")
        for begin, end in spans(sequence.masks):
            trained[tokens[:begin], tokens[begin:end], tuple(sequence.logprobs[begin:end])] += 1
    found += [f"{len(tokens)} tokens after {len(prompt)} were not given so" for prompt, tokens, _ in trained - given]
    found += [f"{len(tokens)} tokens after {len(prompt)} are missing" for prompt, tokens, _ in given - trained]
    return found


def continued(log: Sequence[Given]) -> int:
    """Return how many of the prompts begin with the whole of another completion: they go on from a known path."""
    known = {(len(each.whole), crc32(array("i", each.whole))) for each in log}
    lengths = sorted({length for length, _ in known})
    return sum(not known.isdisjoint(_heads(each.prompt, lengths)) for each in log)


def _heads(tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the checksum of each of the beginnings with these lengths, which are in order."""
    whole, begin, checksum = memoryview(array("i", tokens)), 0, 0
    for length in itertools.takewhile(lambda each: each <= len(tokens), lengths):
        begin, checksum = length, crc32(whole[begin:length], checksum)
        yield length, checksum
