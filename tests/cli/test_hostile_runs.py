"""The folder of a run that somebody else made: every command reads it as data, ends with a message or a result, and
neither obeys nor writes anything elsewhere."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hermes_core.cli.main import main
from hermes_core.errors import UsageError
from hermes_core.export.eval_log import RunLog, log_name
from hermes_core.export.formats import FORMATS
from hermes_core.records.index import RecordedRun
from hermes_core.records.record import Record, parse_line
from hermes_core.view import transcript
from hermes_core.view.logs import make_shown_folder, open_logs
from tests.export.conftest import failed, rollout

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp \r|`<b>[bold]x[/bold]"

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1e99, -1e99, 1e-320, "", "7", ESCAPES, "../../outside/owned", "/outside/owned", "\n- x"),
    *([], {}, [[]], [{}], {"": None}, {"text": 1}, [None], ["x"], [ESCAPES], {ESCAPES: ESCAPES}),
)
"""What stands in place of each value of a record."""

COMMANDS = (
    *(["show", "RUN"], ["show", "RUN", "--items"], ["show", "RUN", "--tools"], ["show", "RUN", "--report"]),
    *(["show", "RUN", "*"], ["show", "RUN", "--json"], ["show", "RUN", "--sort", "cost"]),
    *(["export", "RUN", "--to", to, "--out", f"out/{to}"] for to in FORMATS),
    *(["merge", "RUN", "RUN", "--out", "out/both"], ["rescore", "RUN"]),
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (key,)
        yield from ((key, *rest) for rest in places(part))


def changed(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The record with another value at that path."""
    whole = copy.deepcopy(record)
    *before, last = path
    holder = whole
    for key in before:
        holder = holder[key]
    holder[last] = value
    return whole


def told(arguments: list[str], run: Path, here: Path, *, codes: tuple[int, ...] = (0, 2, 3)) -> str:
    """What a command prints, which is checked: no traceback, and nothing that a terminal obeys."""
    done = CliRunner().invoke(main, [str(run) if part == "RUN" else part for part in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, repr(done.exception))
    assert done.exit_code in codes, (arguments, done.output[-1000:])
    obeyed = {character for character in done.output if not character.isprintable() and character != "\n"}
    assert not obeyed, (arguments, obeyed)
    for card in here.glob("out/*/README.md"):
        text = card.read_text()
        assert all(character.isprintable() or character == "\n" for character in text), (arguments, card)
    return done.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory. Nothing may appear in the folder beside it."""
    outside, inside = tmp_path / "outside", tmp_path / "here" / "deep"
    outside.mkdir()
    inside.mkdir(parents=True)
    (outside / "theirs").write_text("kept")
    monkeypatch.chdir(inside)
    monkeypatch.setattr("tests.support.record_schema.CHECKED_RECORDS", 0)  # these do not fit the schema
    yield inside
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "outside"]
    assert [path.name for path in outside.iterdir()] == ["theirs"]
    assert [path.name for path in inside.parent.iterdir()] == ["deep"]
    assert (outside / "theirs").read_text() == "kept"


def write_run(here: Path, lines: list[bytes], run: Any = None) -> Path:
    """Write the folder of a run."""
    folder = here / "run"
    folder.mkdir()
    (folder / "trajectories.jsonl").write_bytes(b"".join(lines))
    about = {"configuration": {"environment": "tasks", "agent": "model"}, "configuration_hash": "abc", "versions": {}}
    (folder / "run.json").write_text(run if isinstance(run, str) else json.dumps(about if run is None else run))
    return folder


def test_records_with_any_value_in_any_place(here: Path) -> None:
    """Such a record is refused, or every command can do with it."""
    lines = []
    for record in (rollout().to_json(), {**failed("x").to_json(), "image": {"name": "i", "digest": None}}):
        record["sequences"] = record["sequences"] and [{"tokens": [1, 2], "masks": [-100, 2], "logprobs": [1.0, -0.5]}]
        for number, path in enumerate(places(record)):
            for index, value in [*enumerate(VALUES)][number % 11 :: 11]:
                own: dict[str, Any] = {"trajectory_id": f"t-{len(lines)}", "item_id": f"{number}-{index}"}
                if record["messages"]:  # so that there are pairs
                    own |= {"reward": len(lines) % 2}
                    record["messages"][0]["content"], record["messages"][-1]["content"] = "", f"{len(lines)}"
                whole = changed({**record, **own}, path, value)
                line = json.dumps(whole).encode() + b"\n"
                try:
                    Record.from_json(parse_line(line, "here"))
                except (ValueError, UsageError) as error:
                    assert str(error)
                else:
                    lines.append(line)
    assert len(lines) > 100
    run = write_run(here, lines)
    for arguments in COMMANDS:
        told(arguments, run, here, codes=(2,) if arguments[0] == "rescore" else (0,))
    opened_run = RecordedRun(run)
    assert len(opened_run.rows) > 100
    for row in opened_run.rows.values():
        assert all(map(str, transcript.rollout(row, opened_run.record(row).to_json())))


ABOUT: dict[str, Any] = {"configuration": {"environment": "tasks"}, "configuration_hash": "abc"}

RUNS = {
    "no object": "[]",
    "deep": "[" * 9000,
    "deep in JSON": json.dumps({**ABOUT, "versions": {"x": "[" * 9000}}),
    "NaN": json.dumps({**ABOUT, "seed": float("nan"), "configuration": {"rollout_timeout": float("inf")}}),
    "texts": json.dumps({**ABOUT, "started": ESCAPES, "versions": {ESCAPES: ESCAPES}, "merged": [{"name": ESCAPES}]}),
    "types": json.dumps({**ABOUT, "versions": [], "merged": 1, "started": 1e300}),
    "parts": json.dumps({**ABOUT, "merged": [{"versions": 1}, {}], "configuration": {"agent_settings": [1]}}),
    "times": json.dumps({**ABOUT, "started": "9999-12-31T23:59:59", "configuration": {"env": None, "environment": ""}}),
    "paths": json.dumps({**ABOUT, "configuration": {"environment": "../../outside/x", "agent": ESCAPES}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_any_run_json(here: Path, name: str) -> None:
    run = write_run(here, [rollout().line()], RUNS[name])
    for arguments in COMMANDS:
        told(arguments, run, here)
    with make_shown_folder(run) as folder, open_logs([run], folder) as logs:
        for log in logs:
            log.update()


LINES = {
    "deep": b'{"version":2,"item":' + b"[" * 9000 + b"]" * 9000 + b"}\n",
    "no JSON": ESCAPES.encode() + b"\n",
    "another version": b'{"version":' + json.dumps(ESCAPES).encode() + b"}\n",
    "a newer version": b'{"version":99}\n',
    "a wrong type": rollout().line().replace(b'"reward":1.0', b'"reward":"\\u001b[2J"'),
    "zeros": b"\0" * 100 + b"\n",
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_is_no_record_is_named(here: Path, name: str) -> None:
    run = write_run(here, [rollout().line(), LINES[name]])
    for arguments in COMMANDS[:-1]:
        assert "trajectories.jsonl, " in told(arguments, run, here, codes=(2,))


def _index_of_lies(run: Path) -> None:
    """An index whose rows have values of other types, and one call of none."""
    RecordedRun(run)
    path = run / ".trajectories.jsonl.index"
    text = path.read_text().replace('"bash":[1,', '"bash":[0,').replace("1.0", json.dumps(ESCAPES))
    path.write_text(text)


def _log_of_lies(run: Path) -> None:
    with make_shown_folder(run) as folder, open_logs([run], folder):
        pass
    for log in (run / ".view").glob("*.eval"):
        log.write_bytes(log.read_bytes().replace(b"{", b"[")[:-3])


FOLDERS: dict[str, Callable[[Path], object]] = {
    "pipes": lambda run: [os.mkfifo(run / name) for name in (".lock", "summary.json", ".trajectories.jsonl.index")],
    "folders": lambda run: [(run / name).mkdir() for name in (".lock", "summary.json", ".trajectories.jsonl.index")],
    "links": lambda run: [
        (run / name).symlink_to("../../../outside/theirs")
        for name in (".lock", "rescored.jsonl", "stalls.txt", ".summary.json.new", f".trajectories.jsonl.{os.getpid()}")
    ],
    "links to nothing": lambda run: [
        (run / name).symlink_to("../../../outside/owned")
        for name in (".lock", "rescored.jsonl", ".run.json.new", "superseded.jsonl", ".trajectories.jsonl.new")
    ],
    "a linked folder": lambda run: (run / ".view").symlink_to("../../../outside"),
    "an index": _index_of_lies,
    "a log": _log_of_lies,
    "records that are a pipe": lambda run: [
        (run / "trajectories.jsonl").unlink(),
        os.mkfifo(run / "trajectories.jsonl"),
    ],
    "a linked log": lambda run: [
        (run / ".view").mkdir(),
        (run / ".view" / log_name(RecordedRun(run))).symlink_to("../../../../outside/theirs"),
    ],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_any_file_in_the_folder(here: Path, name: str) -> None:
    run = write_run(here, [rollout().line(), rollout(index=1, said="Other.", reward=0.0).line()])
    FOLDERS[name](run)
    again = ["rollout", "tasks", "--out", "RUN", "--resume", "--agent", "nop", "--env.dataset_path=nothing.jsonl"]
    for arguments in (*COMMANDS, again, ["rescore", "RUN", "--environment", "tasks"]):
        told(arguments, run, here, codes=(0, 1, 2, 3))
    if "pipe" in name and "records" in name:
        return
    with make_shown_folder(run) as folder, open_logs([run], folder) as logs:
        for log in logs:
            assert isinstance(log, RunLog) and log.update() in (True, False)
