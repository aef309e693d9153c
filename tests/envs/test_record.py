"""The line of a record: what version 1 looks like, byte for byte, and what is read of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hermes_core.envs.record import VERSION, Failure, Record, ToolCalls, parse_line
from hermes_core.envs.store import OutputFolder, read_records, records
from hermes_core.envs.summary import Tally
from hermes_core.envs.tokens import TokenSequence
from hermes_core.errors import FailureKind, UsageError

FIRST = TokenSequence.of([5, 6, 7], [-100, 6, 7], [1.0, -0.5, -0.25])
SECOND = TokenSequence.of([8, 9], [-100, 9], [1.0, -1.5])

WHOLE = Record(
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

LINE = (
    '{"trajectory_id":"t-1","environment":"tasks","item_id":"greet","group":"greet#0","rollout_index":2,'
    '"agent":"model","backend":"local","reward":0.5,"details":{"reason":"\\u00e9","infra_retries":1,'
    '"check_repeated":"killed","cut":["patch: 9 characters, left out"]},"failure":null,"patch":"+ a\\n",'
    '"messages":[{"role":"user","content":"p"}],"tokens":[5,6,7],"masks":[-100,6,7],"logprobs":[1.0,-0.5,-0.25],'
    '"stop_reason":"finished","timings":{"acquire_s":0.5,"setup_s":null,"agent_s":1.5,"verify_s":2.0,'
    '"release_s":0.25},"tool_calls":{"attempted":3,"schema_valid":2,"executed_ok":1,"exec_error":2}}\n'
)
"""Version 1, which others may have on their disks: this must never change."""

FAILED = dataclasses.replace(WHOLE, reward=None, failure=Failure(FailureKind.INFRA, "setup", "gone"), sequences=())
SPLIT = dataclasses.replace(WHOLE, sequences=(FIRST, SECOND))
REFUSED = dataclasses.replace(WHOLE, sequences=(), tokens_refused="mask 2 is 3")


def read(line: bytes) -> Record:
    return Record.from_json(parse_line(line, "here"))


def test_a_line_of_version_1_is_what_it_was() -> None:
    assert (VERSION, WHOLE.line().decode()) == (1, LINE)


@pytest.mark.parametrize("record", [WHOLE, FAILED, SPLIT, REFUSED])
def test_what_is_written_is_read_again(record: Record) -> None:
    again = read(record.line())
    assert again == record
    assert again.line() == record.line()


def test_what_is_no_field_is_left_out() -> None:
    assert read(json.dumps({**json.loads(LINE), "note": "mine"}).encode() + b"\n") == WHOLE


@pytest.mark.parametrize(
    "change",
    [
        {"details": None},
        {"failure": {"kind": "odd", "stage": "s", "message": "m"}},
        {"tokens": ["a"]},
        {"tokens": [2**40]},
        {"tool_calls": {"attempts": 1}},
        {"rollout_index": "first"},
        {"version": "new"},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        read(json.dumps({**json.loads(LINE), **change}).encode() + b"\n")
    with pytest.raises(ValueError, match="whole"):
        read(LINE.encode()[:-1])


@pytest.mark.parametrize("last", [True, False])
def test_a_record_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path, last: bool) -> None:
    newer = json.dumps({"version": 2, "id": "greet"}).encode() + b"\n"
    whole = [WHOLE.line(), newer] if last else [newer, WHOLE.line()]
    for use in (lambda: list(records(tmp_path)), lambda: list(read_records(tmp_path)), lambda: resumed(tmp_path)):
        started(tmp_path)
        (tmp_path / "trajectories.jsonl").write_bytes(b"".join(whole))
        with pytest.raises(UsageError, match=r"line \d: a record of version 2; .* reads versions up to 1 \(upgrade"):
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
    assert list(read_records(tmp_path)) == [json.loads(LINE)]
