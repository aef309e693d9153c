"""The folder of an export: whole or not there, without secrets, with a card, and in bounded memory."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hermes_core.errors import OutputError, UnknownNameError, UsageError
from hermes_core.export.exporting import export_run
from hermes_core.export.formats import FORMATS
from hermes_core.export.selection import ExportFilters
from hermes_core.settings import Redactor
from tests.export.conftest import MakeRun, failed, rollout

SECRET = 'sk-"quoted"-é-0123456789'


def everything_in(folder: Path) -> str:
    texts = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".eval":
            with zipfile.ZipFile(path) as log:
                texts += [log.read(name).decode() for name in log.namelist()]
        else:
            texts.append(path.read_text())
    return "\n".join(texts)


@pytest.mark.parametrize("to", FORMATS)
def test_secrets_are_in_no_format(make_run: MakeRun, to: str) -> None:
    records = [rollout(index=index, said=f"It is {SECRET} {index}.", reward=float(index)) for index in range(2)]
    records = [replace(record, details={SECRET: [SECRET]}, model=f"model {SECRET}") for record in records]
    clean = rollout("other")
    run = make_run([*records, clean], seed=7)
    out = run.parent / "out"
    export_run(run, to, out, redact=Redactor({"KEY": SECRET}))
    text = everything_in(out)
    for spelling in (SECRET, json.dumps(SECRET)[1:-1], json.dumps(json.dumps(SECRET)[1:-1])[1:-1], "0123456789"):
        assert spelling not in text
    if to != "tokens":
        assert "[redacted: KEY]" in text
    else:
        (row,) = (out / "train.jsonl").read_text().splitlines()
        assert json.loads(row)["item_id"] == "other"


def test_tokens_that_spell_a_secret_of_the_run_are_left_out(make_run: MakeRun) -> None:
    run = make_run([rollout(said="It is [redacted: KEY]."), rollout("other")])
    done = export_run(run, "tokens", run.parent / "tokens")
    assert done.left_out == {"no exact tokens: a secret was removed from the messages, and the tokens spell it": 1}
    export_run(run, "atif", run.parent / "atif")
    for step in json.loads((run.parent / "atif" / "greet-0.json").read_text())["steps"]:
        assert "completion_token_ids" not in step.get("metrics", {})


@pytest.mark.parametrize("to", FORMATS)
def test_records_of_version_1_are_exported(make_run: MakeRun, to: str) -> None:
    lines = []
    for index in range(2):
        record = rollout(index=index, said=f"Answer {index}.", reward=float(index))
        (sequence,) = record.sequences
        old = {
            **{name: getattr(record, name) for name in ("trajectory_id", "environment", "item_id", "group")},
            **{name: getattr(record, name) for name in ("rollout_index", "agent", "backend", "reward", "stop_reason")},
            **{"details": {}, "failure": None, "patch": None, "messages": record.messages, **sequence.lists()},
            **{"timings": dict(record.timings), "tool_calls": vars(record.tool_calls)},
        }
        lines.append(json.dumps(old).encode() + b"\n")
    run = make_run(lines)
    done = export_run(run, to, run.parent / "out")
    assert (done.rollouts, done.tools["read"].errors) == (2, {"failed": 2})


def test_an_export_that_fails_leaves_nothing(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run([failed("lost")])
    out = run.parent / "exports" / "out"
    with pytest.raises(UsageError, match="nothing to export as tokens: 1 failure: infra"):
        export_run(run, "tokens", out)
    run = make_run([rollout()], name="full")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "train.jsonl")

    monkeypatch.setattr("hermes_core.export.exporting.files_of", full)
    with pytest.raises(OutputError, match=r"can't write train.jsonl: No space left on device \(free some space"):
        export_run(run, "openai", out)
    assert list(out.parent.iterdir()) == []


def test_what_exists_is_never_replaced(make_run: MakeRun) -> None:
    run = make_run([rollout()])
    out = run.parent / "out"
    out.mkdir()
    with pytest.raises(UsageError, match=r"exists already \(choose another folder"):
        export_run(run, "openai", out)
    assert list(out.iterdir()) == []


def test_wrong_names_are_refused_with_the_nearest(make_run: MakeRun) -> None:
    run = make_run([rollout()])
    with pytest.raises(UnknownNameError, match="openai"):
        export_run(run, "openia", run.parent / "out")
    with pytest.raises(UsageError, match="not a table"):
        export_run(run, "atif", run.parent / "out", parquet=True)
    with pytest.raises(UsageError, match=r"no usable run.json"):
        export_run(run.parent, "openai", run.parent / "out")


def test_parquet_without_pyarrow_says_what_to_install(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run = make_run([rollout()])
    with pytest.raises(UsageError, match=re.escape("pip install 'hermes-rl[parquet]'")):
        export_run(run, "openai", run.parent / "out", parquet=True)


def test_the_card_tells_what_the_export_holds(make_run: MakeRun) -> None:
    records = [rollout(index=index, said=f"{index}", reward=index / 2) for index in range(3)]
    run = make_run([*records, failed("lost")])
    out = run.parent / "out"
    done = export_run(run, "trl", out, filters=ExportFilters(min_reward=0.5), licence="cc-by-4.0")
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "cc-by-4.0"
    assert front["configs"] == [{"config_name": "default", "data_files": "train.jsonl"}]
    assert "| rollouts | 2 |" in text
    assert "| mean reward | 0.7500 |" in text
    assert "| reward too low, or none | 1 |" in text
    assert "| failure: infra | 1 |" in text
    assert "| `read` | 2 | 2 | 2 failed | 0.500 |" in text
    assert "| run | tasks | model | 7 | 2026-11-23T08:00:00+00:00 | abc | hermes-rl 0.1.0 |" in text
    assert '{"min_reward": 0.5}' in text
    digest = hashlib.sha256((out / "train.jsonl").read_bytes()).hexdigest()
    assert digest in text
    assert done.files[0].sha256 == digest
    assert hashlib.sha256((run / "trajectories.jsonl").read_bytes()).hexdigest() in text


def test_names_of_a_run_are_no_markup_in_the_card(make_run: MakeRun) -> None:
    strange = rollout()
    call = replace(strange.calls[0], name="a|b`<script>\n# c")
    run = make_run([replace(strange, calls=(call,))])
    out = run.parent / "out"
    export_run(run, "openai", out)
    text = (out / "README.md").read_text()
    assert "<script>" not in text
    assert "\n# c" not in text


MEASURED = """
import resource, sys
from pathlib import Path
from hermes_core.export.exporting import export_run
export_run(sys.argv[1], sys.argv[2], sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.few(0, 1)
@pytest.mark.parametrize("to", ["harbor", "preference", "trl"])
def test_memory_does_not_grow_with_the_records(make_run: MakeRun, to: str) -> None:
    """The records of the larger run would take more than 40 MB more: each is 0.8 MB."""

    def peak(count: int) -> int:
        answers = ["0" * 200_000, "1" * 200_000]
        records = (rollout(f"item-{n // 2}", n % 2, said=answers[n % 2], reward=float(n % 2)) for n in range(count))
        run = make_run(records, f"{count}")
        command = [sys.executable, "-c", MEASURED, str(run), to, str(run.parent / f"out-{count}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert peak(60) - peak(6) < 20
