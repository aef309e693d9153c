"""Runs chosen tests in a slot with core's own reporter, and reports the outcome of each."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from hermes_core.errors import DISTURBANCES, CommandError, Disturbed, VerifierError
from hermes_core.pytest_runner import report as pytest_report
from hermes_core.rollout.starvation import watch_for_starvation
from hermes_core.sandbox.commands import CommandResult, SlotCommands

GRACE_S = 15.0
"""Seconds that the supervisor has, in addition to the tests' time, to end the tests and to report."""

OUTPUT_KEPT = 8000
"""Number of bytes kept from the end of pytest's own output."""

_TRY_IT = (
    "the slot's user must be able to run it: try it in `hermes-rl shell`, with the same backend, profile and isolation"
)

T = TypeVar("T")

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
    """pytest finished its run."""
    CUT = "cut"
    """The test process ended without its final message: killed, crashed, or by `os._exit`."""
    TIMED_OUT = "timed_out"
    NO_REPORT = "no_report"
    """The supervisor started, but its report did not arrive."""


@dataclass(frozen=True)
class PytestReport:
    """The outcome of each wanted test."""

    status: ReportStatus
    outcomes: Mapping[str, str]
    """Maps node ids to `passed`, `failed`, `error`, `skipped`, `xfailed`, `xpassed` or `missing`."""
    texts: Sequence[tuple[str, str]] = ()
    """For each of the first failures, the node id (or file) and the end of the traceback."""
    output: str = ""
    """The end of the output of pytest and the tests."""
    pytest_version: str | None = None
    pytest_status: int | None = None
    duration_s: float = 0.0
    disturbance: str | None = None
    """A text that names a process killed with SIGKILL, or a resource that ran out, while the tests ran; None if nothing
    is known. The tests themselves can cause this, and so can a neighbour or an overloaded host."""

    @property
    def complete(self) -> bool:
        """Return whether pytest finished. If it did not, trust no outcome."""
        return self.status is ReportStatus.FINISHED

    def passed(self, node_id: str) -> bool:
        """Return whether this test passed in a run that finished."""
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
    doctests: Mapping[str, tuple[str, int]] | None = None,
    cwd: str | None = None,
    with_parameters: bool = False,
) -> PytestReport:
    """Run exactly these tests in the slot, all in one pytest session, and report each of them.

    Node ids travel as data, so they may contain any characters. The interpreter and pytest are started before any code
    of the project runs. From then on, every problem counts as caused by the tests and is in the report.

    Args:
        node_ids: as pytest prints them, relative to `root`.
        python: the interpreter of a virtual environment with pytest, to which the slot must not be able to write.
        root: absolute path of the project in the slot.
        timeout_s: seconds for all tests together.
        import_path: absolute directories to put first in `sys.path`, after pytest and its plugins are loaded.
        args: additional arguments for pytest; none may name a file to collect.
        env: additional environment variables of the tests.
        doctests: for node ids of modules' doctests, a docstring with the examples and its line number, from 0. It
            replaces the module's own docstring.
        cwd: the directory in which the tests run; None is `root`.
        with_parameters: whether a node id without parameters stands for the test with all parameters. Its outcome is
            then the worst of theirs.

    Raises:
        VerifierError: the interpreter or pytest could not be started, before any code of the project ran.
        Disturbed: the same, if the supervisor was killed or no process could be started.
    """
    node_ids = list(node_ids)
    config = {
        "root": root,
        "import_path": list(import_path),
        "args": list(args),
        "ids": node_ids,
        "timeout_s": timeout_s,
        "env": dict(env or {}),
        "doctests": dict(doctests or {}),
        "output_bytes": OUTPUT_KEPT,
        "cwd": cwd,
        "with_parameters": with_parameters,
    }
    argv = [python, "-I", "-S", "-c", pytest_report.LOADER, _source()]
    try:
        run = commands.run(argv, stdin=json.dumps(config).encode(), timeout_s=timeout_s + GRACE_S)
        done, starved = await watch_for_starvation(commands, run, timeout_s)
    except CommandError as error:
        if error.code in DISTURBANCES:
            raise Disturbed(f"the tests could not be started: {error.message}") from error
        raise VerifierError(
            f"the tests' interpreter {python} can't be started: {error.message}",
            hint=_TRY_IT,
        ) from error
    report = _report(done, node_ids, python)
    if report.status is ReportStatus.TIMED_OUT and report.disturbance is None:
        return replace(report, disturbance=starved)
    return report


def _report(done: CommandResult, node_ids: Sequence[str], python: str) -> PytestReport:
    lines = [_parse(line) for line in done.stdout.splitlines()]
    killed = "the supervisor of the tests was killed" if done.signal == signal.SIGKILL and not done.timed_out else None
    if not lines or "supervisor" not in lines[0]:
        if killed is not None:
            raise Disturbed(f"{killed} before it could begin")
        raise VerifierError(
            f"the tests' interpreter {python} does not work: {done.error_text.strip()[-500:] or done.returncode}",
            hint=_TRY_IT,
        )
    answer = lines[1] if len(lines) == 2 else {}
    if answer.get("report") == "broken":
        raise VerifierError(
            f"pytest can't be imported by {python}: {answer.get('broken')}",
            hint="the requirements of the repository must name pytest 7 or later",
        )
    status, codes = _read_status(answer), answer.get("outcomes")
    if (
        status is None
        or not isinstance(codes, str)
        or len(codes) != len(node_ids)
        or not _OUTCOMES.keys() >= set(codes)
    ):
        status, codes, answer = ReportStatus.NO_REPORT, pytest_report.MISSING * len(node_ids), {}
    return PytestReport(
        status=ReportStatus.TIMED_OUT if done.timed_out else status,
        outcomes={node_id: _OUTCOMES[code] for node_id, code in zip(node_ids, codes, strict=True)},
        texts=_texts(answer.get("texts")),
        output=_of_kind(answer.get("output"), str) or "",
        pytest_version=_of_kind(answer.get("pytest"), str),
        pytest_status=_of_kind(answer.get("pytest_status"), int),
        duration_s=_of_kind(answer.get("duration_s"), float) or done.duration_s,
        disturbance=killed or _disturbance(status, answer),
    )


_SAID = (ReportStatus.FINISHED, ReportStatus.CUT, ReportStatus.TIMED_OUT)


def _read_status(answer: Mapping[str, Any]) -> ReportStatus | None:
    """Return the report's own statement of how the run ended; None if the report is not valid."""
    word = answer.get("report")
    return ReportStatus(word) if word in _SAID else None


def _disturbance(status: ReportStatus, answer: Mapping[str, Any]) -> str | None:
    """Return a text on a disturbance of the tests that a process outside them may have caused; or None."""
    if status is ReportStatus.CUT and answer.get("exit_code") == -signal.SIGKILL:
        return "the test process was killed"
    if answer.get("oom_kills"):
        return "the kernel killed processes for want of memory while the tests ran"
    return "the disk was full when the tests had ended" if answer.get("disk_full") else None


def _texts(value: object) -> list[tuple[str, str]]:
    pairs = value if isinstance(value, list) else []
    return [(pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and [*map(type, pair)] == [str, str]]


def _of_kind(value: object, kind: type[T]) -> T | None:
    return value if isinstance(value, kind) else None


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@functools.cache
def _source() -> str:
    return Path(pytest_report.__file__).read_text(encoding="utf-8")
