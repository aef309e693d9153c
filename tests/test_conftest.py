"""The fixtures can fail: a stalled loop and each kind of leak are seen, and what is clean is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

CONFTEST = Path(__file__).with_name("conftest.py")

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


def run(folder: Path, tests: str, **environment: str) -> dict[str, str]:
    """The outcome of each test of a file run by a pytest of its own with our conftest."""
    # What stalls does so for longer here than a machine that has much to do holds up a loop.
    text = CONFTEST.read_text()
    for name, value in (("LEAK_GRACE_S", 0.3), ("LOOP_STALL_S", 0.5)):
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    (folder / "conftest.py").write_text(text)
    (folder / "test_it.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_it.py"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line.split("::")[1].split()[:2] for line in done.stdout.splitlines() if line.startswith("test_it.py::")]
    assert lines, done.stdout + done.stderr
    return {name: outcome for name, outcome in lines if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED")} | {
        name: "ERROR" for name, outcome in lines if outcome == "ERROR"
    }


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
def test_each_worker_begins_with_long_tests(
    pytestconfig: pytest.Config, collected: str, workers: int, ordered: str
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(CONFTEST))
    assert "".join(conftest.in_shares([Item(letter) for letter in collected], workers)) == ordered
