"""Processor time of `import hermes_core` and of `hermes-rl --help`, beside an interpreter that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.measure import Row, Rows, Target, alternate, p50, span

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(sys.executable).with_name("hermes-rl")


async def rows(quick: bool) -> Rows:
    """Processor seconds (user and system) of a whole process."""
    nothing = [sys.executable, "-c", "pass"]
    help_command = (
        [str(PROGRAM), "--help"]
        if PROGRAM.exists()
        else [
            sys.executable,
            "-c",
            "import sys; sys.argv[1:] = ['--help']; from hermes_core.cli.main import main; main()",
        ]
    )
    for case, command, limit in (
        ("`import hermes_core`", [sys.executable, "-c", "import hermes_core"], 0.15),
        ("`hermes-rl --help`", help_command, 0.35),
    ):
        ours, reference = await alternate(
            partial(_processor_time, command),
            partial(_processor_time, nothing),
            3 if quick else 15,
        )
        notes = (f"the reference is `python -c pass`; ours {span(ours, 's')}",)
        yield Row("startup", f"CPU time of {case}", p50(ours), p50(reference), "s", Target(limit), notes)


async def _processor_time(command: list[str]) -> float:
    """User and system time of a process and those that it waited for."""
    return _run(command)


def _run(command: list[str]) -> float:
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} ended with status {process.returncode}"
    return usage.ru_utime + usage.ru_stime
