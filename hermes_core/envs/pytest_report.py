"""Runs chosen pytest tests and reports each outcome. Sent into the sandbox as source; stdlib and pytest, Python >= 3.8.

Two processes, both started with this file's text as an argument, so that nothing lies on a disk:

- The supervisor never runs anything of the project. It holds the only way back to the driver (its standard output),
  can't be traced or read by processes of the same user, keeps the time, and takes outcomes from a pipe.
- The test process imports pytest and this reporter before the project's directories become importable, so that nothing
  in the project can take their place, and then runs the tests. It alone has the pipe's other end.

What code under test can still do, as it runs in the same process as pytest, is to change pytest itself in memory.
`docs/threat-model.md` says so. What it can't do is to be counted as passed by dying, by hanging, by writing a file, or
by printing something: an outcome that did not arrive is a failure, and so is everything if the last word is missing.

Protocol: the driver sends one JSON object (`root`, `import_path`, `args`, `ids`, `timeout_s`, `env`, `output_bytes`)
on standard input and reads two lines: one as soon as the supervisor runs, before any test, and the report.
"""

# ruff: noqa: PTH113, PTH118, PTH120
# (pathlib would be one import more in each of the two processes)

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Callable, Iterator

LOADER = "import sys; exec(compile(sys.argv[1], '<pytest_report>', 'exec'), {'__name__': '__main__'})"
"""What `python -c` is given; the text of this file is its first argument."""

PASSED, FAILED, ERROR, SKIPPED, XFAILED, XPASSED, MISSING = "p", "f", "e", "s", "x", "X", "-"
"""One test's outcome as one character of the report's `outcomes`. Only `p` counts as passed."""

_WORSE = PASSED + XPASSED + XFAILED + SKIPPED + FAILED + ERROR  # of several outcomes of one id, the rightmost counts
_TEXTS = 20
_TEXT_CHARS = 2000
_REPORT_BYTES = 64 << 20
_PR_SET_DUMPABLE = 4


def supervise(source: str) -> int:
    """Run the tests in a process of their own and print the report. Returns the exit status."""
    config = json.loads(sys.stdin.buffer.read())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _tell({"supervisor": os.getpid()})
    started = time.monotonic()
    run = _Run(config, source)
    try:
        run.watch(started + config["timeout_s"])
    finally:
        run.kill()
    report = run.report()
    report["duration_s"] = round(time.monotonic() - started, 3)
    _tell(report)
    return 0


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Run:
    """The test process as the supervisor sees it: two pipes, a deadline, and what has arrived so far."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.outcomes = [MISSING] * len(config["ids"])
        self.texts: list[list[str]] = []
        self.facts: dict[str, Any] = {}
        self.timed_out = False
        self.output = _Tail(config["output_bytes"])
        self._partial = b""
        self._received = 0
        self._results, results_end = os.pipe()
        self._printed, printed_end = os.pipe()
        arguments = [sys.executable, "-s", "-B", "-c", LOADER, source, "tests"]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=printed_end,
            stderr=printed_end,
            cwd="/",
            env=_environment(config),
            pass_fds=[results_end],
            start_new_session=True,
        )
        os.close(results_end)
        os.close(printed_end)
        for descriptor in (self._results, self._printed):
            os.set_blocking(descriptor, False)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(dict(config, results=results_end)).encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once, which is what the report will say

    def watch(self, deadline: float) -> None:
        """Read until the last word has arrived, the process has ended, or the deadline has passed."""
        readers = {self._results: self._take_results, self._printed: self.output.add}
        with selectors.DefaultSelector() as selector:
            for descriptor in readers:
                selector.register(descriptor, selectors.EVENT_READ)
            ended = False
            while "status" not in self.facts and not ended:
                now = time.monotonic()
                if now >= deadline:
                    self.timed_out = True
                    return
                ended = self.process.poll() is not None  # before the last reading, so that nothing is missed
                for key, _ in selector.select(0 if ended else min(0.05, deadline - now)):
                    if not _read_available(key.fd, readers[key.fd]):
                        selector.unregister(key.fd)

    def kill(self) -> None:
        """End the test process and its session, reap it, and read what it had printed."""
        if "status" in self.facts:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except OSError:
            pass
        self.process.wait()
        _read_available(self._printed, self.output.add)

    def report(self) -> dict[str, Any]:
        """What the driver is told."""
        if self.timed_out:
            status = "timed_out"
        elif "broken" in self.facts and "pytest" not in self.facts:
            status = "broken"
        else:
            status = "finished" if "status" in self.facts else "cut"
        return {
            "report": status,
            "outcomes": "".join(self.outcomes),
            "texts": self.texts,
            "pytest": self.facts.get("pytest"),
            "pytest_status": self.facts.get("status"),
            "exit_code": self.process.returncode,
            "broken": self.facts.get("broken"),
            "output": self.output.text(),
        }

    def _take_results(self, data: bytes) -> None:
        self._received += len(data)
        if self._received > _REPORT_BYTES:
            return
        lines = (self._partial + data).split(b"\n")
        self._partial = lines.pop()
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                continue  # not of our reporter's making; what it stood for stays missing

    def _take(self, event: dict[str, Any]) -> None:
        if "outcome" in event:
            index, outcome = int(event["index"]), event["outcome"]
            before = self.outcomes[index]
            if before == MISSING or _WORSE.index(outcome) > _WORSE.index(before):
                self.outcomes[index] = outcome
        text = event.pop("text", None)
        if text and len(self.texts) < _TEXTS:
            self.texts.append([str(event.get("where", ""))[:500], str(text)[-_TEXT_CHARS:]])
        for fact in ("pytest", "status", "broken"):
            if fact in event:
                self.facts.setdefault(fact, event[fact])


def _read_available(descriptor: int, take: Callable[[bytes], None], most: int = 1 << 22) -> bool:
    """Hand on what is there to be read, up to a limit, as others may go on writing. False at the end of the stream."""
    while most > 0:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        take(data)
        most -= len(data)
    return True


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = b""
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        self._data = (self._data + data)[-self._limit :]

    def text(self) -> str:
        left_out = self._total - len(self._data)
        notice = f"[{left_out} bytes left out]\n" if left_out else ""
        return notice + self._data.decode("utf-8", "replace")


def _environment(config: dict[str, Any]) -> dict[str, str]:
    """The slot's environment, the virtual environment in front. PYTHONPATH follows inside, after pytest's import."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV_"))}
    programs = os.path.dirname(sys.executable)
    variables.update(config["env"])
    variables.update(
        PATH=programs + os.pathsep + variables.get("PATH", "/usr/bin:/bin"),
        VIRTUAL_ENV=os.path.dirname(programs),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONHASHSEED="0",
        PYTHONNOUSERSITE="1",
    )
    variables.pop("PYTHONPATH", None)
    return variables


def run_tests() -> None:
    """The test process: never returns."""
    config = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.set_inheritable(config["results"], False)
    reporter = Reporter(config)
    sys.path.remove("")  # what `python -c` puts there
    try:
        import pytest

        if int(pytest.__version__.split(".")[0]) < 7:
            raise ImportError(f"pytest {pytest.__version__} is too old, 7.0 is the first that will do")
    except BaseException as error:
        reporter.send(broken=f"{type(error).__name__}: {error}")
        os._exit(3)
    reporter.send(pytest=pytest.__version__)
    os.environ.update(config["env"])
    os.environ["PYTHONPATH"] = os.pathsep.join(config["import_path"])
    os.chdir(config["root"])
    sys.meta_path.append(reporter.later)
    sys.argv = ["pytest"]
    if not reporter.files():
        reporter.send(status=5, where="", text="none of the test files exists")
        os._exit(0)
    status = pytest.main(_arguments(config), plugins=[_as_plugin(reporter, pytest)])
    reporter.send(status=int(status))
    os._exit(0)


def _arguments(config: dict[str, Any]) -> list[str]:
    import importlib.util

    arguments: list[str] = list(config["args"])
    arguments += ["--rootdir=" + config["root"], "-p", "no:cacheprovider", "-p", "no:randomly", "--maxfail=0"]
    if importlib.util.find_spec("pytest_cov") and "no:pytest_cov" not in arguments:
        arguments.append("--no-cov")
    return arguments


class Reporter:
    """Selects exactly the wanted tests and sends each outcome as it is known."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.root = config["root"]
        self.ids = {node_id: index for index, node_id in enumerate(config["ids"])}
        self.import_path = config["import_path"]
        self.later = _Later(self.import_path)
        self._results = config["results"]

    def send(self, **event: Any) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(self._results, data) :]

    def files(self) -> list[str]:
        """The files of the wanted tests that exist, in the order in which they were named."""
        files = dict.fromkeys(node_id.split("::")[0] for node_id in self.ids)
        return [name for name in files if os.path.isfile(os.path.join(self.root, name))]

    def pytest_load_initial_conftests(self) -> None:
        """The plugins are loaded: from here on the project's own modules come first."""
        sys.meta_path.remove(self.later)
        sys.path[:] = self.import_path + [entry for entry in sys.path if entry not in self.import_path]

    def pytest_cmdline_main(self, config: Any) -> None:
        """No worker processes of xdist: the selection and the reporter are in this one."""
        if hasattr(config.option, "numprocesses"):
            config.option.numprocesses = None
            config.option.dist = "no"
            config.option.tx = []

    def pytest_configure(self, config: Any) -> None:
        """Collect the wanted files, whatever the configuration says is to be collected by default."""
        config.args = self.files()
        if hasattr(config, "ArgsSource"):
            config.args_source = config.ArgsSource.ARGS

    def pytest_collection_modifyitems(self, items: list[Any]) -> Iterator[None]:
        """After everyone else's: keep what is wanted."""
        yield
        items[:] = [item for item in items if item.nodeid in self.ids]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.send(where=report.nodeid, text=report.longreprtext[-_TEXT_CHARS:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        index = self.ids.get(report.nodeid)
        outcome = _outcome(report)
        if index is None or outcome is None:
            return
        if outcome in (FAILED, ERROR):
            self.send(index=index, outcome=outcome, where=report.nodeid, text=report.longreprtext[-_TEXT_CHARS:])
        else:
            self.send(index=index, outcome=outcome)


class _Later:
    """Finds the project's modules where nobody else has them (`-p project.plugin`), and no distributions.

    On `sys.path` the project's directories would be searched for entry points, and anyone can write such a file.
    """

    def __init__(self, import_path: list[str]) -> None:
        self._import_path = import_path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, self._import_path, target) if path is None else None


def _outcome(report: Any) -> str | None:
    """The outcome that one phase of a test decides, or None."""
    if report.failed:
        return FAILED if report.when == "call" else ERROR
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped:
        return XFAILED if expected_to_fail else SKIPPED
    if report.when == "call":
        return XPASSED if expected_to_fail else PASSED
    return None


def _as_plugin(reporter: Reporter, pytest: Any) -> Reporter:
    """The reporter with its hooks marked; done late, as the marks are pytest's."""
    kind = type(reporter)
    pytest.hookimpl(tryfirst=True)(kind.pytest_load_initial_conftests)
    pytest.hookimpl(tryfirst=True)(kind.pytest_cmdline_main)
    pytest.hookimpl(trylast=True)(kind.pytest_configure)
    pytest.hookimpl(hookwrapper=True, tryfirst=True)(kind.pytest_collection_modifyitems)
    return reporter


if __name__ == "__main__":
    if sys.argv[2:] == ["tests"]:
        run_tests()
    sys.exit(supervise(sys.argv[1]))
