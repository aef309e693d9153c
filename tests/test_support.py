"""The plugins of `tests/support` fail a test that stalls the loop or leaves something behind, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.order import in_shares

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = f"""
{ROOT.joinpath("tests/conftest.py").read_text()}
from tests.support import leak_check, loop_lag, namespaces

leak_check.LEAK_GRACE_S = 0.3
loop_lag.LOOP_STALL_S = 0.5  # what stalls here does so for longer than a machine that has much to do holds up a loop
"""

STALLS = """
import asyncio, time, pytest

import pytest

async def test_stalls(loop_lag):
    await asyncio.sleep(0.02)
    time.sleep(2.5)
    await asyncio.sleep(0.02)

async def test_computes(loop_lag):
    await asyncio.sleep(0.02)
    until = time.thread_time() + 2.0
    while time.thread_time() < until:
        pass
    await asyncio.sleep(0.02)

@pytest.mark.loop_stall(3.0)
async def test_allowed(loop_lag):
    time.sleep(0.8)
    await asyncio.sleep(0.02)

async def test_smooth(loop_lag):
    for _ in range(5):
        await asyncio.sleep(0.01)
"""

LEAKS = """
import subprocess, threading, time

kept = []

def test_process(leak_check):
    kept.append(subprocess.Popen(["sleep", "30"]))

def test_orphan(leak_check):
    subprocess.run(["sh", "-c", "sleep 31 >/dev/null 2>&1 &"], check=True)

def test_descriptor(leak_check):
    kept.append(open("/dev/null"))

def test_thread(leak_check):
    threading.Thread(target=time.sleep, args=(30,), daemon=True, name="left").start()

def test_clean(leak_check):
    subprocess.run(["true"], check=True)
    open("/dev/null").close()
"""

REQUIRES = """
def test_docker(require):
    require("docker", "there is no daemon")

def test_there(require):
    require("docker", None)
"""


REFUSALS = """
import pytest

from hermes_core.errors import PolicyError

REFUSAL = "backend 'local' can't grant isolation 'user' here"

@pytest.fixture(scope="module")
def sandbox():
    raise PolicyError(REFUSAL)

def test_raised():
    raise PolicyError(REFUSAL)

def test_in_a_fixture(sandbox):
    pass

def test_in_a_fixture_again(sandbox):
    pass

def test_ends_in_a_record():
    with pytest.raises(PolicyError):
        raise PolicyError(REFUSAL)
    pytest.fail("no reward")

def test_printed_by_a_program():
    print(REFUSAL)
    pytest.fail("exit status 2")

def test_other_refusal():
    raise PolicyError("others can write to the directory")

def test_fault():
    pytest.fail("it does not work")

def test_passes_all_the_same():
    with pytest.raises(PolicyError):
        raise PolicyError(REFUSAL)
"""

MACHINE = """
from hermes_core.sandbox.local.host import Probe

namespaces.probe_host = lambda: Probe(True, {able}, {able}, {able}, "it is not permitted")
namespaces.no_namespaces.cache_clear()
"""


def run(folder: Path, tests: str, *, conftest: str = "", **environment: str) -> dict[str, str]:
    """The outcome of each test of a file run by a pytest of its own with our conftest, to which `conftest` is added."""
    done = pytest_run(folder, tests, conftest, (), environment)
    lines = [line.split("::")[1].split()[:2] for line in done.splitlines() if line.startswith("test_it.py::")]
    assert lines, done
    return {name: outcome for name, outcome in lines if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED")} | {
        name: "ERROR" for name, outcome in lines if outcome == "ERROR"
    }


def pytest_run(
    folder: Path, tests: str, conftest: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> str:
    (folder / "conftest.py").write_text(CONFTEST + conftest)
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "no:cacheprovider", *arguments, "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    return done.stdout + done.stderr


def test_a_stalled_loop_fails_the_test(tmp_path: Path) -> None:
    outcomes = run(tmp_path, STALLS)
    assert outcomes.pop("test_stalls") == outcomes.pop("test_computes") == "ERROR"
    assert outcomes == {"test_allowed": "PASSED", "test_smooth": "PASSED"}


def test_leaks_fail_the_test(tmp_path: Path) -> None:
    outcomes = run(tmp_path, LEAKS)
    assert outcomes.pop("test_clean") == "PASSED"
    assert outcomes == dict.fromkeys(("test_process", "test_orphan", "test_descriptor", "test_thread"), "ERROR")


def test_a_requirement_skips_or_fails(tmp_path: Path) -> None:
    assert run(tmp_path, REQUIRES, HERMES_REQUIRE="") == {"test_docker": "SKIPPED", "test_there": "PASSED"}
    assert run(tmp_path, REQUIRES, HERMES_REQUIRE="ssh,docker") == {"test_docker": "FAILED", "test_there": "PASSED"}


@pytest.mark.parametrize(
    ("able", "required", "outcome"),
    [(False, "", "SKIPPED"), (False, "docker,local", "FAILED"), (True, "", "FAILED")],
)
def test_what_a_machine_without_namespaces_refuses_is_skipped_there(
    able: bool, required: str, outcome: str, tmp_path: Path
) -> None:
    outcomes = run(tmp_path, REFUSALS, conftest=MACHINE.format(able=able), HERMES_REQUIRE=required)
    in_set_up = outcome if outcome == "SKIPPED" else "ERROR"
    assert outcomes.pop("test_passes_all_the_same") == "PASSED"
    assert {outcomes.pop(name) for name in ("test_fault", "test_other_refusal")} == {"FAILED"}
    assert {outcomes.pop(name) for name in ("test_in_a_fixture", "test_in_a_fixture_again")} == {in_set_up}
    assert outcomes == dict.fromkeys(("test_raised", "test_ends_in_a_record", "test_printed_by_a_program"), outcome)


def test_all_skips_for_want_of_namespaces_are_one_line(tmp_path: Path) -> None:
    said = pytest_run(tmp_path, REFUSALS, MACHINE.format(able=False), ("-n", "2"), {"HERMES_REQUIRE": ""})
    (line,) = [line for line in said.splitlines() if line.startswith("SKIPPED [")]
    reason = r"local: no namespaces here: it is not permitted \(-> .*\)"
    assert re.match(rf"SKIPPED \[5\] .*/namespaces.py: {reason}$", line), said
    assert "2 failed, 1 passed, 5 skipped" in said


class Item(str):
    """A test by its letter; capital letters are long ones."""

    def get_closest_marker(self, name: str) -> bool:
        return name == "long" and self.isupper()


@pytest.mark.parametrize(
    ("collected", "workers", "ordered"),
    [
        ("abcDefghIJklm", 3, "DabcIefgJhklm"),
        ("abcdeFGH", 2, "FHabGcde"),
        ("abcD", 1, "Dabc"),
        ("aBCDEF", 4, "BFCDEa"),
        ("", 4, ""),
    ],
)
def test_each_worker_begins_with_long_tests(collected: str, workers: int, ordered: str) -> None:
    assert "".join(in_shares([Item(letter) for letter in collected], workers)) == ordered
