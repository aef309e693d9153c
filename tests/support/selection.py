"""How much of your test each command runs: `make test`, `make test-all` or `make stress`.

`make test` leaves out what is marked `full` or `stress`, and `make test-all` what is marked `stress`. A test is marked
`full` by itself if one of its fixtures is decorated with `makes_tests_full`. Two ways run a part of a test:

- `@pytest.mark.few(3)`: `make test` runs the first 3 of the test's parameters, and `make test-all` the others as well.
  With `few(3, 20)`, `make test-all` runs 20 more, and `make stress` the rest.
- `times(some, many)`, a fixture: a test of what happens by chance asks how often it should try. hypothesis, too, makes
  5 examples in `make test` and 15 in `make test-all` (`--hypothesis-profile=thorough`).

A test marked `root` is skipped for an ordinary user.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import hypothesis
import pytest

F = TypeVar("F", bound=Callable[..., Any])

hypothesis.settings.register_profile("default", max_examples=5, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=15, deadline=None)
hypothesis.settings.load_profile("default")  # `--hypothesis-profile` comes after it


def makes_tests_full(fixture: F) -> F:
    """Decorate a fixture (below `pytest.fixture`) that needs a server or a heavy extra: its tests are marked `full`."""
    fixture.makes_tests_full = True  # type: ignore[attr-defined]
    return fixture


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "few(n, m): `make test` runs its first n cases; m more (or all others) are `full`, the rest `stress`"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest's own, which selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    cases: Counter[str] = Counter()
    for item in items:
        if few := item.get_closest_marker("few"):
            family = item.nodeid.partition("[")[0]
            quick, *others = few.args
            if cases[family] >= quick:
                item.add_marker(pytest.mark.full)
            if others and cases[family] >= sum(few.args):
                item.add_marker(pytest.mark.stress)
            elif cases[family] >= quick or not item.get_closest_marker("full"):
                cases[family] += 1
        if has_full_fixture(item):
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
    yield


def has_full_fixture(item: pytest.Item) -> bool:
    """Return whether one of the fixtures of a test is decorated with `makes_tests_full`."""
    fixtures = getattr(item, "_fixtureinfo", None)  # pytest has no public name for it
    if fixtures is None:
        return False
    return any(hasattr(found[-1].func, "makes_tests_full") for found in fixtures.name2fixturedefs.values())


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`times(some, many)`: how often to try what happens by chance, in `make test` and in `make test-all`."""
    thorough = request.config.getoption("--hypothesis-profile") == "thorough"
    return lambda some, many: many if thorough else some
