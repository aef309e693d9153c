"""Runs the benchmarks and prints ours beside the reference: `python -m benchmarks [--quick] [--json] [--only NAME]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from benchmarks import (
    agent_programs,
    atropos,
    backends,
    batch,
    checkouts,
    datagen,
    images,
    large_requests,
    latency,
    output,
    parsers,
    peers_docker,
    peers_modal,
    peers_rollouts,
    peers_ssh,
    processes,
    reset,
    startup,
    swe_smith,
    terminals,
    throughput,
    trl_reset,
    view,
)
from benchmarks.host import machine
from benchmarks.measure import Row, Rows

BENCHMARKS: Mapping[str, Callable[[bool], Rows]] = {
    "latency": latency.rows,
    "batch": batch.rows,
    "throughput": throughput.rows,
    "reset": reset.rows,
    "output": output.rows,
    "processes": processes.rows,
    "swe-smith": swe_smith.rows,
    "checkouts": checkouts.rows,
    "datagen": datagen.rows,
    "startup": startup.rows,
    "parsers": parsers.rows,
    "docker": peers_docker.rows,
    "docker-rollouts": peers_rollouts.rows,
    "images": images.rows,
    "terminals": terminals.rows,
    "ssh": peers_ssh.rows,
    "backends": backends.rows,
    "modal": peers_modal.rows,
    "view": view.rows,
    "atropos": atropos.rows,
    "agent_programs": agent_programs.rows,
    "large_requests": large_requests.rows,
    "trl-reset": trl_reset.rows,
}

NOT_QUICK = (
    *("swe-smith", "checkouts", "datagen", "docker-rollouts", "images", "terminals", "atropos", "trl-reset"),
    "backends",
)
"""Left out by `--quick` unless asked for by name: they take minutes however few the repetitions."""

COLUMNS = "{:<12} {:<52} {:>11} {:>11} {:>7}  {:<9} {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when every benchmark ran, whatever its figures; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and nothing that takes minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), metavar="NAME", help="; ".join(BENCHMARKS))
    chosen = parser.parse_args(arguments)
    names = chosen.only or [name for name in BENCHMARKS if not (chosen.quick and name in NOT_QUICK)]
    return asyncio.run(_run(names, chosen.quick, chosen.json))


async def _run(names: Sequence[str], quick: bool, as_json: bool) -> int:
    about = machine()
    rows: list[Row] = []
    failed: dict[str, str] = {}
    took_s: dict[str, float] = {}
    if not as_json:
        print("  ".join(f"{key}: {value}" for key, value in about.items()), end="\n\n")
        print(COLUMNS.format("benchmark", "case", "ours", "reference", "ratio", "target", "met"))
    for name in names:
        began = time.monotonic()
        try:
            async for row in BENCHMARKS[name](quick):
                rows.append(row)
                if not as_json:
                    print(_line(row), flush=True)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        took_s[name] = round(time.monotonic() - began, 1)
    if as_json:
        told = [row.to_dict() for row in rows]
        about = {"machine": about, "quick": quick, "rows": told, "failed": failed, "took_s": took_s}
        print(json.dumps(about, indent=1))
    else:
        missed = [f"{row.benchmark} ({row.case})" for row in rows if row.met is False]
        print(f"\n{sum(row.met is True for row in rows)} targets met, {len(missed)} missed", *missed, sep="\n  ")
        print(f"took {sum(took_s.values()):.0f} s:", ", ".join(f"{name} {each:.0f}" for name, each in took_s.items()))
        for name, text in failed.items():
            print(f"{name} failed: {text}")
    return 1 if failed else 0


def _line(row: Row) -> str:
    line = COLUMNS.format(
        row.benchmark,
        row.case,
        _figure(row.ours, row.unit),
        _figure(row.reference, row.unit),
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        "-" if row.target is None else row.target.text(row.unit),
        {True: "yes", False: "NO", None: "-"}[row.met],
    )
    return "\n".join([line, *(f"{'':<13}{note}" for note in row.notes)])


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
