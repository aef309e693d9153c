"""Estimates the difficulty of a task, from its changes and from the functions that its tests ran."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_make_tasks.bench import SurveyedTest
from hermes_make_tasks.candidates import BugCandidate
from hermes_make_tasks.sources import SourceFile

EASY, MEDIUM = 4.0, 6.5
"""The highest scores that are called easy and medium."""


def estimate(
    candidate: BugCandidate, broken: Sequence[SurveyedTest], sources: Mapping[str, SourceFile]
) -> dict[str, Any]:
    """Return the estimate and its parts; docs/guides/make-tasks.md explains both."""
    functions = candidate.functions
    files = {path for path, _ in functions}
    distance = min((_functions_run(test, sources) for test in broken), default=1)
    score = (
        math.log2(1 + distance)
        + 1.5 * (len(functions) - 1)
        + 1.0 * (len(files) - 1)
        + max(0.0, 1.0 - 0.5 * math.log2(max(1, len(broken))))
    )
    level = "easy" if score <= EASY else "medium" if score <= MEDIUM else "hard"
    return {
        "level": level,
        "score": round(score, 2),
        "functions": len(functions),
        "files": len(files),
        "broken_tests": len(broken),
        "distance": distance,
        "broken_tests_median_distance": _median([_functions_run(test, sources) for test in broken]),
    }


def _median(values: Sequence[int]) -> float:
    return float(statistics.median(values)) if values else 0.0


def _functions_run(test: SurveyedTest, sources: Mapping[str, SourceFile]) -> int:
    """Return the number of the project's functions that a test runs, among which the bug must be found."""
    count = 0
    for path, bits in test.lines.items():
        for function in sources[path].functions if path in sources else ():
            lines = function.lines
            count += bool(bits >> lines[0] & ((1 << len(lines)) - 1))
    return max(1, count)
