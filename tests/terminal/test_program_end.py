"""Programs that close nothing: their standard error stays empty, and what they left is gone soon."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.support.accounts import skip_if_slots_need_root

pytestmark = pytest.mark.entry_points

PYTHONS = [sys.executable, *filter(None, os.environ.get("HERMES_TEST_PYTHONS", "").split(os.pathsep))]
"""This one, and others that have the packages."""

ORPHAN_TTL_S = 3

TERMINAL = """
from hermes_core.terminal import terminal_tool
print(terminal_tool("sleep 300 & echo hello"))
"""
ASYNCHRONOUS = """
import asyncio
from hermes_core.terminal import terminal_tool_async
print(asyncio.run(terminal_tool_async("echo hello")))
"""
FAILING = TERMINAL + "raise SystemExit(0)"
RUNTIME = """
import asyncio, json, os
from hermes_core.runtime import Runtime

async def main():
    config = json.loads(os.environ["CONFIG"])
    tools = Runtime().tool_backend(os.environ["TERMINAL_ENV"], isolation="user", config=config)
    await tools.start()
    slot = await tools.acquire()
    print((await tools.execute(slot, "bash", {"command": "echo hello"})).output)

asyncio.run(main())
"""
OPEN_LOOP = RUNTIME.replace("asyncio.run(main())", "asyncio.new_event_loop().run_until_complete(main())")
MODAL = """
import asyncio
from hermes_modal import ModalToolBackend

async def main():
    backend = ModalToolBackend()
    slot = await backend.acquire()
    print((await backend.execute(slot, "bash", {"command": "echo hello"})).output)

asyncio.run(main())
"""


FIRST = (TERMINAL, FAILING, RUNTIME)
"""The programs that stand for the others."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The backend that the test asks for: the settings of its sandboxes; the environment names them, too."""
    backend: str = request.param
    config: dict[str, Any] = {"orphan_ttl_s": ORPHAN_TTL_S}
    monkeypatch.setenv("TERMINAL_ENV", backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # One of its own: a program of the same owner would wait for what an earlier one, which was killed, has left.
    monkeypatch.setenv("HERMES_OWNER", f"program-end-{uuid.uuid4().hex[:8]}")
    monkeypatch.setenv("HERMES_PLUGINS", "" if backend == "local" else backend)
    if backend == "local":
        request.getfixturevalue("isolates")
    if backend == "docker":
        config["image"] = request.getfixturevalue("docker_images")[0]
        monkeypatch.setenv("TERMINAL_DOCKER_IMAGE", config["image"])
    elif backend == "ssh":
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "config").write_text(Path(request.getfixturevalue("ssh_config")).read_text())
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("TERMINAL_SSH_HOST", "hermes-test")
        config["host"] = "hermes-test"
    elif backend == "modal":
        from hermes_modal_emulator import ModalEmulator

        emulator = ModalEmulator()
        request.addfinalizer(emulator.close)
        skip_if_slots_need_root(emulator.mode)
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TERMINAL_MODAL_IMAGE", "python:3.11")
    monkeypatch.setenv("CONFIG", json.dumps(config))
    return config


async def left(backend: str, config: dict[str, Any]) -> list[str]:
    """The sandboxes of the programs that are there."""
    async with Runtime(Settings.load()) as runtime:
        runtime.tool_backend(backend, config=config)
        found = await runtime.backend(backend).list(os.environ["HERMES_OWNER"])
    return [info.sandbox_id for info in found]


LOCAL, *ELSEWHERE = BACKENDS = ["local", "docker", "ssh", "modal"]
FULL = pytest.mark.full


def marks_of(backend: str, program: str) -> Any:
    """The others differ in what is the driver's, so one backend is enough for them."""
    if backend == LOCAL:
        return () if program in FIRST else FULL
    return FULL if program in (TERMINAL, RUNTIME) else pytest.mark.stress


@pytest.mark.few(1, 4)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize(
    ("place", "program"),
    [
        *(
            pytest.param(backend, program, marks=marks_of(backend, program))
            for backend in BACKENDS
            for program in (TERMINAL, ASYNCHRONOUS, FAILING, RUNTIME, OPEN_LOOP)
        ),
        pytest.param("modal", MODAL, marks=pytest.mark.full),
    ],
    indirect=["place"],
    ids=[
        *(f"{b}-{p}" for b in BACKENDS for p in ("terminal", "async", "exit", "runtime", "open-loop")),
        "modal-backend",
    ],
)
async def test_a_program_that_closes_nothing_ends_quietly(place: dict[str, Any], program: str, python: str) -> None:
    begun = time.monotonic()
    done = run(python, program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hello" in done.stdout
    assert time.monotonic() - begun < 20
    assert await left(os.environ["TERMINAL_ENV"], place) == []


def run(python: str, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, check=False)


EXITS = {
    "sys.exit": ("sys.exit(3)", 3, ""),
    "exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "os._exit": ("os._exit(0)", 0, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT, "KeyboardInterrupt"),
}
EXIT = """
import os, signal, sys, threading, time
from hermes_core.terminal import terminal_tool
print(terminal_tool("echo hello"), flush=True)
{ending}
"""


# Elsewhere the one program dies with its sandboxes' transport still open, and the other lets go of it.
ENDINGS = [
    *(pytest.param(LOCAL, EXIT, ending, id=f"{LOCAL}-terminal-{ending}") for ending in EXITS),
    *(
        pytest.param(LOCAL, RUNTIME, ending, id=f"{LOCAL}-runtime-{ending}", marks=FULL)
        for ending in ("exception", "os._exit", "SIGINT")
    ),
    *(
        pytest.param(backend, program, ending, id=f"{backend}-{name}-{ending}", marks=FULL)
        for backend in ELSEWHERE
        for name, program, ending in (("terminal", EXIT, "SIGINT"), ("runtime", RUNTIME, "os._exit"))
    ),
]


@pytest.mark.few(1, 5)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize(("place", "program", "ending"), ENDINGS, indirect=["place"])
async def test_however_it_ends(place: dict[str, Any], program: str, ending: str, python: str) -> None:
    """Its own traceback, where it has one, is all that is said, and its exit status is as ever."""
    statement, status, last_words = EXITS[ending]
    if program is RUNTIME:
        begin = "import signal, sys, time\n"
        program = begin + program.replace("\n\nasyncio.run", f"\n    sys.stdout.flush(); {statement}\n\nasyncio.run")
    else:
        program = program.format(ending=statement)
    done = run(python, program)
    assert done.returncode == status, done.stderr
    assert "hello" in done.stdout
    said = done.stderr.splitlines()
    if last_words:
        assert (said[0], said[-1]) == ("Traceback (most recent call last):", last_words)
        noise = [line for line in said[1:-1] if not line.startswith(" ")]
        assert [line for line in noise if not (ending == "SIGINT" and DURING.search(line))] == []
    else:
        assert said == []
    if program.startswith("\nimport os") and ending in ("os._exit", "SIGTERM"):
        return  # its sandbox waits for longer than a test: the other program has a short time set
    deadline = time.monotonic() + 10 * ORPHAN_TTL_S
    while (there := await left(os.environ["TERMINAL_ENV"], place)) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    assert there == []


DURING = re.compile(
    "^$|^During handling of the above exception|^The above exception was|^Traceback|^asyncio.exceptions.CancelledError"
)
"""What `asyncio.run` says of a Ctrl-C."""

LATE = {
    "atexit": "import atexit; atexit.register(lambda: print(terminal_tool('echo late')))",
    "thread": "threading.Thread(target=lambda: print(terminal_tool('sleep 30'))).start(); time.sleep(0.5)",
    "coroutine in a thread": (
        "import asyncio; from hermes_core.terminal import terminal_tool_async as late; "
        "threading.Thread(target=lambda: print(asyncio.run(late('sleep 30')))).start(); time.sleep(0.5)"
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("place", [LOCAL, pytest.param("ssh", marks=pytest.mark.full)], indirect=True)
async def test_a_call_that_comes_too_late_is_answered(place: dict[str, Any], late: str, python: str) -> None:
    begun = time.monotonic()
    done = run(python, EXIT.format(ending=LATE[late]))
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["output"] == "hello\n"
    assert (second["exit_code"], second["status"]) == (-1, "error")
    assert time.monotonic() - begun < 20
    assert await left(os.environ["TERMINAL_ENV"], place) == []


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize("place", [LOCAL, pytest.param("ssh", marks=pytest.mark.full)], indirect=True)
async def test_a_forked_child_has_sandboxes_of_its_own(place: dict[str, Any], python: str) -> None:
    fork = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=lambda: print(terminal_tool("echo second"), flush=True))
child.start(); child.join(); print(terminal_tool("echo third"))
sys.exit(child.exitcode)
"""
    done = run(python, EXIT.format(ending=fork))
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["output"] for line in done.stdout.splitlines()] == ["hello\n", "second\n", "third\n"]
    assert await left(os.environ["TERMINAL_ENV"], place) == []


@pytest.mark.parametrize("place", ["ssh"], indirect=True)
@pytest.mark.full
async def test_the_next_program_finds_what_a_killed_one_left_on_a_host(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_STATE_DIR", str(tmp_path / "kept"))
    killed = run(sys.executable, EXIT.format(ending="terminal_tool('echo kept >file'); os.kill(os.getpid(), 9)"))
    assert killed.returncode == -signal.SIGKILL
    found = run(sys.executable, EXIT.format(ending="print(terminal_tool('cat file'))"))
    assert json.loads(found.stdout.splitlines()[-1])["output"] == "kept\n", found.stderr
    assert await left("ssh", place) == []
