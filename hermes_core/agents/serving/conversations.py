"""What the requests and answers of a slot are to each other: which belong to the agent's own conversation, and which to
others, such as those of its sub-agents, titles, and calls that the model's own shell has forged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hermes_core.agents.base import AgentResult, CallError, CallErrorKind, Message, ToolError
from hermes_core.agents.canonical import Canonical, canonical, joined

Place = Literal["root", "continues", "fork"]
"""What a call is to those before it: it begins a conversation, continues one where it ended, or leaves one before its
end."""

_FILLED = (
    *("messages", "turns", "calls", "turns_used", "reasoning_per_turn", "tool_errors"),
    *("tool_calls_attempted", "tool_calls_schema_valid", "tool_calls_executed_ok", "tool_calls_exec_error"),
    "tool_schemas",
)
"""What of an `AgentResult` follows from the agent's own conversation."""

_SHORTEST_SUMMARY = 16
"""Characters of an answer from which it is recognised in a later message."""


@dataclass(frozen=True)
class Sampled:
    """What is known of one answer, besides its message."""

    number: int
    """The place of its call among all calls, in the order in which they came."""
    offered: frozenset[str]
    """The tools that the model was offered."""
    about: Mapping[str, Any]
    """Fields of its `TurnRecord`."""
    valid_calls: int = 0
    """How many of its calls are well-formed."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of what was offered."""


@dataclass(eq=False)
class Step:
    """A message after those before it."""

    message: Message
    form: Canonical
    before: Step | None
    sampled: Sampled | None = None
    """Set for an answer of the model."""
    answers: int = 0
    """How many answers of the model there are up to here."""
    heard_at: float = 0.0
    """When it came, in seconds since the epoch."""
    failed: bool = False
    """For a tool's message: whether the agent calls it an error."""
    after: dict[Canonical, Step] = field(default_factory=dict)

    def path(self) -> list[Step]:
        """Return the messages up to this one."""
        steps, step = [self], self.before
        while step is not None:
            steps.append(step)
            step = step.before
        return steps[-2::-1]  # without what all conversations begin after

    def following(self) -> Iterator[Step]:
        """Yield this message and all that came after it, on all ways."""
        waiting = [self]
        while waiting:
            step = waiting.pop()
            yield step
            waiting.extend({id(each): each for each in step.after.values()}.values())


class Conversations:
    """All conversations of a slot, as a tree of messages.

    A request whose messages are the canonical forms of those of a known path continues it, also if the agent has
    dropped the model's thinking.

    Args:
        text: the task's text. The conversation of which a user's message holds it before the first answer is the
            agent's own. Of several, it is the first that offers tools: a title is asked for without. It goes on in one
            that begins with a summary of it, which was asked for without tools.
    """

    def __init__(self, text: str) -> None:
        self._text = _squeezed(text)
        self._top = Step({}, Canonical("", ""), None)
        self._summaries: list[Step] = []
        """Answers that were asked for without tools, and may be summaries."""
        self._own_summaries: list[str] = []
        """The texts of those that the agent's own conversation goes on from, wherever the task's text is left."""
        self.places: dict[Place, int] = {"root": 0, "continues": 0, "fork": 0}

    def known(self, forms: Sequence[Canonical]) -> list[Step]:
        """Return the known messages that these begin with."""
        step, found = self._top, []
        for form in forms:
            after = step.after.get(form)
            if after is None:
                break
            found.append(step := after)
        return found

    def place(self, forms: Sequence[Canonical]) -> Place:
        """Return what a request with these messages is to those that were answered."""
        known = self.known(forms)
        answers = [step for step in known if step.sampled is not None]
        if answers:
            return "fork" if any(step.sampled for step in _below(answers[-1])) else "continues"
        answered = any(after.sampled for step in known for after in step.after.values())
        # Without the answer to what it begins with it is a fork, unless it begins with a summary of more than that.
        return "fork" if answered and self._summary_in(forms) is None else "root"

    def is_own(self, forms: Sequence[Canonical]) -> bool:
        """Return whether a request with these messages belongs to the agent's own conversation."""
        if not self._begins_so(forms):
            return False
        begin = self._begin(self._roots())
        if begin is None or not _offers(begin) or self._summary_in(forms) is not None:
            return True
        return begin.before in self.known(forms)

    def add(
        self,
        messages: Sequence[Message],
        forms: Sequence[Canonical],
        answer: Message,
        sampled: Sampled,
        *,
        heard_at: float = 0.0,
        failed: frozenset[str] = frozenset(),
    ) -> Place:
        """Add a request and its answer. Return what it is to the others.

        Args:
            messages: the request's.
            forms: their canonical forms.
            answer: the model's.
            sampled: what is known of it.
            heard_at: when the request came.
            failed: the ids of the calls whose results the request calls errors.
        """
        place = self.place(forms)
        self.places[place] += 1
        step = self.hear(messages, forms, heard_at=heard_at, failed=failed)
        form = canonical(answer)
        new = Step(answer, form, step, sampled, step.answers + 1)
        old = step.after.get(form)
        if old is not None and old.sampled is not None and old.after:
            return place  # the same words once more: what follows them stays where it is
        step.after[form] = step.after[form.without_thinking] = new
        if not sampled.offered and len(form.text) >= _SHORTEST_SUMMARY:
            self._summaries.append(new)
            self._own_summaries += [form.text] if self._begins_so(forms) else []
        return place

    def hear(
        self,
        messages: Sequence[Message],
        forms: Sequence[Canonical],
        *,
        heard_at: float = 0.0,
        failed: frozenset[str] = frozenset(),
    ) -> Step:
        """Add a request without an answer; return its last message. The arguments are those of `add`."""
        step = self._top
        for message, form in zip(messages, forms, strict=True):
            after = step.after.get(form)
            if after is None:
                wrong = message["role"] == "tool" and message.get("tool_call_id") in failed
                after = Step(message, form, step, answers=step.answers, heard_at=heard_at, failed=wrong)
                step.after[form] = after
            step = after
        return step

    def own_path(self) -> list[Step]:
        """Return the agent's own conversation, up to its newest end; empty if it has not begun."""
        return [step for part in self._own_parts() for step in part]

    def fill(self, result: AgentResult) -> None:
        """Make the agent's own conversation, if it has begun, that of a result: its messages, turns and calls."""
        fresh = AgentResult()
        parts = self._own_parts()
        if not parts:
            return
        for number, part in enumerate(parts):
            summary = part[-1] if number < len(parts) - 1 else None
            _add_part(fresh, _gone_on(part, parts[0]) if number else part, summary)
        fresh.tool_calls_attempted = len(fresh.calls)
        offers = [step.sampled.tools for part in parts for step in part if step.sampled is not None and _offers(step)]
        fresh.tool_schemas = offers[-1] if offers else ()
        for name in _FILLED:
            setattr(result, name, getattr(fresh, name))

    def _begins_so(self, forms: Sequence[Canonical]) -> bool:
        """Return whether these messages have the task's text, or a summary, before their first answer."""
        answers = [index for index, step in enumerate(self.known(forms)) if step.sampled is not None]
        return any(map(self._holds, forms[: answers[0] if answers else len(forms)]))

    def _holds(self, form: Canonical) -> bool:
        """Return whether the message begins a conversation of the agent's own: with the task, or with a summary."""
        if form.role != "user":
            return False
        return self._text in _squeezed(form.text) or any(each in form.text for each in self._own_summaries)

    def _roots(self) -> list[Step]:
        """Return the first answers of all conversations that may be the agent's own, oldest first."""
        found = []
        waiting = [(self._top, False)]
        while waiting:
            step, holds = waiting.pop()
            for after in {id(each): each for each in step.after.values()}.values():
                if after.sampled is None:
                    waiting.append((after, holds or self._holds(after.form)))
                elif holds:
                    found.append(after)
        return sorted(found, key=_number)

    def _begin(self, roots: Sequence[Step]) -> Step | None:
        """Return the first answer of the agent's own conversation."""
        return next(filter(_offers, roots), roots[0] if roots else None)

    def _own_parts(self) -> list[list[Step]]:
        """Return the agent's own conversation, in several parts if it went on from summaries."""
        roots = self._roots()
        begin = self._begin(roots)
        if begin is None:
            return []
        beginning = begin.before
        summaries = {id(root): self._summary_in([step.form for step in root.path()[:-1]], root) for root in roots}
        own = [root for root in roots if beginning in root.path() and summaries[id(root)] is None]
        parts = [_longest(own, beginning)]
        for root in roots:
            summary = summaries[id(root)]
            # An agent does not go on with what it has summarised: who began this is somebody else then.
            if summary is not None and _offers(root) and _number(root) > max(map(_number, parts[-1])):
                parts[-1] = _up_to(summary, parts[-1])
                parts.append(_longest([root], root.before))
        return parts

    def _summary_in(self, forms: Sequence[Canonical], root: Step | None = None) -> Step | None:
        """Return the newest summary that these messages have; None if they have none. What the agent's conversation
        began with is no summary of it, even if a title repeats the task.

        Args:
            root: the answer to them, which came after the summary; None for a new request.
        """
        begin = self._begin(self._roots())
        first = {step.form for step in begin.path()} if begin is not None else set()
        told = [form.text for form in forms if form.role == "user" and form not in first]
        earlier = (step for step in reversed(self._summaries) if root is None or _number(step) < _number(root))
        return next((step for step in earlier if any(step.form.text in text for text in told)), None)


def _up_to(summary: Step, part: list[Step]) -> list[Step]:
    """Return a part of the agent's conversation up to its summary, which may have been asked for elsewhere."""
    path = summary.path()
    if any(step in part for step in path[:-1] if step.sampled):
        return path
    asked = path[-2:-1] if len(path) > 1 and path[-2].form.role == "user" else []
    return [*part, *asked, summary]


def _offers(answer: Step) -> bool:
    """Return whether the model was offered tools for an answer."""
    return bool(answer.sampled and answer.sampled.offered)


def _below(step: Step) -> Iterator[Step]:
    return (each for each in step.following() if each is not step)


def _number(step: Step) -> int:
    return step.sampled.number if step.sampled else -1


def _longest(roots: Sequence[Step], beginning: Step | None) -> list[Step]:
    """Return the path with the most answers that begins at one of these, the newest of several; and what was said after
    its last answer, to which there is none. It has no answer that the model never gave, which only somebody else than
    the agent would send.

    Args:
        beginning: the last message that the agent begins with, whatever that holds.
    """
    ends = [step for root in roots for step in root.following() if step.sampled]
    ends.sort(key=lambda step: (step.answers, _number(step)), reverse=True)
    end = next(step for step in ends if _is_true(step, beginning))
    while after := [step for step in end.after.values() if step.message["role"] != "assistant"]:
        end = after[-1]
    return end.path()


def _is_true(step: Step, beginning: Step | None) -> bool:
    """Return whether all answers from the beginning up to here are the model's, or parts of what it said there."""
    while step is not beginning and step.before is not None:
        if step.message["role"] == "assistant" and step.sampled is None and not _is_part(step, step.before):
            return False
        step = step.before
    return True


def _is_part(answer: Step, before: Step) -> bool:
    """Return whether a message is what an agent may have left of an answer that the model gave at the same place."""
    given = [step for step in before.after.values() if step.sampled is not None]
    form = answer.form
    return any(form.text in each.form.text and set(form.calls) <= set(each.form.calls) for each in given)


def _gone_on(part: list[Step], first: list[Step]) -> list[Step]:
    """Return a later part as it follows a summary: without the messages that the first one began with, and with what
    the user says before the first answer in one message, as ours do."""
    begin = next(index for index, step in enumerate(part) if step.sampled)
    known = {step.form for step in first[: next(index for index, step in enumerate(first) if step.sampled)]}
    last = next((step.form for step in reversed(first) if step.form.role == "user" and step.form in known), None)
    told = [step for step in part[:begin] if step.form.role == "user" and (step.form not in known or step.form == last)]
    text = "\n\n".join(step.form.text for step in told)
    message: Message = {"role": "user", "content": text}
    return [Step(message, canonical(message), None, heard_at=told[-1].heard_at if told else 0.0), *part[begin:]]


def _add_part(result: AgentResult, steps: Sequence[Step], summary: Step | None) -> None:
    """Add messages to a result. What answers a call replaces the note that it was interrupted."""
    open_calls: dict[str, int] = {}
    offered: frozenset[str] = frozenset()
    for step in steps:
        message = step.message
        if (sampled := step.sampled) is not None:
            reasoning = message.get("reasoning_content")
            about = {**sampled.about, "compacted": step is summary}
            numbers = result.add_turn(dict(message), reasoning=reasoning, **about)
            open_calls = {result.calls[number].id: number for number in numbers}
            offered = sampled.offered
            result.tool_calls_schema_valid += sampled.valid_calls
        elif message["role"] == "tool" and message.get("tool_call_id") in open_calls:
            _answer_call(result, open_calls.pop(message["tool_call_id"]), step, offered)
        else:
            result.messages.append(dict(message))


def _answer_call(result: AgentResult, number: int, step: Step, offered: frozenset[str]) -> None:
    """Record what a call was answered with. The agent ran it, so its times are those of the answer and of the next
    request."""
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


def _squeezed(text: str) -> str:
    """Return the text with all space between words alike."""
    return " ".join(text.split())


def task_text(messages: Sequence[Message]) -> str:
    """Return what the user asks for in a prompt: the text of its last message of the user."""
    texts = [canonical(message).text for message in messages if message["role"] == "user"]
    return joined(texts[-1:])
