"""Namespaces, without which local sandboxes isolate nothing.

A test whose whole point is a level of isolation asks for the fixture `isolates`. On a machine that allows no
namespaces, any other test that fails because a level was refused is skipped, with one reason for all of them. On a
machine that allows them, and where HERMES_REQUIRE names `local`, it fails.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_core.errors import PolicyError
from hermes_core.sandbox.local.host import remedies
from hermes_core.sandbox.local.launch import probe_host
from tests.support.requirements import required

REFUSED = re.compile(
    r"can't grant isolation|can't have isolation|can't isolate tasks here"
    r"|network 'none' needs namespaces|can't give profile '.*' network 'none'|tmpfs_size needs namespaces"
)
"""What errors of ours say about a level that can't be had."""

_refusals: list[str] = []
"""Those that the running test has met."""


@functools.cache
def no_namespaces() -> str | None:
    """Return why local sandboxes can have no namespaces here, and what to do, as `doctor` says it; None if they can."""
    found = probe_host()
    return None if found.isolates else f"no namespaces here: {found.reason} (-> {'; '.join(remedies(found))})"


def _note_refusals() -> None:
    """Keep what errors say about levels: many end in a record or in a program's exit status, and not in a traceback."""
    init = PolicyError.__init__

    def noted(self: PolicyError, message: str, **more: Any) -> None:
        init(self, message, **more)
        if REFUSED.search(message):
            _refusals.append(message)

    PolicyError.__init__ = noted  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip what fails because this machine allows no namespaces, with one reason. On a machine that does, it fails."""
    report = yield
    if report.failed and (reason := no_namespaces()) and "local" not in required():
        said = [report.longreprtext, *(text for _, text in report.sections)]
        if _refusals or any(map(REFUSED.search, said)):
            report.outcome = "skipped"
            report.longrepr = (__file__, None, f"Skipped: local: {reason}")
    if call.when == "teardown":
        _refusals.clear()
    return report


def pytest_configure(config: pytest.Config) -> None:
    if no_namespaces():
        _note_refusals()


@pytest.fixture(scope="session")
def isolates(require: Callable[[str, str | None], None]) -> None:
    """Namespaces can be made here: local sandboxes have a root of their own."""
    require("local", no_namespaces())
