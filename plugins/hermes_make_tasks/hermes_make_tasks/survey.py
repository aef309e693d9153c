"""Finds a project's tests, and the lines of its sources that each test runs. Sent into slots as source.

Standard library and pytest, Python >= 3.8. The module runs pytest in its own process, as
`hermes_core/pytest_runner/report.py` does: with pytest and its plugins from the environment, and only then with the
project's directories on the import path. Nothing here is protected from the project, because the report only serves to
choose the tests to try. The outcomes that count come from core's reporter.

Called with one JSON object on standard input (`root`, `import_path`, `args`, `env`, `tests`, `files`). Prints JSON
lines: `{"tests": [...]}` with all node ids in their order; for each test `{"test": index, "outcome": "passed",
"seconds": 0.1, "lines": {"file index": "hexadecimal bits"}}`, where bit n stands for line n; the same with test -1 for
the lines that run before the first test; for each test that fails `{"failed": node id, "line": 3, "values":
{"argument": "code"}, "error": "Type: message", "session": "a doctest's text"}`; and in the end
`{"status": pytest's exit status}`.
"""

# ruff: noqa: PTH117, PTH118, PTH120
# (pathlib would be another import)

from __future__ import annotations

import ast
import json
import os
import sys
import threading
from importlib.machinery import PathFinder
from os import _exit, getpid, write
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # annotations are not evaluated, so newer syntax works on 3.8
    from collections.abc import Callable, Iterator

COLLECTION = -1
"""The number in place of a test's for the lines that run while tests are collected."""


class LineTracer:
    """The lines of some files that have run since the last `take`."""

    def __init__(self, root: str, files: list[str]) -> None:
        self._indexes = {os.path.join(root, path): index for index, path in enumerate(files)}
        self._root = root
        self._known: dict[str, int | None] = {}
        self._seen: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Begin to note lines, in all threads."""
        if sys.version_info >= (3, 12):
            self._start_monitoring()
            return
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def take(self) -> dict[int, str]:
        """Return the lines by file, and forget them."""
        bits: dict[int, int] = {}
        for index, line in self._seen:
            bits[index] = bits.get(index, 0) | 1 << line
        self._seen = set()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        return {index: f"{value:x}" for index, value in bits.items()}

    def _file(self, name: str) -> int | None:
        """Return the file's number; None for a file that is not traced."""
        if name not in self._known:
            path = name if os.path.isabs(name) else os.path.join(self._root, name)
            self._known[name] = self._indexes.get(path, self._indexes.get(os.path.realpath(path)))
        return self._known[name]

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        index = self._file(frame.f_code.co_filename)
        if index is None:
            return None
        self._seen.add((index, frame.f_lineno))

        def each(frame: Any, event: str, argument: Any) -> Any:
            self._seen.add((index, frame.f_lineno))
            return each

        return each

    def _start_monitoring(self) -> None:
        if sys.version_info < (3, 12):
            return
        monitoring = sys.monitoring
        tool = monitoring.COVERAGE_ID
        monitoring.use_tool_id(tool, "hermes-rl")

        def line(code: Any, number: int) -> Any:
            if (index := self._file(code.co_filename)) is not None:
                self._seen.add((index, number))
            return monitoring.DISABLE

        monitoring.register_callback(tool, monitoring.events.LINE, line)
        monitoring.set_events(tool, monitoring.events.LINE)


class Later:
    """Finds the project's modules if no other finder does, for a plugin that an option names (`-p project.plugin`)."""

    def __init__(self, import_path: list[str]) -> None:
        self._import_path = import_path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, self._import_path, target) if path is None else None


class Survey:
    """The pytest plugin. Notes each test, and the lines that run from its first fixture to its last."""

    def __init__(self, config: dict[str, Any], tell: Callable[..., None]) -> None:
        self._config = config
        self._tell = tell
        self._lines = LineTracer(config["root"], config["files"])
        self._later = Later(config["import_path"])
        sys.meta_path.append(self._later)
        self._numbers: dict[str, int] = {}
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._values: dict[str, str] = {}

    def pytest_load_initial_conftests(self) -> None:
        """Put the project's directories first in `sys.path`, and begin to note lines."""
        sys.meta_path.remove(self._later)
        first = self._config["import_path"]
        sys.path[:] = first + [entry for entry in sys.path if entry not in first]
        if self._config["files"]:
            self._lines.start()

    def pytest_cmdline_main(self, config: Any) -> None:
        """Run all tests that can be collected, in order, in one process."""
        config.option.maxfail = 0
        config.option.continue_on_collection_errors = True
        if hasattr(config.option, "randomly_reorganize"):
            config.option.randomly_reorganize = False
        if hasattr(config.option, "numprocesses"):
            config.option.numprocesses = None
            config.option.dist = "no"
            config.option.tx = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> Iterator[None]:
        """Print the node ids of the tests. Runs after all other hooks of this name."""
        yield
        self._numbers = {item.nodeid: number for number, item in enumerate(items)}
        self._tell(tests=[item.nodeid for item in items])
        self._note(COLLECTION, "", 0.0)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(broken=report.nodeid[:500], text=report.longreprtext[-2000:])

    def pytest_runtest_call(self, item: Any) -> None:
        """Note the test's arguments before the test changes them, if they can be written as code."""
        self._values = {}
        for name, value in getattr(item, "funcargs", {}).items():
            try:
                text = repr(value)
                if len(text) <= 500 and ast.literal_eval(text) == value:
                    self._values[name] = text
            except Exception:
                continue

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Print the place and the cause of a test's failure."""
        if call.when != "call" or call.excinfo is None:
            return
        error, line, session = call.excinfo.value, 0, ""
        for failure in getattr(error, "failures", [error])[:1]:
            if hasattr(failure, "example"):
                shown = failure.test.examples[: failure.test.examples.index(failure.example) + 1]
                session = "".join(_as_typed(each.source) + each.want for each in shown)
                session += "\0" + getattr(failure, "got", "")
            error = getattr(failure, "exc_info", [None, error])[1]
        for place in call.excinfo.traceback:
            if place.name == getattr(getattr(item, "function", None), "__name__", None):
                line = place.lineno + 1
        said = {"values": self._values, "error": f"{type(error).__name__}: {error}"[:1000], "session": session[:4000]}
        self._tell(failed=item.nodeid, line=line, **said)

    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """Note the lines of one test."""
        yield
        name = item.nodeid
        self._note(self._numbers.get(name, COLLECTION), self._outcomes.get(name, ""), self._seconds.get(name, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" and name not in self._outcomes:
            self._outcomes[name] = report.outcome
        elif report.outcome != "passed":
            self._outcomes[name] = "error" if report.failed else report.outcome

    def _note(self, number: int, outcome: str, seconds: float) -> None:
        self._tell(test=number, outcome=outcome, seconds=round(seconds, 4), lines=self._lines.take())


def _as_typed(source: str) -> str:
    first, *others = source.splitlines()
    return "".join([">>> " + first + "\n", *("... " + line + "\n" for line in others)])


def main() -> None:
    """Run the survey. Never returns."""
    config = json.loads(sys.stdin.buffer.read())
    answer, ours, encode = os.dup(1), getpid(), json.JSONEncoder().encode  # before tests can replace these functions
    os.dup2(2, 1)  # the output of pytest and the tests goes to standard error

    def tell(**event: Any) -> None:
        data = encode(event).encode() + b"\n" if getpid() == ours else b""
        while data:
            data = data[write(answer, data) :]

    sys.path[:] = [entry for entry in sys.path if entry]
    for name in [*os.environ]:
        if name.startswith(("PYTHON", "PYTEST", "COV_")):
            del os.environ[name]
    programs = os.path.dirname(sys.executable)
    os.environ.update(
        PATH=programs + os.pathsep + os.environ.get("PATH", "/usr/bin:/bin"),
        VIRTUAL_ENV=os.path.dirname(programs),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONHASHSEED="0",
        PYTHONNOUSERSITE="1",
        **config["env"],
    )
    import pytest

    os.environ["PYTHONPATH"] = os.pathsep.join(config["import_path"])
    os.chdir(config["root"])
    sys.argv = ["pytest"]
    survey = Survey(config, tell)
    kind = type(survey)
    pytest.hookimpl(tryfirst=True)(kind.pytest_load_initial_conftests)
    pytest.hookimpl(tryfirst=True)(kind.pytest_cmdline_main)
    pytest.hookimpl(hookwrapper=True, tryfirst=True)(kind.pytest_collection_modifyitems)
    pytest.hookimpl(hookwrapper=True, tryfirst=True)(kind.pytest_runtest_protocol)
    status = pytest.main([*config["args"], "--rootdir=" + config["root"], *config["tests"]], plugins=[survey])
    tell(status=int(status))
    _exit(0)


if __name__ == "__main__":
    main()
