"""Values that a model may write and a format may not hold: no export fails because of them, and every file is JSON."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_core import from_json

from hermes_core.export.exporting import export_run
from hermes_core.export.formats import FORMATS
from hermes_core.export.rows import openai_rows
from hermes_core.records.record import Record
from tests.export.conftest import MakeRun, rollout

TABLES = [name for name, form in FORMATS.items() if form.columns is not None]

TEXTS = {
    "NaN": '{"a": NaN}',
    "infinity": '{"a": [-Infinity]}',
    "a number that is infinite": '{"a": 1e400}',
    "a number beyond 64 bits": '{"a": 1180591620717411303424}',
    "deeply nested": '{"a": ' + "[" * 9000 + "]" * 9000 + "}",
    "nested": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "half a pair": r'{"a": "\ud800"}',
    "no JSON": "{'a': 1",
    "a list": "[1]",
}
"""Arguments that are no JSON object that every reader takes."""

READ = {
    '"{\\"command\\": \\"ls\\"}"': {"command": "ls"},
    '{"command": "a\nb"}': {"command": "a\nb"},
    '{"command": "é", "n": -9223372036854775808}': {"command": "é", "n": -(2**63)},
    "": {},
}
"""Arguments that are one, as the call read them."""


def calling(index: int, arguments: str, **changes: Any) -> Record:
    """A rollout with these arguments, and with a tool's answer that is the same text."""
    record = rollout(index=index, said=f"Answer {index}.", **changes)
    record.messages[2]["tool_calls"][0]["function"]["arguments"] = arguments
    record.messages[3]["content"] = arguments
    return record


def values_in(folder: Path) -> list[Any]:
    """Everything that is JSON in an export, read strictly."""
    texts: list[str | bytes] = []
    for path in folder.rglob("*"):
        if path.suffix == ".eval":
            with zipfile.ZipFile(path) as log:
                texts += [log.read(name) for name in log.namelist()]
        elif path.suffix == ".json":
            texts.append(path.read_text())
        elif path.suffix == ".jsonl":
            texts += path.read_text().splitlines()
    return [from_json(text, allow_inf_nan=False) for text in texts]


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize("to", FORMATS)
def test_no_arguments_fail_an_export(make_run: MakeRun, to: str, parquet: bool) -> None:
    texts = [*TEXTS.values(), *READ]
    run = make_run([calling(index, text, reward=index / 100) for index, text in enumerate(texts)])
    if parquet:
        pytest.importorskip("pyarrow")
    if parquet and to not in TABLES:
        return
    done = export_run(run, to, run.parent / "out", parquet=parquet)
    assert (done.rollouts, done.left_out) == (
        (len(texts) // 2 * 2, {"in no pair": 1}) if to == "preference" else (len(texts), {})
    )
    assert values_in(run.parent / "out") or parquet


@pytest.mark.parametrize(("written", "read"), [*((text, text) for text in TEXTS.values()), *READ.items()])
def test_rows_for_templates_have_arguments_as_they_were_read_or_else_written(
    make_run: MakeRun, written: str, read: Any
) -> None:
    run = make_run([calling(0, written)])
    export_run(run, "trl", run.parent / "out")
    (row,) = values_in(run.parent / "out")
    assert row["messages"][2]["tool_calls"][0]["function"]["arguments"] == read


def test_numbers_of_a_record_that_no_float_holds_are_text(make_run: MakeRun) -> None:
    line = json.dumps({**rollout().to_json(), "details": {"x": "number"}}).replace('"number"', "[1e400, NaN, 1e5]")
    run = make_run([line.encode() + b"\n"])
    export_run(run, "harbor", run.parent / "out")
    details = (run.parent / "out/greet__0/verifier/test-stdout.txt").read_text().partition("\n\n")[0]
    assert json.loads(details) == {"x": ["1e400", "NaN", 100_000.0]}


def test_what_a_format_can_not_hold_is_left_out_and_told_with_its_rewards(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run([rollout(index=index, said=f"{index}", reward=float(index % 2)) for index in range(4)])

    def rows(selection: Any, record: Record) -> Any:
        yield from openai_rows(selection, record)
        if record.rollout_index in (1, 2):
            yield {"messages": [float("nan")]}

    monkeypatch.setitem(FORMATS, "openai", replace(FORMATS["openai"], rows=rows))
    done = export_run(run, "openai", run.parent / "out")
    reason = "values that the format can't hold"
    assert (done.rollouts, done.rows, done.left_out) == (2, 2, {reason: 2})
    assert done.left_out_rewards == {reason: {"scored": 2, "solved": 1, "mean": 0.5}}
    assert "1 solved, mean reward 0.500" in (run.parent / "out" / "README.md").read_text()
    assert len(values_in(run.parent / "out")) == 2


@pytest.mark.parametrize("to", TABLES)
def test_the_card_names_the_types_of_the_columns(make_run: MakeRun, to: str) -> None:
    run = make_run([rollout(index=index, said=f"{index}", reward=float(index)) for index in range(2)])
    export_run(run, to, run.parent / "out")
    about = yaml.safe_load((run.parent / "out" / "README.md").read_text().split("---")[1])
    columns = FORMATS[to].columns
    assert columns is not None
    assert [feature["name"] for feature in about["dataset_info"]["features"]] == list(columns)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", TABLES)
def test_datasets_reads_rows_that_begin_without_calls(make_run: MakeRun, datasets_extra: Any, to: str) -> None:
    plain = [rollout(f"item-{index}", messages=rollout().messages[1:2] + rollout().messages[5:]) for index in range(9)]
    groups = [calling(index, text, reward=index / 100) for index, text in enumerate([*TEXTS.values(), *READ])]
    pair = [rollout("plain", index, said=f"{index}", reward=float(index)) for index in range(2)]
    bare = [Record(**{**vars(each), "messages": [each.messages[1], each.messages[5]]}) for each in pair]
    run = make_run([*bare, *plain, *groups])
    done = export_run(run, to, run.parent / "out")
    loaded = datasets_extra.load_dataset(
        str(run.parent / "out"), split="train", cache_dir=str(run.parent / "cache"), chunksize=1000
    )
    assert len(list(loaded)) == done.rows
