"""The benchmarks run, and print a line for every figure. What the figures are is not for a test to judge."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, NOT_QUICK
from benchmarks.measure import Row, Target, alternate, p50, percentile, watch_stalls

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_quick_mode_has_every_figure():
    done = run("--quick", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == {}
    names = [row["benchmark"] for row in found["rows"]]
    assert list(dict.fromkeys(names)) == [name for name in BENCHMARKS if name not in NOT_QUICK]
    counts = {name: names.count(name) for name in names}
    assert counts == {"latency": 3, "batch": 1, "throughput": 3, "reset": 3, "output": 12, "startup": 2}
    measured = [row for row in found["rows"] if row["ours"] is not None]
    assert all(row["ours"] > 0 for row in measured if row["unit"] != "MB")
    assert all(row["met"] in (True, False) for row in measured if row["target"])
    withheld = {row["case"] for row in found["rows"] if row["ours"] is None}
    assert not any("shared" in case for case in withheld), withheld
    targets = {row["case"].rsplit(", ")[-1]: row["target"] for row in found["rows"] if row["benchmark"] == "throughput"}
    assert targets == {"shared": None, "user": ">= 0.7x" if os.geteuid() == 0 else None, "namespace": None}


def test_one_benchmark_as_a_table():
    done = run("--quick", "--only", "startup")
    assert done.returncode == 0, done.stderr
    assert "`import hermes_core`" in done.stdout and "`hermes-rl --help`" in done.stdout
    assert "latency" not in done.stdout


def test_an_unknown_benchmark_is_refused():
    done = run("--only", "latncy")
    assert done.returncode == 2 and "latency" in done.stderr


def test_targets():
    assert Target(2.0, of_reference=True).met(3.9, 2.0)
    assert not Target(2.0, of_reference=True).met(4.1, 2.0)
    assert Target(0.7, of_reference=True, at_least=True).met(71, 100)
    assert not Target(0.7, of_reference=True, at_least=True).met(69, 100)
    assert Target(10.0).met(10.0, None) and not Target(10.0).met(10.1, 1.0)
    assert Row("a", "b", None, None, "ms", Target(1.0)).met is None
    assert Row("a", "b", 3.0, 2.0, "ms").ratio == 1.5


def test_percentiles():
    assert p50([3.0, 1.0, 2.0]) == 2.0
    assert percentile(range(1, 101), 0.95) == 95


async def test_both_take_turns():
    order = []

    async def note(name):
        order.append(name)
        return name

    taken = await alternate(lambda: note("a"), lambda: note("b"), 2, warm_up=1)
    assert order == ["a", "b"] * 3 and taken == (["a", "a"], ["b", "b"])


async def test_a_blocked_loop_is_seen():
    async with watch_stalls() as stalls:
        await asyncio.sleep(0.02)
        time.sleep(0.1)
        await asyncio.sleep(0.02)
    assert stalls.longest_s > 0.05
