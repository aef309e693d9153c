"""A record as a sample of Inspect's log format: messages, events in spans, and the score or the error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from hermes_core.agents.compaction import contexts
from hermes_core.records.index import LIMITS
from hermes_core.records.plain_text import arguments_of, failure_name, list_text, moment, text_of

Json = dict[str, Any]

MAX_TEXT = 1 << 16
"""Maximum number of characters of one text in a log. Browsers can't show many longer texts."""

LISTED = 300
"""Maximum number of characters of a text in the list of samples, which a viewer loads as a whole."""

INLINE = 80
"""Maximum number of characters of a verifier's list or object that is written in one line."""

NOT_BEGUN = "(the rollout ended before its conversation began)"
"""In the list of samples, the prompt of a rollout without messages, such as one whose setup failed."""

_ATTACHED_FROM = 200
"""Minimum number of characters from which a text in events is kept once per sample, as an attachment."""

_SPANS = {"acquire": "init", "setup": "init", "agent": "solver", "verify": "scorer", "release": "cleanup"}
"""The type of the span of each stage. (The viewer folds spans of type `agent`.)"""

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_STOPPED = {"stop": "stop", "tool_calls": "tool_calls", "length": "max_tokens", "content_filter": "content_filter"}
"""Inspect's word for an endpoint's finish reason."""

_LIMITS = {"max_turns": "turn", "length": "token", "context_length": "context", "time_limit": "time"}
"""Inspect's word for a stop reason that is a limit."""

_CALL_ERRORS = {"invalid_arguments": "parsing", "time_limit": "timeout", "interrupted": "cancelled"}
"""Inspect's word for a kind of call error; `unknown` for others."""

_CONFIG = frozenset({"temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty"})
"""The sampling parameters that have the same name in Inspect."""


def sample(record: Mapping[str, Any], epoch: int, began: float) -> Json:
    """Return the sample of a record of the current version. If a message or a tool's schema has a form that no endpoint
    would send, the sample has no conversation.

    Args:
        epoch: the number of the rollout within its item, from 1.
        began: start of the rollout, in seconds since the epoch, for a record without this time.
    """
    try:
        return _Sample(record, epoch, began).value()
    except (AttributeError, LookupError, TypeError, ValueError):
        return _Sample({**record, **dict.fromkeys(_SAID, ())}, epoch, began).value()


_SAID = ("messages", "message_times", "turns", "calls", "tool_schemas")


def summary(sample: Mapping[str, Any]) -> Json:
    """Return a sample's entry in the list of samples."""
    asked = next((message["content"] for message in sample["input"] if message["role"] == "user"), NOT_BEGUN)
    error, limit = sample.get("error"), sample.get("limit")
    scores = sample["scores"]
    return {
        **{key: sample[key] for key in ("id", "epoch", "target", "model_usage", "started_at", "completed_at", "uuid")},
        **{key: sample[key] for key in ("total_time", "working_time", "turn_count")},
        "input": asked if len(asked) <= LISTED else f"{asked[:LISTED]}…",
        "scores": scores
        and {
            name: {**score, "explanation": score["explanation"][:LISTED], "metadata": {}}
            for name, score in scores.items()
        },
        "metadata": {key: sample["metadata"][key] for key in ("stop_reason", "failure", "group")},
        "completed": True,
        "message_count": len(sample["messages"]),
        **({"error": error["message"]} if error else {}),
        **({"limit": limit["type"]} if limit else {}),
    }


class _Sample:
    """Makes one sample. Longer texts of events are kept once, in `attachments`."""

    def __init__(self, record: Mapping[str, Any], epoch: int, began: float) -> None:
        self.record = record
        self.epoch = epoch
        self.started: float = record["started"] or began
        self.attachments: dict[str, str] = {}
        self.events: list[Json] = []
        self.messages = [_message(message, index, record["model"]) for index, message in enumerate(record["messages"])]
        self.attached = [self._attach(message) for message in self.messages]
        """The messages that events refer to."""
        self.summaries = {turn["message"]: turn for turn in record["turns"] if turn["compacted"]}
        self.contexts = contexts(self.messages, self.summaries)
        stages = [(stage, record["timings"].get(f"{stage}_s")) for stage in _SPANS]
        self.stages = [(stage, took) for stage, took in stages if took is not None]

    def value(self) -> Json:
        """Return the sample."""
        record = self.record
        asked = [*takewhile(lambda message: message["role"] != "assistant", self.messages)]
        self._add_events(asked)
        took = (record["ended"] or self.started) - self.started or sum(seconds for _, seconds in self.stages)
        usage = _usage(record["usage"])
        answers = [message for message in self.messages if message["role"] == "assistant"]
        model = record["model"] or record["agent"]
        return {
            "id": record["item_id"],
            "epoch": self.epoch,
            "input": asked,
            "target": "",
            "messages": self.messages,
            "output": {"model": model, "choices": [_choice(answer, record["stop_reason"]) for answer in answers[-1:]]},
            "scores": self._scores(),
            "metadata": {key: value for key, value in record.items() if key in _METADATA},
            "store": {},
            "events": self.events,
            "events_data": {"messages": self.attached, "calls": []},
            "attachments": self.attachments,
            "model_usage": {model: usage} if usage else {},
            "started_at": moment(self.started),
            "completed_at": moment(self.started + took),
            "total_time": round(took, 3),
            "working_time": round(max(0.0, took - record["waited_s"]), 3),
            "uuid": record["trajectory_id"],
            "turn_count": len(answers),
            **self._ending(took),
        }

    def _scores(self) -> Json | None:
        """Return the reward as a score; None without a reward. A failure is an error, and never a score."""
        record = self.record
        if record["reward"] is None:
            return None
        report = {
            "value": record["reward"],
            "explanation": details_text(record["details"]),
            "metadata": record["details"],
        }
        return {"reward": report}

    def _ending(self, took: float) -> Json:
        """Return the error, and the limit that ended the rollout."""
        ending: Json = {}
        if failure := self.record["failure"]:
            ending["error"] = _error(failure)
        reason = self.record["stop_reason"]
        if reason in LIMITS:
            reached = {
                "max_turns": len(self.record["turns"]),
                "time_limit": self.record["timings"].get("agent_s") or took,
            }
            tokens = self.record["usage"]["prompt_tokens"] + self.record["usage"]["completion_tokens"]
            ending["limit"] = {"type": _LIMITS[reason], "limit": reached.get(reason, tokens), "reason": reason}
        return ending

    # ------------------------------------------------------------------ events

    def _add_events(self, asked: Sequence[Json]) -> None:
        record, clock = self.record, self.started
        self._add(clock, event="sample_init", state={}, sample={"id": record["item_id"], "input": asked, "target": ""})
        failure = record["failure"] or {}
        for stage, seconds in self.stages:
            self._add(clock, event="span_begin", id=stage, name=stage, type=_SPANS[stage])
            end = clock + seconds
            for at, event in sorted(self._events_of(stage, clock, end), key=lambda pair: pair[0]):
                self._add(at, span_id=stage, **event)
            if failure.get("stage") == stage:
                self._add(end, span_id=stage, event="error", error=_error(failure))
            self._add(end, event="span_end", id=stage)
            clock = end
        if failure and failure["stage"] not in dict(self.stages):
            self._add(clock, event="error", error=_error(failure))

    def _add(self, at: float, **event: Any) -> None:
        number = len(self.events)
        self.events.append(
            {
                "uuid": f"{self.record['trajectory_id'][:12]}-{number}",
                "timestamp": moment(at),
                "working_start": round(max(0.0, at - self.started), 3),
                **event,
            }
        )

    def _events_of(self, stage: str, begin: float, end: float) -> Iterator[tuple[float, Json]]:
        """Yield the events of a stage, each after the time when it began."""
        for ran in self.record["sandbox_commands"]:
            if ran["stage"] == stage:
                yield self._within(ran["started"], begin, end), self._sandbox(ran)
        if stage == "agent":
            for index, message in enumerate(self.messages):
                if message["role"] in ("assistant", "tool"):
                    yield from self._event(index, message, begin, end)
                if index in self.summaries:
                    turn = self.summaries[index]
                    yield self._within(turn["ended"], begin, end), self._compaction(turn)
            if self.record["patch"]:
                yield end, {"event": "info", "source": "patch", "data": self._text(self.record["patch"])}
        if stage == "verify" and (scores := self._scores()):
            yield end, {"event": "score", "scorer": "reward", "score": self._attach(scores["reward"])}

    @staticmethod
    def _within(at: float | None, begin: float, end: float) -> float:
        """Return the time when an event began, moved into its stage's time; the stage's beginning if `at` is None."""
        return min(max(at, begin), end) if at else begin

    def _event(self, index: int, message: Json, begin: float, end: float) -> Iterator[tuple[float, Json]]:
        times = self.record["message_times"]
        started, ended = times[index] if index < len(times) and times[index] else (None, None)
        done = {"completed": moment(ended)} if ended else {}
        took = {"working_time": round(ended - started, 3)} if started and ended else {}
        make = self._model if message["role"] == "assistant" else self._tool
        yield self._within(started, begin, end), {**make(index, message), **done, **took}

    def _model(self, index: int, message: Json) -> Json:
        """Return the event of a model's answer, which refers to the earlier messages instead of copying them."""
        turn: Json = next((turn for turn in self.record["turns"] if turn["message"] == index), {})
        model = turn.get("model") or self.record["model"] or self.record["agent"]
        sampling = turn.get("sampling") or {}
        usage = _usage(turn)
        first = index == next(place for place, each in enumerate(self.messages) if each["role"] == "assistant")
        return {
            "event": "model",
            "model": model,
            "input": [],
            "input_refs": self._seen(index),
            # The tools are the same in each turn, and are listed once to keep the log small.
            "tools": [_tool_info(schema) for schema in self.record["tool_schemas"]] if first else [],
            "tool_choice": "auto",
            "config": {key: value for key, value in sampling.items() if key in _CONFIG},
            "output": {
                "model": model,
                "choices": [_choice(self.attached[index], turn.get("stop_reason"))],
                **({"usage": usage} if usage else {}),
            },
        }

    def _seen(self, index: int) -> list[list[int]]:
        """Return the messages that the model saw before this answer, as ranges of indices."""
        context: list[int] = next((each for each in self.contexts if index in each), [])
        seen = [each for each in context if each < index]
        begins = [each for each in seen if each - 1 not in seen]
        ends = [each + 1 for each in seen if each + 1 not in seen]
        return [[begin, end] for begin, end in zip(begins, ends, strict=True)]

    def _compaction(self, turn: Json) -> Json:
        """Return the event of a conversation that goes on from a summary."""
        return {"event": "compaction", "type": "summary", "tokens_before": turn["prompt_tokens"] or None}

    def _tool(self, index: int, message: Json) -> Json:
        """Return the event of a tool call."""
        call = next((call for call in self.record["calls"] if call["message"] == index), None)
        written = call["arguments"] if call else self._arguments_of(message["tool_call_id"], index)
        event = {
            "event": "tool",
            "type": "function",
            "id": message["tool_call_id"],
            "function": message.get("function") or (call["name"] if call else ""),
            "arguments": self._attach(_arguments(written)[0]),
            "result": self._text(message["content"]),
            "message_id": message["id"],
        }
        if call and call["error"]:
            kind = _CALL_ERRORS.get(call["error"]["kind"], "unknown")
            event |= {"error": {"type": kind, "message": call["error"]["message"]}, "failed": True}
        if call and call["exit_code"] is not None:
            event["metadata"] = {"exit_code": call["exit_code"], "bytes_dropped": call["bytes_dropped"]}
        return event

    def _arguments_of(self, call_id: str, before: int) -> Any:
        """Return a call's arguments from the messages, for a record that does not list its calls."""
        for message in reversed(self.record["messages"][:before]):
            for call in message.get("tool_calls") or ():
                if call.get("id") == call_id:
                    return (call.get("function") or {}).get("arguments")
        return None

    def _sandbox(self, ran: Mapping[str, Any]) -> Json:
        return {
            "event": "sandbox",
            "action": "exec",
            "cmd": self._text(ran["command"]),
            "output": self._text(ran["output"]),
            **({"result": ran["exit_code"]} if ran["exit_code"] is not None else {}),
            **({"completed": moment(ran["ended"])} if ran["ended"] is not None else {}),
        }

    # ------------------------------------------------------------------ texts

    def _attach(self, value: Any) -> Any:
        """Return the value with its long texts as references to attachments."""
        if isinstance(value, str):
            return value if len(value) < _ATTACHED_FROM else self._text(value)
        if isinstance(value, list):
            return [self._attach(part) for part in value]
        if isinstance(value, dict):
            return {key: self._attach(part) for key, part in value.items()}
        return value

    def _text(self, text: str) -> str:
        """Return a short text itself; for a long text, return a reference to an attachment with this text."""
        if len(text) < _ATTACHED_FROM:
            return text
        text = shorten(text)
        name = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
        self.attachments[name] = text
        return f"attachment://{name}"


_METADATA = frozenset(
    (
        *("trajectory_id", "group", "agent", "backend", "isolation", "image", "seed", "versions", "item"),
        *("stop_reason", "failure", "timings", "waited_s", "tool_calls", "infra_retries", "check_repeated"),
        *("network", "tokens_refused", "cut"),
    )
)
"""The keys of a record that go into a sample's metadata."""


def shorten(text: str) -> str:
    """Return a text short enough for a browser: of a very long text, the beginning and the end."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - MAX_TEXT} characters left out; the record has them …]\n{text[-half:]}"


def details_text(details: Mapping[str, Any]) -> str:
    """Return a verifier's details as text: a line for each detail, with texts unquoted."""
    texts = {name: _detail_text(value) for name, value in details.items()}
    return shorten("\n".join(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}" for name, text in texts.items()))


def _detail_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= INLINE:
        return text
    return list_text(value) if isinstance(value, list) else json.dumps(value, indent=1, ensure_ascii=False)


def _message(message: Mapping[str, Any], index: int, model: str | None) -> Json:
    role = _ROLES.get(str(message.get("role")), "user")
    value: Json = {"id": f"m{index}", "role": role, "content": shorten(text_of(message.get("content")))}
    if role == "tool":
        return {**value, "tool_call_id": str(message.get("tool_call_id") or ""), "function": message.get("name") or ""}
    if role != "assistant":
        return {**value, "source": "input"}
    value["source"] = "generate"
    if model:
        value["model"] = model
    if reasoning := text_of(message.get("reasoning_content") or message.get("reasoning")):
        thought = {"type": "reasoning", "reasoning": shorten(reasoning)}
        value["content"] = [thought, {"type": "text", "text": value["content"]}]
    if calls := message.get("tool_calls"):
        value["tool_calls"] = [_tool_call(call) for call in calls]
    return value


def _tool_call(call: Mapping[str, Any]) -> Json:
    function = call.get("function") or {}
    arguments, error = _arguments(function.get("arguments"))
    value = {
        "id": str(call.get("id") or ""),
        "function": str(function.get("name") or ""),
        "arguments": arguments,
        "type": "function",
    }
    return {**value, "parse_error": error} if error else value


def _arguments(written: Any) -> tuple[Json, str | None]:
    """Return a call's arguments as an object, and a problem: None, or a text if the model did not write an object."""
    arguments = arguments_of(written)
    if arguments is None:
        return {"arguments": shorten(str(written))}, "the arguments are not a JSON object"
    return {name: shorten(value) if isinstance(value, str) else value for name, value in arguments.items()}, None


def _choice(message: Json, stopped: str | None) -> Json:
    meant = "tool_calls" if message.get("tool_calls") else "stop"
    return {"message": message, "stop_reason": _STOPPED.get(stopped or meant, "unknown")}


def _usage(counts: Mapping[str, Any]) -> Json | None:
    """Return token counts in Inspect's form, where `input_tokens` excludes tokens from the cache."""
    read, written = counts.get("prompt_tokens") or 0, counts.get("completion_tokens") or 0
    if not read and not written:
        return None
    cached = counts.get("cached_tokens")
    return {
        "input_tokens": max(0, read - (cached or 0)),
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_cache_read": cached,
        "reasoning_tokens": counts.get("reasoning_tokens"),
        "total_cost": counts.get("cost"),
    }


def _tool_info(schema: Mapping[str, Any]) -> Json:
    """Return a tool in Inspect's form, with those properties of its parameters that Inspect's schema has."""
    function = schema.get("function") or schema
    parameters = function.get("parameters") or {}
    described = parameters.get("properties") or {}
    return {
        "name": str(function.get("name") or ""),
        "description": str(function.get("description") or ""),
        "parameters": {
            "type": "object",
            "properties": {name: _parameter(each) for name, each in described.items()},
            "required": parameters.get("required") or [],
        },
    }


def _parameter(schema: Any) -> Json:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    known = kind if kind in ("string", "integer", "number", "boolean", "array", "object", "null") else None
    about = schema.get("description") if isinstance(schema, Mapping) else None
    return {**({"type": known} if known else {}), **({"description": str(about)} if about else {})}


def _error(failure: Mapping[str, Any]) -> Json:
    text = f"{failure_name(failure['kind'], failure['stage'])}: {failure['message']}"
    return {"message": text, "traceback": text, "traceback_ansi": text}
