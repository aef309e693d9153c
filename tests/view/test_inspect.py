"""Inspect itself reads our logs: the header, every sample, and a log that is being written."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import UsageError
from hermes_core.export.eval_log import RunLog
from hermes_core.records.index import RecordedRun
from hermes_core.view import inspect_viewer

pytestmark = pytest.mark.full

READ = """
import json, sys
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries, write_eval_log
header = read_eval_log(sys.argv[1], header_only=True)
summaries = read_eval_log_sample_summaries(sys.argv[1])
whole = read_eval_log(sys.argv[1], resolve_attachments=True)
if header.status != "started":
    write_eval_log(whole, sys.argv[1] + ".again.eval")
    assert read_eval_log(sys.argv[1] + ".again.eval").results == whole.results
json.dump({
    "status": header.status,
    "trusted": header.eval.viewer.trust_content,
    "summaries": [summary.epoch for summary in summaries],
    "samples": [sample.model_dump(mode="json") for sample in whole.samples or []],
}, sys.stdout)
"""


@pytest.fixture
def read(require: Any, tmp_path: Path) -> Any:
    """Reads a log with Inspect."""
    try:
        command = inspect_viewer.command()
    except UsageError as error:
        require("inspect", str(error))
    require("inspect", None)
    python = command[0] if len(command) > 1 else str(Path(command[0]).resolve().parent / "python")

    def read_log(log: Path) -> dict[str, Any]:
        done = subprocess.run([python, "-c", READ, str(log)], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return read_log


def test_inspect_reads_what_we_write(read: Any, make_record: Any, write_run: Any, tmp_path: Path) -> None:
    odd = make_record("odd", messages=[{"role": "user", "content": "x"}, {"role": "tool", "content": None}])
    records = [make_record(), make_record(index=1, reward=None), make_record("limit", stop_reason="max_turns"), odd]
    log = RunLog(RecordedRun(write_run(records)), tmp_path / "x.eval")
    log.update()
    log.close()
    seen = read(tmp_path / "x.eval")
    assert (seen["status"], seen["trusted"], seen["summaries"]) == ("success", False, [1, 2, 1, 1])
    samples = {(sample["id"], sample["epoch"]): sample for sample in seen["samples"]}
    assert samples["greet", 1]["scores"]["reward"]["value"] == 1.0
    assert samples["greet", 1]["error"] is None
    (first, _) = (event for event in samples["greet", 1]["events"] if event["event"] == "model")
    assert [message["role"] for message in first["input"]] == ["system", "user"]
    assert samples["greet", 2]["scores"] is None
    assert samples["greet", 2]["error"]["message"].startswith("infra failure at verify")
    assert samples["limit", 1]["limit"]["type"] == "turn"


def test_inspect_reads_a_log_that_is_being_written(
    read: Any, make_record: Any, write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_core.export.eval_log.is_running", lambda _: True)
    log = RunLog(RecordedRun(write_run([make_record()], ended=False)), tmp_path / "x.eval")
    assert read(tmp_path / "x.eval")["samples"] == []
    log.update()
    seen = read(tmp_path / "x.eval")
    assert (seen["status"], seen["summaries"], len(seen["samples"])) == ("started", [1], 1)
    log.close()
