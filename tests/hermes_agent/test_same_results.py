"""hermes-agent's own tools answer in our slots what they answer in its own local environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import PLACES, Home

pytestmark = [pytest.mark.full, pytest.mark.long]

SESSIONS = 10

DIFFERENCES = {
    "seq": "the count of characters left out has hermes-agent's mark with the directory in it, whose length differs",
    "background": "its local environment starts background processes in an interactive login shell: `logout`",
    "killed": "its local environment gives the status of a killed shell as -9, and its others as 137",
}
"""Why a result is not the same, in slots as in its own docker environment."""


def alike(answer: Any) -> Any:
    """An answer without `DIFFERENCES`."""
    text = json.dumps(answer)
    if "OUTPUT TRUNCATED" in text:
        kept = [*range(1, 4000), *range(25_100, 30_001)]
        return {str(number) for number in kept} <= {*answer["output"].split("\n")}
    text = text.replace("done\\nlogout", "done").replace('"total_lines": 3', '"total_lines": 2')
    text = text.replace('"showing": "3 lines"', '"showing": "2 lines"')
    return json.loads(text.replace('"exit_code": -9', '"exit_code": 137'))


def check_alike(found: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> None:
    """Fail if a session's answers are not the expected ones, apart from `DIFFERENCES`."""
    for number, session in enumerate(found):
        wanted = json.loads(json.dumps(expected).replace("session-0", f"session-{number}"))
        for theirs, ours in zip(wanted, session, strict=True):
            assert alike(ours["answer"]) == alike(theirs["answer"]), (number, ours["args"])


@pytest.fixture(scope="module")
def expected(hermes_extra: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one session gets in the local environment. (There, sessions of one process share a shell.)"""
    [results] = Home(tmp_path_factory.mktemp("local")).results("calls.py", "1", terminal="local")
    return results


@pytest.mark.parametrize("terminal", PLACES, indirect=True)
def test_ten_sessions_at_once_get_the_results_of_the_local_environment(
    terminal: str, home: Home, expected: list[dict[str, Any]], leak_check: None
) -> None:
    found = home.results("calls.py", str(SESSIONS), terminal=terminal)
    assert len(found) == SESSIONS
    check_alike(found, expected)
    same = sum(
        json.dumps(theirs).replace("session-0", f"session-{number}") == json.dumps(ours)
        for number, session in enumerate(found)
        for theirs, ours in zip(expected, session, strict=True)
    )
    assert same >= 160, "only those that `DIFFERENCES` explains are not equal as they are"
    assert not [*home.work.glob("*")], "nothing was written on this host"


def test_a_session_gets_them_on_other_machines(
    elsewhere: tuple[str, dict[str, str]], home: Home, expected: list[dict[str, Any]], leak_check: None
) -> None:
    terminal, variables = elsewhere
    check_alike(home.results("calls.py", "1", terminal=terminal, **variables), expected)
    assert not [*home.work.glob("*")], "nothing was written on this host"
