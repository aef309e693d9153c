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

from benchmarks import peers_docker, peers_ssh
from benchmarks.__main__ import BENCHMARKS, NOT_QUICK
from benchmarks.measure import Row, Target, alternate, p50, percentile, take_turns, watch_stalls
from benchmarks.peers import OUTPUT_BYTES, Place, Table, Wanted, Workers, cli_party, listing
from benchmarks.peers_ssh import hosts_of

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.stress  # CI runs the quick benchmarks by themselves, with nothing beside them
def test_the_quick_mode_has_every_figure():
    done = run("--quick", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == {}
    names = [row["benchmark"] for row in found["rows"]]
    assert list(dict.fromkeys(names)) == [name for name in BENCHMARKS if name not in NOT_QUICK]
    counts = {name: names.count(name) for name in names}
    assert counts == {
        "latency": 3,
        "batch": 1,
        "throughput": 3,
        "reset": 3,
        "output": 12,
        "processes": 2,
        "startup": 2,
        "docker": 34,
        "ssh": 16,
        "modal": 4,
        "parsers": 36,
        "view": 10,
        "agent_programs": 4,
        "large_requests": 2,
    }
    measured = [row for row in found["rows"] if row["ours"] is not None]
    assert all(row["ours"] > 0 for row in measured if row["unit"] not in ("MB", "alive"))
    assert all(row["met"] in (True, False) for row in measured if row["target"])
    withheld = {row["case"] for row in found["rows"] if row["ours"] is None}
    assert not any("shared" in case for case in withheld), withheld
    targets = {row["case"].rsplit(", ")[-1]: row["target"] for row in found["rows"] if row["benchmark"] == "throughput"}
    assert targets == {"shared": None, "user": ">= 0.7x" if os.geteuid() == 0 else None, "namespace": None}


@pytest.mark.full
def test_one_benchmark_as_a_table():
    done = run("--quick", "--only", "startup")
    assert done.returncode == 0, done.stderr
    assert "`import hermes_core`" in done.stdout and "`hermes-rl --help`" in done.stdout
    assert "latency" not in done.stdout


def test_an_unknown_benchmark_is_refused():
    done = run("--only", "latncy")
    assert done.returncode == 2 and "latency" in done.stderr


def test_a_target_is_met_by_a_ratio_or_a_value():
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
        time.sleep(0.5)  # on a busy machine, the witness is late too
        await asyncio.sleep(0.02)
    assert stalls.longest_s > 0.03


async def test_any_number_takes_turns():
    order = []

    async def note(name):
        order.append(name)
        return name

    taken = await take_turns([lambda name=name: note(name) for name in "abc"], 2, warm_up=0)
    assert order == ["a", "b", "c"] * 2 and taken == [["a", "a"], ["b", "b"], ["c", "c"]]


# --- beside other systems ---------------------------------------------------------------------------------------------


def a_party(seconds, after=None):
    async def run(command):
        await asyncio.sleep(seconds)
        return OUTPUT_BYTES

    async def time_out(command, limit_s):
        if after is not None:
            after[100 + len(after)] = command.partition(" & ")[2]

    return Workers([run] * 32, time_out)


async def test_as_many_run_as_are_asked_for():
    running, most = 0, 0

    async def run(command):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 0

    sample = await Workers([run] * 32, None).sample(8, 0.05)
    assert most == 8 and len(sample.seconds) >= 8 and sample.rate > 0
    assert all(second >= 0.01 for second in sample.seconds)


async def test_the_rows_of_a_peer_that_is_there_and_of_one_that_is_not():
    table = Table("docker", {"slow": Wanted(latency=2, rate=2), "away": Wanted(latency=2)})
    peers = {"slow": a_party(0.05), "away": "could not be installed"}
    rows = [row async for row in table.speed(a_party(0.005), peers, 1, 0.05)]
    rows += [row async for row in table.output(a_party(0.005), peers, 1, 5.0)]
    targets = {row.case: row.met for row in rows if row.target}
    assert targets == {
        "`true` p50, 1 at a time: slow": True,
        "`true` p50, 1 at a time: away": None,
        "commands a second, 32 at a time: slow": True,
    }
    away = [row for row in rows if "away" in row.case]
    assert len(away) == 7 and all(row.ours is None and row.notes == ("could not be installed",) for row in away)


async def test_a_peer_that_needs_too_long_for_its_output_is_given_up():
    table = Table("docker", {"slow": Wanted()})
    (row,) = [row async for row in table.output(a_party(0.0), {"slow": a_party(60)}, 1, 0.05)]
    assert row.ours is not None and row.reference is None and "0.05 s" in row.notes[0]


async def test_what_a_timed_out_command_leaves_is_counted_and_ended():
    left, killed = {}, []

    async def processes():
        return {1: "init", **left}

    async def kill(pids):
        killed.extend(pids)

    async def nothing():
        return {1: "init"}

    table = Table("docker", {"peer": Wanted()})
    left[7] = "another's"
    places = {"ours": Place(nothing, kill), "peer": Place(processes, kill)}
    (row,) = [row async for row in table.left(a_party(0), {"peer": a_party(0, left)}, places)]
    assert (row.ours, row.reference, row.met) == (0, 1, True)
    assert killed == [101]


async def test_a_client_is_ended_at_its_limit_even_if_others_hold_its_output():
    party = cli_party([["bash", "-c"]])
    assert await party.time_out("sleep 3 & exec sleep 30", 0.2) < 2


def test_the_output_of_ps_is_read():
    assert listing(b"    1 /sbin/init\n  234 sleep  5\n\n") == {1: "/sbin/init", 234: "sleep  5"}


def test_the_hosts_to_measure():
    text = "Host hermes-test\n  User a\nHost other hermes-test-login hermes-test*\n"
    assert hosts_of(text) == ["hermes-test", "hermes-test-login"]


async def test_every_line_is_there_where_no_server_is(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    docker = [row async for row in peers_docker.rows(True)]
    ssh = [row async for row in peers_ssh.rows(True)]
    assert (len(docker), len(ssh)) == (34, 16)
    assert all(row.ours is None and row.notes and row.unit for row in docker + ssh)
    assert {row.target.text(row.unit) for row in docker if row.target} >= {
        "<= 0.04x",
        "<= 0.05x",
        ">= 40x",
        "<= 0.0333x",
    }
