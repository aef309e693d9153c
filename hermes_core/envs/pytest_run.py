"""Runs chosen tests in a slot with core's own reporter, and tells what became of each."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hermes_core.envs import pytest_report
from hermes_core.errors import CommandError, VerifierError
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.results import CommandResult

GRACE_S = 15.0
"""Seconds that the supervisor has beyond the tests' own, to end them and to report."""

OUTPUT_KEPT = 8000
"""Bytes of pytest's own output that are kept, from its end."""

_OUTCOMES = {
    pytest_report.PASSED: "passed",
    pytest_report.FAILED: "failed",
    pytest_report.ERROR: "error",
    pytest_report.SKIPPED: "skipped",
    pytest_report.XFAILED: "xfailed",
    pytest_report.XPASSED: "xpassed",
    pytest_report.MISSING: "missing",
}


class ReportStatus(StrEnum):
    """How a test run ended."""

    FINISHED = "finished"
    """pytest came to its end."""
    CUT = "cut"
    """The test process ended without a last word: killed, crashed, or `os._exit`."""
    TIMED_OUT = "timed_out"
    NO_REPORT = "no_report"
    """The supervisor began, but its report did not arrive."""


@dataclass(frozen=True)
class PytestReport:
    """What became of each wanted test."""

    status: ReportStatus
    outcomes: Mapping[str, str]
    """Per node id `passed`, `failed`, `error`, `skipped`, `xfailed`, `xpassed` or `missing`."""
    texts: Sequence[tuple[str, str]] = ()
    """Node id (or file) and the end of the traceback, of the first failures."""
    output: str = ""
    """The end of what pytest and the tests printed."""
    pytest_version: str | None = None
    pytest_status: int | None = None
    duration_s: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether pytest came to its end; otherwise no outcome is to be believed."""
        return self.status is ReportStatus.FINISHED

    def passed(self, node_id: str) -> bool:
        """Whether this test passed in a run that came to its end."""
        return self.complete and self.outcomes.get(node_id) == "passed"


async def run_pytest(
    commands: SlotCommands,
    node_ids: Sequence[str],
    *,
    python: str,
    root: str,
    timeout_s: float,
    import_path: Sequence[str] = (),
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> PytestReport:
    """Run exactly these tests in the slot, each in one pytest session, and report each of them.

    Node ids travel as data, so they may hold anything. The tests are never run if the interpreter or pytest is not
    as it should be; from then on whatever goes wrong is theirs and is in the report.

    Args:
        node_ids: as pytest gives them, relative to `root`.
        python: the interpreter of a virtual environment that has pytest, which the slot can't write.
        root: absolute path of the project in the slot.
        timeout_s: seconds for all of the tests together.
        import_path: absolute directories that come first in `sys.path`, once pytest and its plugins are loaded.
        args: further arguments for pytest; none may name a file to collect.
        env: further environment variables of the tests.

    Raises:
        VerifierError: the interpreter or pytest could not be started, before any code of the project ran.
    """
    node_ids = list(node_ids)
    config = {
        "root": root,
        "import_path": list(import_path),
        "args": list(args),
        "ids": node_ids,
        "timeout_s": timeout_s,
        "env": dict(env or {}),
        "output_bytes": OUTPUT_KEPT,
    }
    argv = [python, "-I", "-S", "-c", pytest_report.LOADER, _source()]
    try:
        done = await commands.run(argv, stdin=json.dumps(config).encode(), timeout_s=timeout_s + GRACE_S)
    except CommandError as error:
        raise VerifierError(
            f"the tests' interpreter {python} can't be started: {error.message}",
            hint="the slot's user must be able to run it: see `hermes-rl doctor`",
        ) from error
    return _report(done, node_ids, python)


def _report(done: CommandResult, node_ids: Sequence[str], python: str) -> PytestReport:
    lines = [_parsed(line) for line in done.stdout.splitlines()]
    if not lines or "supervisor" not in lines[0]:
        raise VerifierError(
            f"the tests' interpreter {python} does not work: {done.error_text.strip()[-500:] or done.returncode}",
            hint="the slot's user must be able to run it: see `hermes-rl doctor`",
        )
    answer = lines[1] if len(lines) == 2 and "report" in lines[1] else {}
    if answer.get("report") == "broken":
        raise VerifierError(
            f"pytest can't be imported by {python}: {answer['broken']}",
            hint="the requirements of the repository must name pytest 7 or later",
        )
    codes = answer.get("outcomes") or pytest_report.MISSING * len(node_ids)
    status = ReportStatus(answer["report"]) if answer else ReportStatus.NO_REPORT
    return PytestReport(
        status=ReportStatus.TIMED_OUT if done.timed_out else status,
        outcomes={node_id: _OUTCOMES[code] for node_id, code in zip(node_ids, codes, strict=True)},
        texts=[(where, text) for where, text in answer.get("texts", ())],
        output=answer.get("output", ""),
        pytest_version=answer.get("pytest"),
        pytest_status=answer.get("pytest_status"),
        duration_s=answer.get("duration_s", done.duration_s),
    )


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@functools.cache
def _source() -> str:
    return Path(pytest_report.__file__).read_text(encoding="utf-8")
