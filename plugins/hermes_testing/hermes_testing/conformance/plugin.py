"""For pytest: every check of the conformance kit as a test of its own, in a test file of five lines.

    import pytest

    pytest_plugins = ["hermes_testing.conformance.plugin"]

    @pytest.mark.conformance("docker", config={"image": "python:3.12"})
    def test_conformance(conformance_check):
        conformance_check()

A check that is not applicable is a skipped test with the reason. The mark takes a backend's name and, by keyword,
`config` (the profile's keys), `isolation`, `groups` and `names` (which checks), and `plugins` (plugin objects, which
take the place of those that are installed).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_core import Runtime
from hermes_testing.conformance.checks import Check, chosen
from hermes_testing.conformance.kit import Rig
from hermes_testing.conformance.runner import CheckOutcome, run_one

MARK = "conformance"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers",
        "conformance(backend, config={}, isolation=None, groups=(), names=(), plugins=()): runs the kit on it",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each check."""
    if "conformance_check" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker(MARK)
    if mark is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} takes conformance_check and has no mark `conformance`")
    checks = chosen(mark.kwargs.get("groups", ()), mark.kwargs.get("names", ()))
    metafunc.parametrize("conformance_check", checks, indirect=True, ids=[f"{c.group}-{c.name}" for c in checks])


class _Rigs:
    """The rigs of a module's tests, by their marks, and the event loop that they use."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._rigs: dict[str, tuple[Runtime, Rig]] = {}

    def run(self, mark: pytest.Mark, check: Check) -> None:
        result = self._runner.run(run_one(self._rig(mark), check))
        if result.outcome is CheckOutcome.NOT_APPLICABLE:
            pytest.skip(result.reason)
        if result.outcome is CheckOutcome.FAILED:
            pytest.fail(f"{check.promise}\n{result.reason}", pytrace=False)

    def close(self) -> None:
        try:
            for runtime, rig in self._rigs.values():
                self._runner.run(rig.aclose())
                self._runner.run(runtime.aclose())
        finally:
            self._runner.close()

    def _rig(self, mark: pytest.Mark) -> Rig:
        key = repr((mark.args, mark.kwargs))
        if key not in self._rigs:
            plugins = mark.kwargs.get("plugins", ())
            runtime = Runtime(plugins=plugins, load_entry_points=not plugins)
            rig = Rig(runtime, mark.args[0], mark.kwargs.get("config"), isolation=mark.kwargs.get("isolation"))
            self._runner.run(rig.__aenter__())
            self._rigs[key] = (runtime, rig)
        return self._rigs[key][1]


@pytest.fixture(scope="module")
def _conformance_rigs() -> Iterator[_Rigs]:
    rigs = _Rigs()
    yield rigs
    rigs.close()


@pytest.fixture
def conformance_check(request: pytest.FixtureRequest, _conformance_rigs: _Rigs) -> Callable[[], None]:
    """Return a function that runs this test's check. It returns if the check passed, skips if it does not apply, else
    fails."""
    check: Check = request.param
    mark: Any = request.node.get_closest_marker(MARK)
    return lambda: _conformance_rigs.run(mark, check)
