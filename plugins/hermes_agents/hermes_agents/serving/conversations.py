"""Sorts the requests and answers of a slot into conversations: the agent's own, and others, such as conversations of
sub-agents, requests for a title, and requests that the model has sent from its own shell.

Both the record and the training data are made from the agent's own conversation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from hermes_core import AgentResult, CallError, CallErrorKind, Message, ToolError
from hermes_core.agents.canonical import Canonical, canonical, join_texts, strip_spaces

Place = Literal["root", "continues", "fork"]
"""The place of a call in its conversation: the call begins the conversation (`root`), continues it at its end, or
branches off before its end (`fork`)."""

_FILLED = (
    *("messages", "turns", "calls", "turns_used", "reasoning_per_turn", "tool_errors"),
    *("tool_calls_attempted", "tool_calls_schema_valid", "tool_calls_executed_ok", "tool_calls_exec_error"),
    "tool_schemas",
)
"""The fields of an `AgentResult` that are made from the agent's own conversation."""

_SHORTEST_SUMMARY = 12
"""Minimum number of characters, without white space, of an answer that is recognised in a later message."""
_LATEST = 32
"""Maximum number of answers that are searched for in a request's messages."""


@dataclass(frozen=True)
class AnswerDetails:
    """The details of one answer, beside its message."""

    number: int
    """The number of the answer's call among all calls, in the order of their arrival."""
    offered: frozenset[str]
    """The tools that the model was offered."""
    about: Mapping[str, Any]
    """Fields of the answer's `TurnRecord`."""
    valid_calls: int = 0
    """The number of the answer's tool calls that are well-formed."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of the tools that were offered."""
    kept: int | None = None
    """The number under which the server keeps the answer's tokens (`ModelReply.number`)."""


@dataclass(eq=False)
class MessageNode:
    """A message in the tree of conversations; its path has the messages before it."""

    message: Message
    form: Canonical
    before: MessageNode | None
    sampled: AnswerDetails | None = None
    """Set for an answer of the model."""
    heard_at: float = 0.0
    """When the message arrived, in seconds since the epoch."""
    failed: bool = False
    """For a tool's message: whether the agent marks it as an error."""
    after: dict[Canonical, MessageNode] = field(default_factory=dict)

    def path(self) -> list[MessageNode]:
        """Return the messages of the conversation up to this one."""
        steps, step = [self], self.before
        while step is not None:
            steps.append(step)
            step = step.before
        return steps[-2::-1]  # without the root node, which is no message

    def below(self) -> Iterator[MessageNode]:
        """Yield all messages below this one, on all branches."""
        waiting = list(self.after.values())
        while waiting:
            step = waiting.pop()
            yield step
            waiting.extend({id(each): each for each in step.after.values()}.values())


@dataclass(eq=False)
class _Own:
    """An answer that may belong to the agent's own conversation."""

    number: int
    """The answer's number in this conversation."""
    step: MessageNode
    before: _Own | None
    """The last answer in this answer's request; None if this answer begins the conversation."""
    asked: Sequence[MessageNode]
    """The messages of this answer's request after `before`."""
    anew: bool
    """Whether the request begins anew from a summary, so that it has no answer, but contains the text of `before`."""
    counts: bool
    """Whether the answer counts for the length of the conversation. An answer to a request without tools does not,
    because it is a title or a summary."""
    answers: int
    """Number of answers that count, up to and including this one."""
    after: list[_Own] = field(default_factory=list)

    def asks_less(self, other: _Own) -> bool:
        """Return whether this answer's request is only a beginning of the other answer's request."""
        mine, theirs = ([step.form for step in each.asked] for each in (self, other))
        return self.anew == other.anew and theirs[: len(mine)] == mine


class _Going(NamedTuple):
    """The place at which a request continues the agent's own conversation."""

    before: _Own | None
    """The answer that the request continues; None if it begins like the conversation."""
    known: int = 0
    """Number of the request's messages up to the answer `before`."""
    summary: MessageNode | None = None
    """The summary from which the request begins anew, and whose text it contains; None if it does not begin anew."""


class _Aside(NamedTuple):
    """An answer of another conversation that may be a summary of the agent's own conversation."""

    step: MessageNode
    of_task: bool
    """Whether the answer's request had the text of the task or of an earlier summary."""


class _Thread:
    """A conversation that may be the agent's own: its first request, and all that continue it, on all branches.

    A request continues the conversation if each answer in the request is an answer of the conversation, or a part of
    one, or stands in the place of one that says nothing; the agent may have changed all other messages. If any answer
    in the request is unknown, the request belongs to another conversation. A request without answers continues the
    conversation if it has all messages of the first request, or the text of a summary. The summary may be in the
    request as an answer, and the agent may have added an answer of its own after the summary, such as thanks.
    """

    def __init__(self, opening: Sequence[Canonical], step: MessageNode) -> None:
        self._opening = tuple(opening)
        self._begins_with = frozenset(opening)
        self._said = strip_spaces(join_texts([form.text for form in opening]))
        self._by_step: dict[MessageNode, _Own] = {}
        self._by_form: dict[Canonical, list[_Own]] = {}
        self._first: list[_Own] = []
        self.offers = _offers(step)
        """Whether the first request offers tools."""
        self.answers: list[_Own] = []
        self.add(_Going(None), step)

    def goes_on(
        self, forms: Sequence[Canonical], known: Sequence[MessageNode], asides: Sequence[_Aside], *, has_task: bool
    ) -> _Going | None:
        """Return the place at which a request continues this conversation; None if it belongs to another one.

        Args:
            forms: the canonical forms of the request's messages.
            known: the nodes of the request's first messages, as far as they are known.
            asides: answers of other conversations that may be summaries of this one.
            has_task: whether the request has the text of the task before its first answer.
        """
        first = next((index for index, form in enumerate(forms) if self._is_answer(form)), len(forms))
        going = self._after_answers(forms, known, first)
        if going is not None and going.before is not None:
            return going
        alike = tuple(forms[:1]) == self._opening[:1]
        likely = [each.step for each in asides if has_task or (alike and each.of_task)]
        summary = self._summary_in(forms[: first + 1], known, likely)
        if summary is not None and (after := self._after_answers(forms, known, first + 1)) is not None:
            return after if after.before is not None else _Going(self._by_step.get(summary), 0, summary)
        return going if tuple(forms[: len(self._opening)]) == self._opening else None

    def _is_answer(self, form: Canonical) -> bool:
        return form.role == "assistant" and form not in self._begins_with

    def _after_answers(self, forms: Sequence[Canonical], known: Sequence[MessageNode], begin: int) -> _Going | None:
        """Return the place at which a request whose answers begin at message `begin` continues this conversation; None
        if one of these answers is not an answer of this conversation."""
        last, end = None, 0
        for index in range(begin, len(forms)):
            if self._is_answer(forms[index]):
                last = self._find_answer(forms[index], known[index] if index < len(known) else None, last)
                if last is None:
                    return None
                end = index + 1
        return _Going(last, end)

    def _summary_in(
        self, forms: Sequence[Canonical], known: Sequence[MessageNode], likely: Sequence[MessageNode]
    ) -> MessageNode | None:
        """Return the summary whose text one of these messages contains; None if there is no such summary.

        Args:
            forms: the canonical forms of a request's messages up to its first answer, which may be the summary.
            known: the nodes of the request's first messages, as far as they are known.
            likely: answers of other conversations that may be summaries of this one.
        """
        told = [
            (strip_spaces(form.text), known[index] if index < len(known) else None)
            for index, form in enumerate(forms)
            if form.role in ("user", "assistant") and form not in self._begins_with
        ]
        own = [each.step for each in self.answers if not each.step.form.calls]
        for summary in (*own[: -_LATEST - 1 : -1], *likely[: -_LATEST - 1 : -1]):
            text = strip_spaces(summary.form.text)
            # A request in which the summary itself is an answer continues the summary's conversation, not this one.
            holds = any(text in each and step is not summary for each, step in told)
            if len(text) >= _SHORTEST_SUMMARY and holds and text not in self._said:
                return summary
        return None

    def add(self, going: _Going, step: MessageNode) -> None:
        """Add the answer to a request."""
        before, summary = going.before, going.summary
        if summary is not None and before is None:  # the summary was written in another conversation
            end = self.main[-1]
            before = self._append(end, [*_find_unanswered(end.step), *summary.path()[-2:-1]], summary)
        asked = step.path()[going.known : -1]
        self._append(before, asked, step, anew=summary is not None)

    def _append(
        self, before: _Own | None, asked: Sequence[MessageNode], step: MessageNode, *, anew: bool = False
    ) -> _Own:
        counts = _offers(step) or not self.offers or before is None or before.step in step.path()
        answers = (before.answers if before is not None else 0) + counts
        own = _Own(len(self.answers), step, before, asked, anew, counts, answers)
        self.answers.append(own)
        (self._first if before is None else before.after).append(own)
        self._by_step[step] = own
        for form in _as_sent_back(step):
            self._by_form.setdefault(form, []).append(own)
        return own

    @property
    def main(self) -> list[_Own]:
        """Return the branch with the most answers; of several such branches, the newest."""
        end: _Own | None = max(self.answers, key=lambda own: (own.answers, own.counts, own.number))
        way = []
        while end is not None:
            way.append(end)
            end = end.before
        return way[::-1]

    @property
    def trainable(self) -> list[_Own]:
        """Return the answers on the main branch, and the answers that the agent rejected.

        A rejected answer is on another branch, and its request is equal to the request of the answer that the main
        branch has at this place, or is a beginning of this request.
        """
        main = self.main
        following = {own.before: own for own in main}
        return [own for own in self.answers if own.before in following and own.asks_less(following[own.before])]

    def _find_answer(self, form: Canonical, step: MessageNode | None, last: _Own | None) -> _Own | None:
        """Return the answer of this conversation that a request's message repeats; None if it repeats none.

        Args:
            form: the canonical form of the message.
            step: the node of the message, if the message is known with the same history.
            last: the last answer before the message.
        """
        if step is not None and step in self._by_step:
            return self._by_step[step]
        given = [own for own in self._by_form.get(form, ()) if last is None or own.number > last.number]
        here = self._first if last is None else last.after
        parts = [own for own in here if _is_part(form, own.step.form) or _fills_in(form, own.step.form)]
        return next((own for own in reversed(given) if own.before is last), next(reversed([*parts, *given]), None))


class Conversations:
    """All conversations of a slot, as a tree of messages.

    A request continues a known path if its messages have the canonical forms of this path, even if the agent has
    dropped the model's thinking.

    Args:
        text: the task's text. The agent's own conversation begins with the first request that has this text in a user's
            message before any answer. If this request offers no tools, it may only ask for a title. So the first
            request with this text and with tools begins a second candidate, and the candidate with more answers is the
            agent's own.
    """

    def __init__(self, text: str) -> None:
        self._text = strip_spaces(text)
        self._top = MessageNode({}, Canonical("", ""), None)
        self._lines: list[_Thread] = []
        """The candidates for the agent's own conversation: the first conversation, and the first with tools."""
        self._asides: list[_Aside] = []
        """Answers to requests without tools that belong to no candidate, and that may be summaries."""
        self.places: dict[Place, int] = {"root": 0, "continues": 0, "fork": 0}

    def find_known(self, forms: Sequence[Canonical]) -> list[MessageNode]:
        """Return the nodes of the longest known path with which these messages begin."""
        step, found = self._top, []
        for form in forms:
            after = step.after.get(form)
            if after is None:
                break
            found.append(step := after)
        return found

    def place(self, forms: Sequence[Canonical]) -> Place:
        """Return the place of a request with these messages among the answered requests."""
        known = self.find_known(forms)
        answers = [step for step in known if step.sampled is not None]
        if answers:
            return "fork" if any(step.sampled for step in answers[-1].below()) else "continues"
        answered = any(after.sampled for step in known for after in step.after.values())
        going = (self._goes_on(line, forms, known) for line in self._lines)
        # A request that lacks the answer to its first messages is a fork, unless it begins anew from a summary.
        return "root" if not answered or any(each and each.summary for each in going) else "fork"

    def is_own(self, forms: Sequence[Canonical]) -> bool:
        """Return whether a request with these messages belongs to the agent's own conversation."""
        known = self.find_known(forms)
        if any(self._goes_on(line, forms, known) is not None for line in self._lines):
            return True
        return not any(line.offers for line in self._lines) and self._has_task(forms, known)

    def add(
        self,
        messages: Sequence[Message],
        forms: Sequence[Canonical],
        answer: Message,
        sampled: AnswerDetails,
        *,
        heard_at: float = 0.0,
        failed: frozenset[str] = frozenset(),
    ) -> Place:
        """Add a request and its answer. Return the request's place among the answered requests.

        Args:
            messages: the request's messages.
            forms: their canonical forms.
            answer: the model's answer.
            sampled: the details of the answer.
            heard_at: when the request came.
            failed: the ids of the calls whose results the request marks as errors.
        """
        place = self.place(forms)
        self.places[place] += 1
        known = self.find_known(forms)
        places = [(line, self._goes_on(line, forms, known)) for line in self._lines]
        step = self.hear(messages, forms, heard_at=heard_at, failed=failed)
        form = canonical(answer)
        new = MessageNode(answer, form, step, sampled)
        has_task = self._has_task(forms, known)
        going = [(line, there) for line, there in places if there is not None]
        lines = [(line, there) for line, there in going if there.summary is None or _offers(new) or not line.offers]
        for line, there in lines:
            line.add(there, new)
        if not going and self._may_begin(new) and has_task:
            self._lines.append(_Thread(forms, new))
        elif not lines and not sampled.offered and not form.calls:
            self._asides.append(_Aside(new, has_task or bool(going)))
        old = step.after.get(form)
        if old is None or old.sampled is None or not old.after:  # else messages stay below the old one
            step.after[form] = step.after[form.without_thinking] = new
        return place

    def hear(
        self,
        messages: Sequence[Message],
        forms: Sequence[Canonical],
        *,
        heard_at: float = 0.0,
        failed: frozenset[str] = frozenset(),
    ) -> MessageNode:
        """Add a request without an answer, with the arguments of `add`. Return the node of its last message."""
        step = self._top
        for message, form in zip(messages, forms, strict=True):
            after = step.after.get(form)
            if after is None:
                wrong = message["role"] == "tool" and message.get("tool_call_id") in failed
                after = MessageNode(message, form, step, heard_at=heard_at, failed=wrong)
                step.after[form] = after
            step = after
        return step

    def ends_with(self, number: int) -> bool:
        """Return whether the agent's own conversation ends with the answer to the call of this number."""
        end = self._own.main[-1].step.sampled if self._lines else None
        return end is not None and end.number == number

    def trainable_answers(self) -> set[int]:
        """Return the numbers (`ModelReply.number`) of the answers that may be trained on, out of the answers whose
        tokens the server keeps."""
        steps = [own.step for own in self._own.trainable] if self._lines else []
        return {step.sampled.kept for step in steps if step.sampled is not None and step.sampled.kept is not None}

    def fill(self, result: AgentResult) -> None:
        """Write the messages, turns and calls of the agent's own conversation into a result, if the conversation has
        begun. Messages that the agent changed later are written in their first form."""
        if not self._lines:
            return
        main = self._own.main
        opening = main[0].asked
        steps: list[MessageNode] = []
        for own in main:
            steps += _gone_on(own.asked, opening) if own.anew else own.asked
            steps.append(own.step)
        steps += _find_unanswered(main[-1].step)
        fresh = AgentResult()
        _add(fresh, steps, {own.before.step for own in main if own.anew and own.before is not None})
        fresh.tool_calls_attempted = len(fresh.calls)
        offers = [own.step.sampled.tools for own in main if own.step.sampled is not None and _offers(own.step)]
        fresh.tool_schemas = offers[-1] if offers else ()
        for name in _FILLED:
            setattr(result, name, getattr(fresh, name))

    @property
    def _own(self) -> _Thread:
        """Return the agent's own conversation."""
        return max(self._lines, key=lambda line: (line.main[-1].answers, line.offers))

    def _goes_on(self, line: _Thread, forms: Sequence[Canonical], known: Sequence[MessageNode]) -> _Going | None:
        return line.goes_on(forms, known, self._asides, has_task=self._has_task(forms, known))

    def _may_begin(self, answer: MessageNode) -> bool:
        """Return whether the agent's own conversation may begin with this answer."""
        return not self._lines or (_offers(answer) and not any(line.offers for line in self._lines))

    def _has_task(self, forms: Sequence[Canonical], known: Sequence[MessageNode]) -> bool:
        """Return whether a user's message has the text of the task before the first answer."""
        first = next((index for index, step in enumerate(known) if step.sampled is not None), len(forms))
        return any(form.role == "user" and self._text in strip_spaces(form.text) for form in forms[:first])


def _offers(answer: MessageNode) -> bool:
    """Return whether the model was offered tools for an answer."""
    return bool(answer.sampled and answer.sampled.offered)


def _as_sent_back(answer: MessageNode) -> set[Canonical]:
    """Return the forms in which an agent may send an answer back: unchanged, without thinking, and joined with the
    assistant's message before the answer."""
    form, before = answer.form, answer.before
    forms = {form, form.without_thinking}
    if before is not None and before.form.role == "assistant" and not before.form.calls:
        forms |= {replace(each, text=f"{before.form.text}{each.text}".strip()) for each in forms}
    return forms


def _is_part(form: Canonical, given: Canonical) -> bool:
    """Return whether a message may be a part of the answer `given`, whose rest the agent has left out."""
    same = form.thinking in ("", given.thinking)
    return same and form.text in given.text and Counter(form.calls) <= Counter(given.calls)


def _fills_in(form: Canonical, given: Canonical) -> bool:
    """Return whether a message may be the agent's own words in the place of an answer `given` that says nothing and
    calls nothing, such as hermes-agent's `(empty)`."""
    return not (given.text.strip() or given.calls or form.calls)


def _find_unanswered(step: MessageNode) -> list[MessageNode]:
    """Return the messages after the last answer, which the model has not answered."""
    told: list[MessageNode] = []
    while after := [each for each in step.after.values() if each.message["role"] != "assistant"]:
        step = after[-1]
        told.append(step)
    return told


def _gone_on(asked: Sequence[MessageNode], opening: Sequence[MessageNode]) -> list[MessageNode]:
    """Return the messages of a request that goes on from a summary, in the form that our own compaction records.

    All texts of the user become one message. The conversation's first messages are left out, unless the system's
    message has changed.
    """
    system = [step for step in asked if step.form.role == "system"]
    anew = [step.form for step in system] != [step.form for step in opening if step.form.role == "system"]
    known = set() if anew else {step.form for step in opening}
    last = next((step.form for step in reversed(opening) if step.form.role == "user"), None)
    told = [step for step in asked if step.form.role == "user" and (step.form not in known or step.form == last)]
    message: Message = {"role": "user", "content": "\n\n".join(step.form.text for step in told)}
    said = MessageNode(message, canonical(message), None, heard_at=told[-1].heard_at if told else 0.0)
    return [*system, said] if anew else [said]


def _add(result: AgentResult, steps: Sequence[MessageNode], summaries: Collection[MessageNode]) -> None:
    """Add messages to a result. The result of a call replaces the note that the call was interrupted."""
    open_calls: dict[str, int] = {}
    offered: frozenset[str] = frozenset()
    for step in steps:
        message = step.message
        if (sampled := step.sampled) is not None:
            reasoning = message.get("reasoning_content")
            about = {**sampled.about, "compacted": step in summaries}
            numbers = result.add_turn(dict(message), reasoning=reasoning, **about)
            open_calls = {result.calls[number].id: number for number in numbers}
            offered = sampled.offered
            result.tool_calls_schema_valid += sampled.valid_calls
        elif message["role"] == "tool" and message.get("tool_call_id") in open_calls:
            _answer_call(result, open_calls.pop(message["tool_call_id"]), step, offered)
        else:
            result.messages.append(dict(message))


def _answer_call(result: AgentResult, number: int, step: MessageNode, offered: frozenset[str]) -> None:
    """Record the result of a call. The agent ran the call itself, so its recorded time is from the model's answer to
    the next request."""
    call = result.calls[number]
    text = step.form.text
    kind = CallErrorKind.FAILED if call.name in offered else CallErrorKind.UNKNOWN_TOOL
    error = CallError(kind, text[:2000]) if step.failed else None
    result.calls[number] = replace(call, started=result.turns[call.turn].ended, ended=step.heard_at, error=error)
    result.messages[call.message] = {**step.message, "name": call.name}
    if error is None:
        result.tool_calls_executed_ok += 1
        return
    result.tool_calls_exec_error += 1
    result.tool_errors.append(ToolError(call.turn + 1, call.name, call.arguments, error.message, text))


def task_text(messages: Sequence[Message]) -> str:
    """Return the task's text in a prompt, which is the text of the user's last message."""
    texts = [canonical(message).text for message in messages if message["role"] == "user"]
    return join_texts(texts[-1:])
