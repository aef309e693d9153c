"""hermes-agent's own programs, as their users start, interrupt and leave them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hermes_testing.scripted_server import Reply, ScriptedServer, ToolScript, call

from .conftest import CONFIG, HERE, PLACES, Home

pytestmark = [pytest.mark.full, pytest.mark.long]

PATIENCE_S = 120.0


def solver(prompt: str):
    """The model: looks around, after a command that takes minutes if it is asked to wait."""
    if "Wait" in prompt:
        yield call("terminal", command="echo yes > begun; sleep 345", timeout=300)
        yield Reply("Operation interrupted.")  # hermes-agent itself says this after an interrupt
    yield call("terminal", command="pwd; cat begun; pgrep -fc '^sleep 345'")
    return Reply("All done.")


@asynccontextmanager
async def running(home: Home, terminal: str, *arguments: str, **more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program of hermes-agent's environment, whose model is `solver`; `{url}` in an argument is the model's URL."""
    async with ScriptedServer(ToolScript(solver)) as server:
        model = {"default": "scripted", "provider": "custom", "base_url": server.base_url, "api_key": "none"}
        image = PLACES.get(terminal, {}).get("TERMINAL_DOCKER_IMAGE", "")
        home.configure(**CONFIG, model=model, terminal={"backend": terminal, "docker_image": image})
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        argv = [argument.format(url=server.base_url) for argument in arguments]
        environ = home.environ(terminal, **more)
        program = await asyncio.create_subprocess_exec(*argv, cwd=home.work, env=environ, stdin=-3, **pipes)
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield program
        finally:
            if program.returncode is None:
                program.kill()
                await program.communicate()


def hermes(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("hermes")), *arguments]


def log(home: Home) -> str:
    """What the plugin and hermes-rl have to say in hermes-agent's log of warnings."""
    return "".join(line for line in (home.folder / "logs/errors.log").read_text().splitlines(True) if "hermes_" in line)


@pytest.mark.parametrize("how", [["chat", "-q"], ["-z"]], ids=["chat", "oneshot"])
@pytest.mark.parametrize("terminal", PLACES, indirect=True)
async def test_a_program_leaves_nothing_when_it_ends(
    terminal: str, how: list[str], home: Home, leak_check: None
) -> None:
    async with running(home, terminal, *hermes(*how, "Look")) as program:
        said, _ = await program.communicate()
    assert (program.returncode, "All done." in said.decode()) == (0, True), said.decode()[-3000:]
    assert log(home) == ""


@pytest.mark.parametrize("how", [["chat", "-q"], ["-z"]], ids=["chat", "oneshot"])
async def test_a_program_leaves_nothing_on_other_machines(
    elsewhere: tuple[str, dict[str, str]], how: list[str], home: Home, leak_check: None
) -> None:
    terminal, variables = elsewhere
    async with running(home, terminal, *hermes(*how, "Look"), **variables) as program:
        said, _ = await program.communicate()
    assert (program.returncode, "All done." in said.decode()) == (0, True), said.decode()[-3000:]
    assert log(home) == "", "a sandbox was left to its watchdog, say"


async def test_ctrl_c_ends_the_command_and_the_program(home: Home, isolates: None, leak_check: None) -> None:
    async with running(home, "slots-local", *hermes("chat", "-q", "Wait")) as program:
        while not sleeps():
            await asyncio.sleep(0.1)
        program.send_signal(signal.SIGINT)
        said, _ = await program.communicate()
    assert program.returncode != 0, said.decode()[-3000:]
    assert not sleeps()


async def test_an_interrupted_agent_goes_on_in_its_slot(home: Home, isolates: None, leak_check: None) -> None:
    program = [sys.executable, str(HERE / "interrupted.py"), "{url}"]
    async with running(home, "slots-local", *program) as agent:
        said, _ = await agent.communicate()
    assert agent.returncode == 0, said.decode()[-3000:]
    found = json.loads(said.splitlines()[-1])
    assert found["interrupted"] and found["seconds"] < 30, found
    assert "[Command interrupted]" in found["told"][-1]
    last = json.loads(found["again"][-1])["output"].splitlines()
    assert last[0].startswith("/data/slot_") and last[1:] == ["yes", "0"], "its files are there, the command is dead"


def sleeps() -> bool:
    """Whether the model's command runs, below this process."""
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and Path("/proc", entry, "cmdline").read_bytes() == b"sleep\x00345\x00":
                return True
        except OSError:
            continue
    return False
