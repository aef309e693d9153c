"""The line of a record: what each version looks like, byte for byte, and what is read of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hermes_core.agents.base import CallError, CallErrorKind, CallRecord, TurnRecord, Usage
from hermes_core.errors import FailureKind, UsageError
from hermes_core.records.record import (
    VERSION,
    Failure,
    Record,
    SandboxCommand,
    ToolCalls,
    parse_line,
    parse_outline,
    record_schema,
)
from hermes_core.records.store import OutputFolder, read_records, records
from hermes_core.records.summary import Tally
from hermes_core.records.tokens import TokenSequence
from hermes_core.sandbox.commands import SandboxImage

FIRST = TokenSequence.of([5, 6, 7], [-100, 6, 7], [1.0, -0.5, -0.25])
SECOND = TokenSequence.of([8, 9], [-100, 9], [1.0, -1.5])

OLD = Record(
    "t-1", "tasks", "greet", "greet#0", 2, "model", "local",
    reward=0.5,
    details={"reason": "é"},
    patch="+ a\n",
    messages=[{"role": "user", "content": "p"}],
    sequences=(FIRST,),
    stop_reason="finished",
    timings={"acquire_s": 0.5, "setup_s": None, "agent_s": 1.5, "verify_s": 2.0, "release_s": 0.25},
    tool_calls=ToolCalls(3, 2, 1, 2),
    infra_retries=1,
    check_repeated="killed",
    cut=("patch: 9 characters, left out",),
)  # fmt: skip

OLD_LINE = (
    '{"trajectory_id":"t-1","environment":"tasks","item_id":"greet","group":"greet#0","rollout_index":2,'
    '"agent":"model","backend":"local","reward":0.5,"details":{"reason":"\\u00e9","infra_retries":1,'
    '"check_repeated":"killed","cut":["patch: 9 characters, left out"]},"failure":null,"patch":"+ a\\n",'
    '"messages":[{"role":"user","content":"p"}],"tokens":[5,6,7],"masks":[-100,6,7],"logprobs":[1.0,-0.5,-0.25],'
    '"stop_reason":"finished","timings":{"acquire_s":0.5,"setup_s":null,"agent_s":1.5,"verify_s":2.0,'
    '"release_s":0.25},"tool_calls":{"attempted":3,"schema_valid":2,"executed_ok":1,"exec_error":2}}\n'
)
"""Version 1, which others may have on their disks: this must never change."""

WHOLE = dataclasses.replace(
    OLD,
    model="m",
    seed=7,
    item={"id": "greet", "image": "python:3.12"},
    started=1000.0,
    ended=1009.5,
    messages=[
        {"role": "user", "content": "p"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1"}, {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "name": "terminal", "content": "{}"},
        {"role": "tool", "tool_call_id": "c2", "name": "shout", "content": "{}"},
    ],
    turns=(
        TurnRecord(
            1,
            "m-1",
            1001.0,
            1002.5,
            0.25,
            90,
            12,
            64,
            None,
            0.001,
            {"temperature": 0.7, "seed": 3},
            "tool_calls",
            "w7",
            True,
        ),
    ),
    calls=(
        CallRecord(0, 2, "c1", "terminal", '{"command": "make"}', 1002.5, 1003.0, None, 2, 4096),
        CallRecord(0, 3, "c2", "shout", "[]", error=CallError(CallErrorKind.UNKNOWN_TOOL, "no tool")),
    ),
    tool_schemas=({"type": "function", "function": {"name": "terminal"}},),
    waited_s=0.25,
    usage=Usage(1, 90, 12, 64, 0.001),
    sandbox_commands=(SandboxCommand("verify", "sh check.sh", 1004.0, 1005.0, 1, "no\n", 9),),
    isolation="user",
    image=SandboxImage("python:3.12", "sha256:00"),
    versions={"hermes-rl": "0.1.0", "python": "3.12.1"},
)

LINE = (
    '{"version":2,"trajectory_id":"t-1","environment":"tasks","item_id":"greet","group":"greet#0",'
    '"rollout_index":2,"agent":"model","backend":"local","model":"m","seed":7,"started":1000.0,'
    '"ended":1009.5,"reward":0.5,"tokens_refused":null,"stop_reason":"finished","waited_s":0.25,'
    '"isolation":"user","infra_retries":1,"check_repeated":"killed","failure":null,'
    '"timings":{"acquire_s":0.5,"setup_s":null,"agent_s":1.5,"verify_s":2.0,"release_s":0.25},'
    '"tool_calls":{"attempted":3,"schema_valid":2,"executed_ok":1,"exec_error":2},"usage":{"requests":1,'
    '"prompt_tokens":90,"completion_tokens":12,"cached_tokens":64,"cost":0.001},"turns":[{"message":1,'
    '"model":"m-1","started":1001.0,"ended":1002.5,"waited_s":0.25,"prompt_tokens":90,'
    '"completion_tokens":12,"cached_tokens":64,"reasoning_tokens":null,"cost":0.001,'
    '"sampling":{"temperature":0.7,"seed":3},"stop_reason":"tool_calls","weight_version":"w7","compacted":true}],"calls":[{"turn":0,"message":2,'
    '"id":"c1","name":"terminal","arguments":"{\\"command\\": \\"make\\"}","started":1002.5,"ended":1003.0,'
    '"error":null,"exit_code":2,"bytes_dropped":4096},{"turn":0,"message":3,"id":"c2","name":"shout",'
    '"arguments":"[]","started":null,"ended":null,"error":{"kind":"unknown_tool","message":"no tool"},'
    '"exit_code":null,"bytes_dropped":0}],"cut":["patch: 9 characters, left out"],'
    '"image":{"name":"python:3.12","digest":"sha256:00"},"versions":{"hermes-rl":"0.1.0","python":"3.12.1"},'
    '"item":{"id":"greet","image":"python:3.12"},"details":{"reason":"\\u00e9"},"patch":"+ a\\n",'
    '"sandbox_commands":[{"stage":"verify","command":"sh check.sh","started":1004.0,"ended":1005.0,'
    '"exit_code":1,"output":"no\\n","bytes_dropped":9}],"tool_schemas":[{"type":"function",'
    '"function":{"name":"terminal"}}],"message_times":[null,[1001.0,1002.5],[1002.5,1003.0],[null,null]],'
    '"messages":[{"role":"user","content":"p"},{"role":"assistant","content":"",'
    '"tool_calls":[{"id":"c1"},{"id":"c2"}]},{"role":"tool","tool_call_id":"c1","name":"terminal",'
    '"content":"{}"},{"role":"tool","tool_call_id":"c2","name":"shout","content":"{}"}],'
    '"sequences":[{"tokens":[5,6,7],"masks":[-100,6,7],"logprobs":[1.0,-0.5,-0.25]}]}\n'
)
"""Version 2, which others may have on their disks: this must never change."""

FAILED = dataclasses.replace(WHOLE, reward=None, failure=Failure(FailureKind.INFRA, "setup", "gone"), sequences=())
SPLIT = dataclasses.replace(WHOLE, sequences=(FIRST, SECOND))
FORKED = dataclasses.replace(WHOLE, forks={"dropped_answer": 2})
REFUSED = dataclasses.replace(WHOLE, sequences=(), tokens_refused="mask 2 is 3")
EMPTY = Record("t-1", "tasks", "greet", "greet#0", 2, "model", "local", messages=[])


def read(line: bytes) -> Record:
    return Record.from_json(parse_line(line, "here"))


def test_a_line_of_version_2_is_what_it_was() -> None:
    assert (VERSION, WHOLE.line().decode()) == (2, LINE)


@pytest.mark.parametrize("record", [EMPTY, OLD, WHOLE, FAILED, SPLIT, FORKED, REFUSED])
def test_what_is_written_is_read_again(record: Record) -> None:
    again = read(record.line())
    assert again == record
    assert again.line() == record.line()


OUTLINED = ("version", "trajectory_id", "reward", "stop_reason", "failure", "usage", "turns", "calls")
LONG = ("cut", "item", "details", "patch", "sandbox_commands", "messages", "sequences")


def test_an_outline_has_all_but_the_long_parts() -> None:
    outline, whole = parse_outline(LINE.encode(), "here"), json.loads(LINE)
    assert {key: outline[key] for key in OUTLINED} == {key: whole[key] for key in OUTLINED}
    assert not any(outline[key] for key in LONG)


@pytest.mark.parametrize(
    "record",
    [
        dataclasses.replace(WHOLE, turns=(TurnRecord(1, sampling={"a": 1, "cut": ["b"]}),)),
        dataclasses.replace(WHOLE, check_repeated=',"cut":['),
    ],
)
def test_an_outline_is_not_misled_by_the_name_of_the_key_after_it(record: Record) -> None:
    outline, whole = parse_outline(record.line(), "here"), record.to_json()
    assert {key: outline[key] for key in OUTLINED} == {key: whole[key] for key in OUTLINED}


def test_the_outline_of_a_line_of_version_1_is_all_of_it() -> None:
    assert parse_outline(OLD_LINE.encode(), "here") == json.loads(OLD_LINE)


@pytest.mark.parametrize(
    ("written", "read"), [(r'"half a pair: \ud800"', "half a pair: ?"), ("NaN", "NaN"), ("[-Infinity]", ["-Infinity"])]
)
def test_a_line_that_only_the_slower_reader_takes_is_read(written: str, read: Any) -> None:
    line = LINE.replace('"agent":', f'"note":{written},"agent":')
    for parse in (parse_line, parse_outline):
        assert parse(line.encode(), "here")["note"] == read


@pytest.mark.parametrize("written", ["[" * 300 + "]" * 300, "[" * 9000 + "]" * 9000])
def test_a_line_that_is_nested_too_deeply_is_refused(written: str) -> None:
    line = LINE.replace('"agent":', f'"note":{written},"agent":')
    for parse in (parse_line, parse_outline):
        with pytest.raises(ValueError):
            parse(line.encode(), "here")


def test_a_torn_line_has_no_outline() -> None:
    with pytest.raises(ValueError):
        parse_outline(LINE.encode()[:-20], "here")


def test_a_line_of_version_1_is_read() -> None:
    assert read(OLD_LINE.encode()) == OLD
    assert read(OLD_LINE.encode()).message_times == [None]


@pytest.mark.parametrize("sequences", [(), (FIRST, SECOND)])
def test_a_line_of_version_1_with_another_number_of_sequences_is_read(sequences: tuple[TokenSequence, ...]) -> None:
    none = dict.fromkeys(("tokens", "masks", "logprobs"))
    several = {"sequences": [sequence.lists() for sequence in sequences]} if sequences else {}
    line = json.dumps({**json.loads(OLD_LINE), **none, **several}).encode() + b"\n"
    assert read(line) == dataclasses.replace(OLD, sequences=sequences)


def test_each_message_of_the_model_and_of_a_tool_has_its_times() -> None:
    assert WHOLE.to_json()["message_times"] == [None, [1001.0, 1002.5], [1002.5, 1003.0], [None, None]]


@pytest.mark.parametrize("line", [LINE, OLD_LINE])
def test_what_is_no_field_is_left_out(line: str) -> None:
    assert read(json.dumps({**json.loads(line), "note": "mine"}).encode() + b"\n") == read(line.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"details": None},
        {"failure": {"kind": "odd", "stage": "s", "message": "m"}},
        {"sequences": [{"tokens": ["a"], "masks": [1], "logprobs": [0]}]},
        {"sequences": [{"tokens": [2**40], "masks": [1], "logprobs": [0]}]},
        {"tool_calls": {"attempts": 1}},
        {"rollout_index": "first"},
        {"version": "new"},
        {"version": 1},
        {"turns": [{"index": 3}]},
        {"calls": [{"turn": 1}]},
        {"image": "python:3.12"},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        read(json.dumps({**json.loads(LINE), **change}).encode() + b"\n")
    with pytest.raises(ValueError, match="whole"):
        read(LINE.encode()[:-1])


@pytest.mark.few(3)
@pytest.mark.parametrize("record", [EMPTY, OLD, WHOLE, FAILED, SPLIT, FORKED, REFUSED])
def test_the_schema_describes_the_line(record: Record) -> None:
    value = record.to_json()
    assert set(value) == set(record_schema()["required"]) | ({"forks"} if record.forks else set())
    jsonschema.Draft202012Validator.check_schema(record_schema())
    jsonschema.validate(value, record_schema())
    for place in ("turns", "calls", "sandbox_commands", "sequences", "image", "usage", "failure"):
        parts = value[place] if isinstance(value[place], list) else [value[place]]
        for part in filter(None, parts):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**value, place: [{**part, "odd": 1}]}, record_schema())


def test_the_page_about_records_names_every_field() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "records.md").read_text()
    schema = record_schema()
    parts = [schema, *(part for part in schema["$defs"].values() if "properties" in part)]
    missing = [name for part in parts for name in part["properties"] if f"`{name}`" not in page]
    assert missing == []


@pytest.mark.parametrize("last", [True, False])
def test_a_record_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path, last: bool) -> None:
    newer = json.dumps({"version": VERSION + 1, "id": "greet"}).encode() + b"\n"
    whole = [WHOLE.line(), newer] if last else [newer, WHOLE.line()]
    for use in (lambda: list(records(tmp_path)), lambda: list(read_records(tmp_path)), lambda: resumed(tmp_path)):
        started(tmp_path)
        (tmp_path / "trajectories.jsonl").write_bytes(b"".join(whole))
        with pytest.raises(UsageError, match=r"line \d: a record of version 3; .* reads versions up to 2 \(upgrade"):
            use()
        assert (tmp_path / "trajectories.jsonl").read_bytes() == b"".join(whole), "it is left as it is"


def started(path: Path) -> None:
    (path / "trajectories.jsonl").unlink(missing_ok=True)
    folder = OutputFolder(path)
    folder.open({}, {}, Tally(), resume=False)
    folder.append(WHOLE.line())
    folder.close()


def resumed(path: Path) -> None:
    folder = OutputFolder(path)
    try:
        folder.open({}, {}, Tally(), resume=True)
    finally:
        folder.close()


def test_records_are_read_as_json_values(tmp_path: Path) -> None:
    started(tmp_path)
    assert list(read_records(str(tmp_path))) == [json.loads(LINE)]
