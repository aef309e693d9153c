"""`hermes-rl view`: the viewer is started with a log that follows the run, and ends with the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hermes_core.cli.main import main
from hermes_core.view.logs import make_shown_folder, open_logs

VIEWER = """#!/bin/sh
echo "$@" >> "{told}"
case "$2" in
  bundle) cp -rL "$4" "$6"; exit {code} ;;
  start) echo $$ > "{told}.pid"; exec sleep 60 ;;
esac
"""
"""Plays Inspect: notes its arguments, copies what it bundles, and runs until it is ended."""


@pytest.fixture
def viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Puts a program `inspect` on the path; returns the file with its arguments."""

    def put(code: int = 0) -> Path:
        program, told = tmp_path / "bin" / "inspect", tmp_path / "told"
        program.parent.mkdir()
        program.write_text(VIEWER.format(told=told, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return told

    return put


def until(true: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until something is true, and return it."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)
    return value


def samples(log: Path) -> list[str]:
    """The samples in a log; none if it was written between two reads of its directory."""
    try:
        with zipfile.ZipFile(log) as archive:
            return [name for name in archive.namelist() if name.startswith("samples/")]
    except zipfile.BadZipFile:
        return []


def test_without_inspect_the_line_that_installs_it_is_named(
    make_record: Any, write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for options in ([], ["--static", "out"]):
        result = CliRunner().invoke(main, ["view", str(write_run([make_record()])), *options])
        assert result.exit_code == 2
        assert "Inspect, which has the viewer, is not installed (`pip install inspect-ai`" in result.output
        assert "hermes-rl show" in result.output


def test_the_viewer_follows_a_run_and_ends_with_the_command(
    make_record: Any, write_run: Any, viewer: Any, tmp_path: Path
) -> None:
    told, folder = viewer(), write_run([make_record()])
    command = [sys.executable, "-m", "hermes_core", "view", str(folder), "--port", "1234"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as view:
        words = until(lambda: told.exists() and told.read_text()).split()
        assert words[:3] == ["view", "start", "--log-dir"]
        assert words[4:] == ["--host", "127.0.0.1", "--port", "1234", "--no-trust-content"]
        (log,) = until(lambda: list(Path(words[3]).iterdir()))
        until(lambda: len(samples(log)) == 1)
        with (folder / "trajectories.jsonl").open("ab") as file:
            file.write(make_record(index=1).line())
        until(lambda: len(samples(log)) == 2)
        pid = int(Path(f"{told}.pid").read_text())
        view.send_signal(signal.SIGTERM)
        view.communicate(timeout=20)
    assert view.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not log.parent.exists()
    (kept,) = (folder / ".view").iterdir()
    assert len(samples(kept)) == 2, "the log is kept for the next time"


def test_two_views_of_a_run_do_not_disturb_each_other(make_record: Any, write_run: Any) -> None:
    run = write_run([make_record()])
    with (
        make_shown_folder(run) as first,
        make_shown_folder(run) as second,
        open_logs([run], first) as one,
        open_logs([run], second) as two,
    ):
        assert one[0].update() and two[0].update()
        ((log,), (other,)) = first.iterdir(), second.iterdir()
        assert log.name == other.name
        assert log.stat().st_ino != other.stat().st_ino
        assert samples(log) == samples(other) == ["samples/greet_epoch_1.json"]


def test_the_end_of_the_viewer_is_an_error(make_record: Any, write_run: Any, viewer: Any) -> None:
    told = viewer()
    program = told.parent / "bin" / "inspect"
    program.write_text("#!/bin/sh\nexit 3\n")
    result = CliRunner().invoke(main, ["view", str(write_run([make_record()]))])
    assert result.exit_code == 3
    assert "the viewer ended with exit code 3" in result.output


def test_a_static_folder_has_the_logs_of_all_runs(
    make_record: Any, write_run: Any, viewer: Any, tmp_path: Path
) -> None:
    viewer()
    runs = [write_run([make_record()], name) for name in ("one", "two")]
    result = CliRunner().invoke(main, ["view", *map(str, runs), "--static", str(tmp_path / "site")])
    assert result.exit_code == 0, result.output
    assert [samples(log) for log in (tmp_path / "site").iterdir()] == [["samples/greet_epoch_1.json"]] * 2
    assert "http.server" in result.output


def test_a_bundle_that_fails_is_an_error(make_record: Any, write_run: Any, viewer: Any, tmp_path: Path) -> None:
    viewer(code=1)
    result = CliRunner().invoke(main, ["view", str(write_run([make_record()])), "--static", str(tmp_path / "site")])
    assert result.exit_code == 3
    assert "`inspect view bundle` failed" in result.output


def test_a_run_that_cannot_be_written_is_shown(make_record: Any, write_run: Any, viewer: Any, tmp_path: Path) -> None:
    viewer()
    run = write_run([make_record()])
    (run / ".view").write_text("in the way")
    result = CliRunner().invoke(main, ["view", str(run), "--static", str(tmp_path / "site")])
    assert result.exit_code == 0, result.output
    (log,) = (tmp_path / "site").iterdir()
    assert len(samples(log)) == 1
