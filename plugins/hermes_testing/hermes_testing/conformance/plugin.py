"""A plugin of pytest: every check of the conformance kit is a separate test, in a test file of five lines.

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
from typing import TYPE_CHECKING, Any

import pytest

from hermes_testing.conformance import GROUPS

if TYPE_CHECKING:
    from hermes_core import Runtime
    from hermes_testing.conformance.kit import Rig

_MODULES = ("running", *(module for modules in GROUPS.values() for module in modules))
pytest.register_assert_rewrite(*(f"hermes_testing.conformance.{module}" for module in _MODULES))

_MARKS = (
    "conformance(backend, config={}, isolation=None, groups=(), names=(), plugins=()): runs the kit on this backend",
    "limit(seconds): the time limit of a check, if it has another one than most",
    "least(level): the weakest isolation level of a run that makes the check's promise",
    "levels(documented={}): the check runs once for each isolation level, independent of the run's; "
    "`documented` are the levels that don't make the promise by design, each with the reason",
    "needs(words): what the check needs, in words of `DirectClient.missing`",
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each check."""
    if "conformance_check" not in metafunc.fixturenames:
        return
    from hermes_testing.conformance.checks import choose_checks

    mark = metafunc.definition.get_closest_marker("conformance")
    if mark is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} takes conformance_check and has no mark `conformance`")
    checks = choose_checks(mark.kwargs.get("groups", ()), mark.kwargs.get("names", ()))
    metafunc.parametrize("conformance_check", [check.as_param() for check in checks], indirect=True)


class _Rigs:
    """The rigs of a module's tests, by their marks, and the event loop that they use."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._rigs: dict[str, tuple[Runtime, Rig]] = {}

    def get(self, mark: pytest.Mark) -> Rig:
        """Return the rig for this mark, entered."""
        from hermes_core import Runtime
        from hermes_testing.conformance.kit import Rig

        key = repr((mark.args, mark.kwargs))
        if key not in self._rigs:
            plugins = mark.kwargs.get("plugins", ())
            runtime = Runtime(plugins=plugins, load_entry_points=not plugins)
            rig = Rig(runtime, mark.args[0], mark.kwargs.get("config"), isolation=mark.kwargs.get("isolation"))
            self.runner.run(rig.__aenter__())
            self._rigs[key] = (runtime, rig)
        return self._rigs[key][1]

    def close(self) -> None:
        """End the rigs."""
        try:
            for runtime, rig in self._rigs.values():
                self.runner.run(rig.aclose())
                self.runner.run(runtime.aclose())
        finally:
            self.runner.close()


@pytest.fixture(scope="module")
def _conformance_rigs() -> Iterator[_Rigs]:
    rigs = _Rigs()
    yield rigs
    rigs.close()


@pytest.fixture
def conformance_check(
    request: pytest.FixtureRequest,
    _conformance_rigs: _Rigs,
    record_property: Callable[[str, object], None],
) -> Callable[[], None]:
    """Return a function that runs this test's check. Figures that the check measures are properties of the test."""
    from hermes_testing.conformance.runner import run_check

    mark: Any = request.node.get_closest_marker("conformance")
    rig, check = _conformance_rigs.get(mark), request.param

    def run() -> None:
        __tracebackhide__ = True
        figures: dict[str, float] = {}
        try:
            _conformance_rigs.runner.run(run_check(rig, check, figures))
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"promised: {check.promise}")
            raise error.with_traceback(check.own_frames(error.__traceback__))  # noqa: B904
        finally:
            for name, value in figures.items():
                record_property(name, value)

    return run
