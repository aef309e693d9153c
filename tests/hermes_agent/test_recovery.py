"""A session's slot and processes outlive hermes-agent, with `TERMINAL_STATE_DIR`."""

from __future__ import annotations

import signal

import pytest

from .conftest import PLACES, Home

pytestmark = [pytest.mark.full, pytest.mark.long]


def check_recovery(home: Home, terminal: str, **variables: str) -> None:
    state, checkpoint = str(home.folder / "slots"), home.folder / "slots" / "processes.json"
    killed = home.run("recovery.py", terminal=terminal, TERMINAL_STATE_DIR=state, **variables)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert checkpoint.exists()
    found = home.results("recovery.py", "again", terminal=terminal, TERMINAL_STATE_DIR=state, **variables)
    assert (found["waited"]["exit_code"], found["waited"]["output"]) == (5, "finished\n")
    assert found["ticks"].count("tick") >= 3
    assert found["killed"]["status"] == "killed"
    assert found["left"]["output"].splitlines()[0].startswith("kept")
    assert not checkpoint.exists(), "no sandbox is left"


@pytest.mark.parametrize("terminal", PLACES, indirect=True)
def test_a_killed_hermes_agent_finds_its_processes_again(terminal: str, home: Home, leak_check: None) -> None:
    check_recovery(home, terminal)


def test_a_killed_hermes_agent_finds_its_processes_on_other_machines(
    elsewhere: tuple[str, dict[str, str]], home: Home, leak_check: None
) -> None:
    terminal, variables = elsewhere
    check_recovery(home, terminal, **variables)
