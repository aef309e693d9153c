"""Events reach every listener to their name, and a listener that fails changes nothing but the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import hermes_core
from hermes_core.events import Events
from hermes_core.plugins import hookspecs


def fail(**event: object) -> None:
    raise RuntimeError("trouble")


def test_listeners_are_told_in_order_of_what_they_listen_to() -> None:
    events, heard = Events(), []
    events.listen("begun", lambda name: heard.append(("first", name)))
    events.listen("begun", lambda name: heard.append(("second", name)))
    events.listen("ended", lambda **event: heard.append(("ended", event)))
    events.emit("begun", name="a")
    assert heard == [("first", "a"), ("second", "a")]
    events.emit("ended")
    assert heard[2:] == [("ended", {})]
    events.emit("nobody listens", to="this")


def test_a_listener_that_fails_is_reported_once_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    events, heard = Events(), []
    events.listen("begun", fail, owner="plugin 'mine'")
    events.listen("begun", lambda name: heard.append(name))
    with caplog.at_level(logging.DEBUG, "hermes_core.events"):
        for name in "abc":
            events.emit("begun", name=name)
    assert heard == ["a", "b", "c"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "DEBUG", "DEBUG"]
    assert caplog.records[0].getMessage() == "plugin 'mine' failed on the event begun"
    assert "RuntimeError: trouble" in caplog.text


def test_an_interrupt_is_passed_on() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    events = Events()
    events.listen("begun", interrupt)
    with pytest.raises(KeyboardInterrupt):
        events.emit("begun")


def test_what_the_core_emits_are_the_observer_hooks() -> None:
    sources = (path.read_text() for path in Path(hermes_core.__file__).parent.rglob("*.py"))
    emitted = {name for source in sources for name in re.findall(r'emit\(\s*"(\w+)"', source)}
    assert {f"hermes_{name}" for name in emitted} == {
        name for name in vars(hookspecs) if name.startswith("hermes_") and not name.startswith("hermes_register_")
    }
