"""One rollout for a terminal: its outcome, its timeline, the conversation with commands as text, the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hermes_core.records.index import Row
from hermes_core.records.plain_text import (
    arguments_of,
    failure_name,
    list_text,
    parse_container,
    text_of,
    without_what_differs,
)
from hermes_core.records.record import STAGES
from hermes_core.view.words import REWARDLESS, Indented, count, duration, figure, line, money, safe_text

LINES = 30
"""Maximum number of lines of a text, unless the full text is asked for."""

COMMAND_LINES = 4
"""Maximum number of lines of a command of the verification, which may be a long script of the environment."""

CHARACTERS = 4000
"""Maximum number of characters of a text, unless the full text is asked for."""

LINE = 1000
"""Maximum number of characters of one line, unless the full text is asked for."""

_LEAST_S = 0.005
"""Seconds. Shorter times are not shown, because they would be shown as 0.00 s."""

_BAR = 40
"""Width of the timeline's longest bar, in columns."""

_SHORT = 60
"""Values up to this length are shown behind their name; longer values, and values of several lines, below the name."""


def rollout(row: Row, record: Mapping[str, Any], *, full: bool = False) -> Iterator[RenderableType]:
    """Yield all parts of a rollout's transcript.

    Args:
        full: show long texts in full.
    """
    yield from heading(row, record)
    yield from _timeline(record)
    yield from _conversation(record, full)
    yield from _program(record, full)
    yield from _network(record, full)
    yield from report(record, full=full)


def heading(row: Row, record: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the outcome of the rollout."""
    yield Text.assemble(line(row.name, "bold reverse"), "  ", line(row.trajectory_id, "dim"))
    yield outcome(row)
    image = record["image"] or {}
    facts = {
        "environment": record["environment"],
        "agent": record["agent"],
        "model": record["model"],
        "backend": ", ".join(filter(None, (record["backend"], record["isolation"]))),
        "image": image.get("digest") or image.get("name"),
        "seed": record["seed"],
        "restarts": record["infra_retries"] or None,
    }
    yield line(" · ".join(f"{name} {value}" for name, value in facts.items() if value is not None), "dim")


def outcome(row: Row) -> Text:
    """Return one line with the reward or the failure, and the rollout's length."""
    if row.failure_kind is not None:
        text = line(f"no reward: {failure_name(row.failure_kind, row.failure_stage)}", "bold red")
    elif row.reward is not None:
        text = Text(f"reward {figure(row.reward, 2)}", "bold green" if row.solved else "bold yellow")
    else:
        text = Text(REWARDLESS, "bold")
    parts = [f"stopped: {row.stop_reason}"] if row.stop_reason else []
    parts += [f"{row.turns} turns", f"{row.calls} tool calls"]
    parts += [f"{count(row.tokens)} tokens"] if row.tokens else []
    parts += [duration(row.seconds)]
    parts += [money(row.cost)] if row.cost is not None else []
    return Text.assemble(text, " · ", line(" · ".join(parts)))


# ---------------------------------------------------------------------- timeline


def _timeline(record: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield a bar for each stage, and the parts of the agent's time."""
    seconds = {stage: record["timings"].get(f"{stage}_s") for stage in STAGES}
    longest = max(filter(None, seconds.values()), default=0.0)
    if not longest:
        return
    yield _title("timeline")
    begin = 0.0
    for stage, took in seconds.items():
        if took is None:
            continue
        bar = "█" * max(1, round(_BAR * took / longest))
        text = Text.assemble(f"  {stage:8} {begin:8.1f} s  ", (f"{duration(took):>12}  ", "bold"), (bar, "cyan"))
        yield text
        begin += took
    spent = {
        "model": _total_s(record["turns"]) - (record["waited_s"] or 0.0),
        "tools": _total_s(record["calls"]),
        "waited for the endpoint": record["waited_s"] or 0.0,
    }
    if record["turns"]:
        named = (f"{name} {duration(max(0.0, took))}" for name, took in spent.items() if took >= _LEAST_S)
        yield Text("  of the agent's: " + ", ".join(named), "dim")


def _total_s(spans: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of all spans."""
    return math.fsum(span["ended"] - span["started"] for span in spans if span["started"] and span["ended"])


# ---------------------------------------------------------------------- conversation


def _conversation(record: Mapping[str, Any], full: bool) -> Iterator[RenderableType]:
    turns = {turn["message"]: (number, turn) for number, turn in enumerate(record["turns"], 1)}
    calls = {call["message"]: call for call in record["calls"]}
    for index, message in enumerate(record["messages"]):
        role = str(message.get("role", "unknown"))
        if role == "tool":
            yield from _result(message, calls.get(index), full)
            continue
        title, about = role, ""
        if index in turns:
            number, turn = turns[index]
            title, about = f"turn {number}", _about_turn(turn, record["started"])
            if turn["compacted"]:
                title += ": summary"
        yield _title(title, about)
        if reasoning := text_of(message.get("reasoning_content") or message.get("reasoning")):
            yield Indented(Text("thinking:", "dim italic"), 2)
            yield _block(reasoning, full, "dim italic", indent=4)
        if content := text_of(message.get("content")):
            yield _block(content, full)
        for call in message.get("tool_calls") or ():
            yield from _call(call, full)


def _about_turn(turn: Mapping[str, Any], started: float | None) -> str:
    parts = []
    if turn["started"]:
        parts += [f"at {duration(turn['started'] - started)}"] if started else []
        parts += [f"took {duration(turn['ended'] - turn['started'])}"] if turn["ended"] else []
    if turn["waited_s"] >= _LEAST_S:
        parts.append(f"waited {duration(turn['waited_s'])}")
    if turn["prompt_tokens"]:
        parts.append(f"{count(turn['prompt_tokens'])} → {count(turn['completion_tokens'] or 0)} tokens")
    if turn["cost"] is not None:
        parts.append(money(turn["cost"]))
    if turn["stop_reason"] not in (None, "stop", "tool_calls"):
        parts.append(str(turn["stop_reason"]))
    return " · ".join(parts)


def _call(call: Mapping[str, Any], full: bool) -> Iterator[RenderableType]:
    """Yield a tool call. An argument `command` of one line is shown behind the tool's name, without its own name."""
    function = call.get("function") or {}
    name, written = function.get("name", ""), function.get("arguments")
    arguments = arguments_of(written)
    if arguments is None:
        yield Indented(Text.assemble(line(f"→ {name}", "bold cyan"), "  ", ("arguments are no JSON object", "red")), 2)
        yield _block(str(written), full, indent=4)
        return
    command = arguments.get("command")
    if isinstance(command, str) and "\n" not in command.strip():
        rest = {key: value for key, value in arguments.items() if key != "command"}
        yield Indented(Text.assemble(line(f"→ {name}", "bold cyan"), "  ", safe_text(command.strip(), "bold")), 2)
        yield from fields(rest, full, 4)
        return
    yield Indented(line(f"→ {name}", "bold cyan"), 2)
    yield from fields(arguments, full, 4)


def _result(message: Mapping[str, Any], call: Mapping[str, Any] | None, full: bool) -> Iterator[RenderableType]:
    """Yield a tool's answer, and how the call ended."""
    content = text_of(message.get("content"))
    values = parse_container(content)
    text = "\n".join(map(str, values.values())) if isinstance(values, dict) else content
    if call is not None:
        yield Indented(_about_call(call, text), 2)
    if isinstance(values, dict):
        yield from fields(values, full, 4, "dim")
    else:
        yield _block(content, full, "dim", indent=4)


def _about_call(call: Mapping[str, Any], said: str) -> Text:
    """Return how a call ended. Includes the error's message, unless the message is in the tool's answer `said`, which
    is shown below."""
    took = None if None in (call["started"], call["ended"]) else call["ended"] - call["started"]
    parts = [] if took is None else [duration(took)]
    if call["exit_code"] is not None:
        parts.append(f"exit code {call['exit_code']}")
    if call["bytes_dropped"]:
        parts.append(f"{count(call['bytes_dropped'])} bytes dropped")
    if call["error"]:
        kind, message = call["error"]["kind"], call["error"]["message"]
        parts.append(kind if message in said else f"{kind}: {message}")
    return line("← " + " · ".join(parts), "red" if call["error"] else "yellow" if call["exit_code"] else "dim")


def _program(record: Mapping[str, Any], full: bool) -> Iterator[RenderableType]:
    """For an agent that is a program, yield how the program ended, and after a failure the end of its output."""
    program = record.get("program")
    if not program:
        return
    code, signal = program["exit_code"], program["signal"]
    ended = (
        "ended from outside" if code is signal is None else f"signal {signal}" if code is None else f"exit code {code}"
    )
    yield _title("program", ended)
    if refusal := program.get("refusal"):
        yield _block(f"a model call was refused: {refusal}", full, "yellow")
    if overridden := program.get("overridden"):
        yield _block(f"settings that it asked for and did not get: {', '.join(overridden)}", full, "dim")
    if program["output"].strip() and (full or code != 0 or record["stop_reason"] != "finished"):
        yield _block(program["output"], full, "dim")


DESTINATIONS = 5
"""Maximum number of destinations in a line, unless the full text is asked for."""


def _network(record: Mapping[str, Any], full: bool) -> Iterator[RenderableType]:
    """Yield what programs in slots reached through a proxy in each phase, and what they were refused."""
    asked = ("reached", "refused", "failed")
    network = {
        phase: traffic
        for phase, traffic in (record.get("network") or {}).items()
        if any(traffic[name] for name in asked)
    }
    if network:
        yield _title("network")
    for phase, traffic in network.items():
        moved = [f"{count(traffic['bytes_sent'])} bytes sent", f"{count(traffic['bytes_received'])} received"]
        failed = [f"{traffic['failed']} failed"] if traffic["failed"] else []
        reached = f"reached {_destinations(traffic['reached'], full)}" if traffic["reached"] else "reached nothing"
        yield Indented(line(f"{phase}: {reached}; {', '.join(moved + failed)}", "dim"), 2)
        if traffic["refused"]:
            yield Indented(line(f"refused {_destinations(traffic['refused'], full)}", "yellow"), 4)


def _destinations(counts: Mapping[str, int], full: bool) -> str:
    named = [f"{name} ({number})" for name, number in counts.items()]
    shown = named if full else named[:DESTINATIONS]
    left_out = len(named) - len(shown)
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")


# ---------------------------------------------------------------------- the verifier's report


def reports(rollouts: Iterable[tuple[Row, Mapping[str, Any]]], *, full: bool = False) -> Iterator[RenderableType]:
    """Yield the reports of an item's rollouts. A report that several rollouts share is shown once, below all of
    them."""
    alike: dict[str, list[tuple[Row, Mapping[str, Any]]]] = {}
    for row, record in rollouts:
        alike.setdefault(_signature(record), []).append((row, record))
    for same in alike.values():
        for row, record in same:
            yield from heading(row, record)
            yield from _unsuccessful_calls(row)
        if len(same) > 1:
            yield Text(f"{len(same)} rollouts, the same report but for names of slots and times", "bold")
        yield from report(same[0][1], full=full)
        yield Text()


def _unsuccessful_calls(row: Row) -> Iterator[RenderableType]:
    """Yield the rollout's failed calls, and its calls of commands with a non-zero exit."""
    failed = [f"{name} {sum(use.failed.values())}" for name, use in row.tools.items() if use.failed]
    exits = [f"{name} {sum(use.exits.values())}" for name, use in row.tools.items() if use.exits]
    if failed:
        yield line(f"failed calls: {', '.join(failed)}", "red")
    if exits:
        yield line(f"commands with a non-zero exit: {', '.join(exits)}", "yellow")


def _signature(record: Mapping[str, Any]) -> str:
    """Return a text that is equal for rollouts with the same reward and report, without parts such as times that always
    differ."""
    ran = [[ran[name] for name in ("stage", "command", "exit_code", "output")] for ran in record["sandbox_commands"]]
    fields_compared = [record["reward"], record["failure"], record["details"], ran]
    return without_what_differs(json.dumps(fields_compared, sort_keys=True))


def report(record: Mapping[str, Any], *, full: bool = False) -> Iterator[RenderableType]:
    """Yield the reasons for the rollout's reward, or for having none: the failure, the verifier's details, and the
    commands that it ran."""
    failure = record["failure"]
    if failure:
        yield _title(failure_name(failure["kind"], failure["stage"]))
        yield _block(failure["message"], full, "red")
    if record["details"]:
        yield _title("verifier's report")
        yield from fields(record["details"], full, 2)
    elif record["reward"] is not None:
        yield _title("verifier's report", "the verifier gave a reward and no report")
    asked_no_model = not record["turns"]  # the oracle's commands are no tool calls, and shown only here
    for stage in ("setup", "agent", "verify"):
        commands = [ran for ran in record["sandbox_commands"] if ran["stage"] == stage]
        is_shown = stage == "verify" or (stage == "agent" and asked_no_model) or (failure and failure["stage"] == stage)
        if commands and is_shown:
            yield _title(f"commands of {stage}")
            for ran in commands:
                yield from _ran(ran, full)


def _ran(ran: Mapping[str, Any], full: bool) -> Iterator[RenderableType]:
    took = None if None in (ran["started"], ran["ended"]) else ran["ended"] - ran["started"]
    code = ran["exit_code"]
    # Of a script that succeeded, the first line is enough.
    command = ran["command"] if full else shorten(ran["command"].strip(), 1 if code == 0 else COMMAND_LINES)
    yield Indented(safe_text(f"$ {command}", "bold"), 2)
    ended = "no exit code" if code is None else f"exit code {code}"
    yield Indented(Text(f"{ended}, {duration(took)}", "dim" if code == 0 else "red"), 4)
    if ran["output"].strip():
        yield _block(ran["output"], full, "dim", indent=4)


# ---------------------------------------------------------------------- texts


def fields(values: Mapping[str, Any], full: bool, indent: int, style: str = "") -> Iterator[RenderableType]:
    """Yield named values: short values behind their names, long texts and lists below their names."""
    texts = {name: _value(value) for name, value in values.items() if value is not None}
    long = {name: text for name, text in texts.items() if len(text) > _SHORT or "\n" in text}
    if short := [f"{name}: {text}" for name, text in texts.items() if name not in long]:
        yield Indented(safe_text("   ".join(short), style), indent)
    for name, text in long.items():
        value = values[name]
        yield Indented(line(f"{name}:", style), indent)
        yield _block(list_text(value) if isinstance(value, list) else text, full, style, indent + 2)


def _value(value: Any) -> str:
    """Return a value as text. A line that is empty, or begins or ends with white space, is quoted to be visible."""
    if isinstance(value, str) and "\n" not in value and (not value or value != value.strip()):
        return json.dumps(value, ensure_ascii=False)
    return text_of(value)


def _title(title: str, about: str = "") -> RenderableType:
    return Group(Text(), Text("  ").join([line(title.upper(), "bold"), *([line(about, "dim")] if about else [])]))


def _block(text: str, full: bool, style: str = "", indent: int = 2) -> RenderableType:
    """Return a text of several lines. Of a long text, return the beginning and the end, unless `full`."""
    return Indented(safe_text(text.strip("\n") if full else shorten(text.strip("\n")), style), indent)


def shorten(text: str, most: int = LINES) -> str:
    """Shorten a text of more than `most` lines, or of too many characters, to its beginning and its end, with a note
    between them on the size of the gap. Long lines are shortened, too."""
    text = "\n".join(_cut(each, LINE) for each in text.split("\n"))
    lines = _cut(text, CHARACTERS).split("\n")
    if len(lines) > most:
        end = most // 2
        begin = most - end
        left_out = f"… {len(lines) - most} lines left out, --full shows them …"
        lines = [*lines[:begin], left_out, *lines[len(lines) - end :]]
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    """Shorten a text of more than `most` characters to its beginning and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out, --full shows them …\n{text[-half:]}"
