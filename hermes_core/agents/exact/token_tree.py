"""The conversations of one rollout as a tree of messages, with the tokens that were sent and sampled for them.

A path from a root to an answer is exactly the prompt of one request and the answer that the server sampled. Paths are
never joined differently: each answer keeps a reference to the earlier answer from which its prompt went on.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from hermes_core.agents.base import MASKED, Message
from hermes_core.agents.canonical import Canonical, canonical, strip_spaces
from hermes_core.agents.exact.wires import Sampled
from hermes_core.agents.replies import ModelReply

PROMPT_LOGPROB = 1.0
"""The logprob of a token that the model did not write, or that another sequence trains on. No real logprob can have
this value."""


_LATEST = 32
"""Maximum number of answers, from the latest on, among which the cause of a fork is searched."""
_TOOLS = "tools"
_NO_TOOLS = Canonical(_TOOLS, "")


def forms_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Canonical, ...]:
    """Return the forms that identify a request: first a form of its tools, then the canonical form of each message."""
    if not tools:
        return (_NO_TOOLS, *map(canonical, messages))
    digest = hashlib.sha256(json.dumps(tools, sort_keys=True, default=str).encode()).hexdigest()
    return (Canonical(_TOOLS, digest), *map(canonical, messages))


class Transition(StrEnum):
    """How an answered request is related to earlier requests. All values from `AGAIN` on are forks: the request does
    not continue the tokens of all earlier answers."""

    ROOT = "root"
    """The request was the first."""
    CONTINUED = "continued"
    """The request was the first to go on from an earlier answer."""
    AGAIN = "again"
    """The same request was sampled once more."""
    DROPPED_ANSWER = "dropped_answer"
    """The request left out an answer, and went on from the messages before that answer."""
    DROPPED_THINKING = "dropped_thinking"
    """The request left out the thinking of an answer, and the tree has no `keep_thinking` (`TokenTree`)."""
    EDITED = "edited"
    """The request changed or left out a known message, or has an answer that the model never gave."""
    COMPACTION = "compaction"
    """The request began anew from the text of an answer."""
    PARALLEL = "parallel"
    """The request was in flight together with another request that went on from the same answer, or it began another
    conversation, such as a sub-agent's, a program's, or one that only asks for a title."""


@dataclass(frozen=True)
class Turn:
    """One answer inside a node: its position, and the data to check that nothing was changed afterwards."""

    start: int
    """The position of the answer's first token. All tokens before it are the answer's prompt."""
    sampled: array[int]
    """The server's token ids, as C integers."""
    logprobs: array[float]
    """The server's logprobs, one for each token."""
    prompt_checksum: int
    """CRC-32 of the tokens before `start`, as C integers, computed when they were sent."""
    finish_reason: str

    @property
    def stop(self) -> int:
        """Return the position after the answer's last token."""
        return self.start + len(self.sampled)


@dataclass(eq=False)
class Node:
    """One sequence for a trainer: arrays of the same length, not shifted, which need a tenth of the memory of lists."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    turns: list[Turn] = field(default_factory=list)
    """The answers to train on. An answer that several sequences contain is a turn of only one of them."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`finish_reason` of the last answer; `own`, whether the sequence is the agent's own conversation; `step`, the
    `Transition` of its first turn's request; `shared`, how many of its answers another sequence trains on."""

    @property
    def masked_tokens(self) -> array[int]:
        """Return the tokens, with -100 in place of each token that belongs to no turn. Computed anew each time."""
        spread = array("i", [MASKED]) * len(self.tokens)
        for turn in self.turns:
            spread[turn.start : turn.stop] = turn.sampled
        return spread

    @property
    def logprobs(self) -> array[float]:
        """Return the server's logprob of each token of a turn, and 1.0 for all others. Computed anew each time."""
        spread = array("d", [PROMPT_LOGPROB]) * len(self.tokens)
        for turn in self.turns:
            spread[turn.start : turn.stop] = turn.logprobs
        return spread


class TreeRequest(NamedTuple):
    """A request in the tree: the answer from which it goes on, and its messages after this answer."""

    before: AnswerNode | None
    """The last known answer of the request's history; None for a request that begins anew."""
    forms: tuple[Canonical, ...]
    """The form of the request's tools, then the forms of all its messages."""
    known: int
    """How many of `forms` are known: all up to and including the answer `before`."""
    asked_at: int
    """Number of answers in the tree when the request came."""
    summary: AnswerNode | None = None
    """For a request that begins anew and contains the text of an answer: this answer, whose conversation may go on with
    the request."""

    @property
    def rest(self) -> tuple[Canonical, ...]:
        """Return the forms of the messages after the answer `before`."""
        return self.forms[self.known :]


@dataclass(eq=False)
class AnswerNode:
    """An answer that was sampled, with the messages between the previous answer and this one."""

    number: int
    before: AnswerNode | None
    """The answer from which this answer's request went on; None if the request began anew."""
    heard: tuple[Canonical, ...]
    """The messages after the answer `before`, and last the answer itself."""
    prompt: array[int]
    """The tokens of the prompt after the answer `before`."""
    sampled: array[int]
    logprobs: array[float]
    prompt_checksum: int
    finish_reason: str
    step: Transition
    text: str
    """The answer's text, because the answer may be a summary; empty as soon as a request goes on from the answer."""
    after: list[AnswerNode] = field(default_factory=list)
    """The answers whose requests went on from this answer."""
    root: AnswerNode = field(init=False)
    """The first answer on its path."""

    def __post_init__(self) -> None:
        self.root = self if self.before is None else self.before.root

    @property
    def asked(self) -> tuple[Canonical, ...]:
        """Return the messages between the answer `before` and this answer."""
        return self.heard[:-1]

    @property
    def said(self) -> Canonical:
        """Return the answer itself."""
        return self.heard[-1]

    @property
    def path(self) -> list[AnswerNode]:
        """Return the answers from the root to this one."""
        path = [self]
        while (before := path[-1].before) is not None:
            path.append(before)
        return path[::-1]


class TokenTree:
    """The conversations of one rollout.

    Args:
        keep_thinking: whether a history that leaves out the thinking of an answer still goes on from this answer, with
            the thinking's tokens; otherwise the conversation forks.
    """

    def __init__(self, *, keep_thinking: bool = True) -> None:
        self._keep_thinking = keep_thinking
        self._roots: list[AnswerNode] = []
        self.answers: list[AnswerNode] = []
        """All answers, in the order of their arrival."""
        self.thinking_kept = 0
        """How many requests went on from answers whose thinking their history leaves out."""

    @property
    def forks(self) -> dict[str, int]:
        """Return the number of forks by cause."""
        steps = Counter(answer.step for answer in self.answers)
        return {
            str(step): steps[step]
            for step in Transition
            if steps[step] and step not in (Transition.ROOT, Transition.CONTINUED)
        }

    def after(self, before: AnswerNode | None) -> list[AnswerNode]:
        """Return the answers that were sampled after `before`; for None, the answers to requests that began anew."""
        return self._roots if before is None else before.after

    def ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TreeRequest:
        """Return the request with the answer from which it goes on: the last answer in the longest known history with
        which the request begins, or, of several equal histories, the newest. For a request without tools, the tools of
        the history do not matter."""
        forms = forms_of(messages, tools)
        best, known = None, 0
        under = [(self._roots, 0)]
        while under:
            answers, begin = under.pop()
            for answer in answers:
                end = begin + len(answer.heard)
                if end < len(forms) and self._same(answer.heard, forms[begin:end]):
                    under.append((answer.after, end))
                    if best is None or (end, answer.number) > (known, best.number):
                        best, known = answer, end
        asked = TreeRequest(best, forms, known, len(self.answers))
        if best is not None:
            return asked
        texts = [strip_spaces(form.text) for form in forms if form.role == "user"]
        newest = {answer.root: answer for answer in self.answers}.values()
        summaries = (
            (answer, strip_spaces(answer.text)) for answer in sorted(newest, key=lambda each: -each.number)[:_LATEST]
        )
        summary = next((each for each, found in summaries if found and any(found in text for text in texts)), None)
        return asked._replace(summary=summary)

    def add(
        self, asked: TreeRequest, prompt: array[int], sampled: Sampled, checksum: int, reply: ModelReply
    ) -> AnswerNode:
        """Add an answer to this request.

        Args:
            prompt: the tokens after the last known answer.
            checksum: CRC-32 of all tokens before the new answer.
        """
        before = asked.before
        answer = AnswerNode(
            number=len(self.answers),
            before=before,
            heard=(*asked.rest, canonical(reply.as_message())),
            prompt=prompt,
            sampled=array("i", sampled.tokens),
            logprobs=array("d", sampled.logprobs),
            prompt_checksum=checksum,
            finish_reason=sampled.finish_reason,
            step=self._step(asked),
            text="" if reply.calls else reply.content,
        )
        self.after(before).append(answer)
        self.answers.append(answer)
        if before is not None:
            before.text = ""
            self.thinking_kept += self._leaves_thinking_out(asked)
        return answer

    def nodes(self, own: Collection[int] | None = None) -> list[Node]:
        """Return a sequence for each path, in the order in which the paths' last answers came.

        Each answer is a turn of one sequence only: the newest that contains the answer, where sequences of the agent's
        own conversation come before all others.

        Args:
            own: the numbers of the answers of the agent's own conversation; None means all answers.
        """
        numbers = range(len(self.answers)) if own is None else own
        mine = {self.answers[number] for number in numbers}
        ends = [(answer, True) for answer in self.answers if answer in mine and mine.isdisjoint(answer.after)]
        ends += [(answer, False) for answer in self.answers if answer not in mine and not answer.after]
        taken: set[AnswerNode] = set()
        made = {}
        for end, is_own in sorted(ends, key=lambda each: (each[1], each[0].number), reverse=True):
            turns = {each for each in end.path if each not in taken and (each in mine) == is_own}
            taken |= turns
            made[end.number] = _node(end.path, turns, is_own)
        return [made[number] for number in sorted(made)]

    def _same(self, known: tuple[Canonical, ...], sent: tuple[Canonical, ...]) -> bool:
        return known == sent or all(map(self._is, known, sent))

    def _is(self, known: Canonical, sent: Canonical) -> bool:
        """Return whether a message that was sent is the known message, perhaps without its thinking."""
        if known == sent or (sent is _NO_TOOLS and known.role == _TOOLS):
            return True
        return self._keep_thinking and known.without_thinking == sent

    def _leaves_thinking_out(self, asked: TreeRequest) -> bool:
        assert asked.before is not None
        known = (form for answer in asked.before.path for form in answer.heard)
        return any(one.thinking and not other.thinking for one, other in zip(known, asked.forms, strict=False))

    def _step(self, asked: TreeRequest) -> Transition:
        """Return how a request, which has just been answered, is related to earlier requests."""
        before, rest = asked.before, asked.rest
        others = self.after(before)[-_LATEST:]
        if not others:
            return Transition.ROOT if before is None else Transition.CONTINUED
        common, _, near = max((_common(other.heard, rest), other.number, other) for other in others)
        if near.number >= asked.asked_at:
            return Transition.PARALLEL
        if asked.summary not in (None, near):
            return Transition.COMPACTION
        if common >= len(near.asked):
            if len(rest) == len(near.asked):
                return Transition.AGAIN
            following = rest[len(near.asked)]
            if following.role != "assistant":
                return Transition.DROPPED_ANSWER
            return Transition.DROPPED_THINKING if following == near.said.without_thinking else Transition.EDITED
        known = {answer.said.without_thinking for answer in self.answers}
        if before is not None or any(form.without_thinking in known for form in rest):
            return Transition.EDITED
        return Transition.PARALLEL


def _common(known: Sequence[Canonical], sent: Sequence[Canonical]) -> int:
    """Return the number of messages at the beginning of both sequences that are the same."""
    pairs = enumerate(zip(known, sent, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(known), len(sent)))


def tokens_after(answer: AnswerNode | None) -> array[int]:
    """Return all tokens up to the end of this answer."""
    tokens = array("i")
    for each in answer.path if answer is not None else ():
        tokens.extend(each.prompt)
        tokens.extend(each.sampled)
    return tokens


def _node(path: Sequence[AnswerNode], turns: Collection[AnswerNode], own: bool) -> Node:
    """Return the sequence of a path. Only the answers in `turns` become its turns."""
    node = Node()
    for answer in path:
        node.tokens.extend(answer.prompt)
        if answer in turns:
            start, told = len(node.tokens), (answer.sampled, answer.logprobs, answer.prompt_checksum)
            node.turns.append(Turn(start, *told, answer.finish_reason))
        node.tokens.extend(answer.sampled)
    first = next(answer for answer in path if answer in turns)
    node.metadata = {
        "finish_reason": path[-1].finish_reason,
        "own": own,
        "step": str(first.step),
        "shared": len(path) - len(turns),
    }
    return node
