"""The order of tests and the number of processes that run them (`-n auto`).

Mark your test `long` if it takes half a minute and more: runs begin with such tests, so that none of them is the last
and runs alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return twice the number of processors: tests wait about as long as they compute."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after pytest's own, which selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    yield
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        items[:] = in_shares(items, int(workers))


def in_shares(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests so that each worker begins with long ones: the run should not end with one of them alone.

    xdist gives each worker one stretch of the list, all of the same length, and lets it help others afterwards.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    found: list[pytest.Item] = []
    for n in range(workers):
        share = (len(items) - len(found)) // (workers - n)
        begin = long[n::workers]
        found += [*begin, *islice(others, max(0, share - len(begin)))]
    return [*found, *others]
