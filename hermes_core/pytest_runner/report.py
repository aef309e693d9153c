"""Runs chosen pytest tests and reports each outcome. Sent into the sandbox as source; stdlib and pytest, Python >= 3.8.

Two processes, both started with this file's text as an argument, so that it is in no file of the slot:

- The supervisor never runs anything of the project. It holds the only way back to the driver (its standard output),
  can't be traced or read by processes of the same user, keeps the time, and takes outcomes from a pipe.
- The test process imports pytest and this reporter before the project's directories become importable, so that nothing
  in the project can take their place, and then runs the tests. It alone has the pipe's other end. Before it runs tests,
  it keeps references to every function that it needs for sending outcomes: tests may replace functions of the standard
  library, and builtins, also for longer than a test, and may close descriptors.

Code under test runs in the same process as pytest, so it can still change pytest itself in memory, as the threat model
says. But it can't make a test count as passed by dying, by hanging, by writing a file, or by printing something: a test
whose outcome did not arrive has failed, and all tests have failed if the final message is missing.

Protocol: the driver sends one JSON object (`root`, `import_path`, `args`, `ids`, `doctests`, `timeout_s`, `env`,
`output_bytes`, `cwd`, `with_parameters`) on standard input and reads two lines: one as soon as the supervisor runs,
before any test, and the report.
"""

# ruff: noqa: PTH113, PTH118, PTH120, PTH123
# (because pathlib would be another import in each of the two processes)

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from importlib.machinery import PathFinder
from os import _exit, chdir, getpid, write
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # annotations are not evaluated, so newer syntax works on 3.8
    from collections.abc import Callable, Iterator

LOADER = """\
import builtins, sys
own = {'__name__': '__main__', '__builtins__': dict(vars(builtins))}
exec(compile(sys.argv[1], '<pytest_report>', 'exec'), own)
"""
"""The code for `python -c`, with the text of this file as its first argument. Runs this file with a copy of the
builtins, which tests don't replace."""

PASSED, FAILED, ERROR, SKIPPED, XFAILED, XPASSED, MISSING = "p", "f", "e", "s", "x", "X", "-"
"""One test's outcome as one character of the report's `outcomes`. Only `p` counts as passed."""

_WORSE = (PASSED, XPASSED, XFAILED, SKIPPED, FAILED, ERROR)  # if an id has several outcomes, the rightmost counts
_TEXTS = 40
_TEXT_CHARS = 2000
_WHERE_CHARS = 500
_REPORT_BYTES = 64 << 20
_LINE_BYTES = 1 << 20
_EVENTS_EACH, _EVENTS_BESIDE = 10, 1000
_OOM_KILLS = (
    ("/proc/vmstat", b"oom_kill "),  # for the whole host; since Linux 4.13
    ("/sys/fs/cgroup/memory.events", b"oom_kill "),
    ("/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill "),
)
_PR_SET_DUMPABLE = 4
_ROOM, _ROOM_INODES = 1 << 20, 10
_DESCRIPTORS = 1 << 16

_quoted = json.encoder.encode_basestring_ascii  # written in C, so tests can't replace a part of it


def supervise(source: str) -> int:
    """Run the tests in a separate process and print the report. Return the exit status."""
    config = json.loads(sys.stdin.buffer.read())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _tell({"supervisor": os.getpid()})
    started = time.monotonic()
    run = _TestRun(config, source)
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


class _TestRun:
    """The test process as the supervisor sees it: two pipes, a deadline, and the data received so far."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.results = Results(len(config["ids"]))
        self.facts = self.results.facts
        self.timed_out = False
        self.output = _Tail(config["output_bytes"])
        self._oom_kills = _oom_kills()
        self._root = config["root"]
        self._events, results_end = os.pipe()
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
        for descriptor in (self._events, self._printed):
            os.set_blocking(descriptor, False)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(dict(config, results=results_end)).encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # the process died at once; the report will say so

    def watch(self, deadline: float) -> None:
        """Read the pipes until the final message has arrived, the process has ended, or the deadline has passed."""
        readers = {self._events: self.results.add, self._printed: self.output.add}
        with selectors.DefaultSelector() as selector:
            for descriptor in readers:
                selector.register(descriptor, selectors.EVENT_READ)
            ended = False
            while "status" not in self.facts and not ended:
                now = time.monotonic()
                if now >= deadline:
                    self.timed_out = True
                    return
                ended = self.process.poll() is not None  # before the last read, which then misses nothing
                for key, _ in selector.select(0 if ended else min(0.05, deadline - now)):
                    if not _read_available(key.fd, readers[key.fd]):
                        selector.unregister(key.fd)

    def kill(self) -> None:
        """Kill the test process and its session, reap it, and read the rest of its output."""
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
        """Return the report for the driver."""
        if self.timed_out:
            status = "timed_out"
        elif "broken" in self.facts and "pytest" not in self.facts:
            status = "broken"
        else:
            status = "finished" if "status" in self.facts else "cut"
        return {
            "report": status,
            "outcomes": "".join(self.results.outcomes),
            "texts": self.results.texts,
            "pytest": self.facts.get("pytest"),
            "pytest_status": self.facts.get("status"),
            "exit_code": self.process.returncode,
            "broken": self.facts.get("broken"),
            "oom_kills": _oom_kills() != self._oom_kills,
            "disk_full": _disk_is_full(self._root),
            "output": self.output.text(),
        }


class Results:
    """The outcomes received so far. Code under test can send anything; tests whose outcome is not valid stay missing.

    Attributes:
        outcomes: one character for each test.
        texts: the place and the end of the traceback, for the first failures.
        facts: `pytest`: its version; `status`: its exit status, which is the final message; `broken`: the reason why
            it can't start.
    """

    def __init__(self, tests: int) -> None:
        self.outcomes = [MISSING] * tests
        self.texts: list[list[str]] = []
        self.facts: dict[str, Any] = {}
        self._lines = _LineReader(_LINE_BYTES, _REPORT_BYTES, _EVENTS_BESIDE + _EVENTS_EACH * tests)

    def add(self, data: bytes) -> None:
        """Process the next bytes of the pipe."""
        for line in self._lines.add(data):
            try:
                event = json.loads(line.decode("ascii"))
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        index, outcome = event.get("index"), event.get("outcome")
        if type(index) is int and 0 <= index < len(self.outcomes) and outcome in _WORSE:
            before = self.outcomes[index]
            if before == MISSING or _WORSE.index(outcome) > _WORSE.index(before):
                self.outcomes[index] = outcome
        where, text = event.get("where"), event.get("text")
        if isinstance(where, str) and isinstance(text, str) and len(self.texts) < _TEXTS:
            self.texts.append([where[:_WHERE_CHARS], text[-_TEXT_CHARS:]])
        for fact in ("pytest", "broken"):
            if isinstance(event.get(fact), str):
                self.facts.setdefault(fact, event[fact][:_TEXT_CHARS])
        if type(event.get("status")) is int and 0 <= event["status"] <= 255:
            self.facts.setdefault("status", event["status"])


class _LineReader:
    """The lines of a stream. Lines have a maximum length; after a maximum number of bytes or lines, the rest is
    ignored."""

    def __init__(self, longest: int, most_bytes: int, most: int) -> None:
        self._longest = longest
        self._bytes_left = most_bytes
        self._left = most
        self._partial = bytearray()
        self._skipping = False

    def add(self, data: bytes) -> list[bytes]:
        """Add data, and return the lines that are now complete."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0 or self._left < 0:
            return []
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            self._extend(piece)
            if not self._skipping:
                lines.append(bytes(self._partial))
            self._partial.clear()
            self._skipping = False
        self._extend(rest)
        self._left -= len(whole)
        return lines if self._left >= 0 else []

    def _extend(self, piece: bytes) -> None:
        self._skipping = self._skipping or len(self._partial) + len(piece) > self._longest
        if self._skipping:
            self._partial.clear()
        else:
            self._partial += piece


def _disk_is_full(path: str) -> bool:
    """Return whether almost no room is left on the disk where the tests ran."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _ROOM or (disk.f_files > 0 and disk.f_favail < _ROOM_INODES)


def _oom_kills() -> list[int]:
    """Return, from each readable counter, the number of processes that the kernel has killed for lack of memory."""
    counts = []
    for path, word in _OOM_KILLS:
        try:
            with open(path, "rb") as file:
                counts += [int(line[len(word) :]) for line in file if line.startswith(word)]
        except (OSError, ValueError):
            continue
    return counts


def _read_available(descriptor: int, take: Callable[[bytes], None], most: int = 1 << 22) -> bool:
    """Pass the available data to `take`, up to about `most` bytes, because writers may go on without end. Return False
    at the end of the stream."""
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
    """Return the slot's environment, with the virtual environment first. PYTHONPATH is applied later, after pytest's
    import."""
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
    """Run the test process. Never returns."""
    config = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    config["results"] = _out_of_reach(config["results"])
    reporter = Reporter(config)
    sys.path.remove("")  # `python -c` puts this there
    try:
        import pytest

        if int(pytest.__version__.split(".")[0]) < 7:
            raise ImportError(f"pytest {pytest.__version__} is too old; version 7.0 or newer is needed")
    except BaseException as error:
        reporter.send(broken=f"{type(error).__name__}: {error}")
        _exit(3)
    reporter.send(pytest=pytest.__version__)
    os.environ.update(config["env"])
    os.environ["PYTHONPATH"] = os.pathsep.join(config["import_path"])
    os.chdir(config["root"])
    sys.meta_path.append(reporter.later)
    sys.argv = ["pytest"]
    if not reporter.files:
        reporter.send(status=5, where="", text="none of the test files exists")
        _exit(0)
    try:
        reporter.status = pytest.main(_arguments(config), plugins=[_as_plugin(reporter, pytest)])
    except Exception:  # for example, because a test has closed a descriptor
        if reporter.status is None:
            raise
    _flush()  # before the status, because nobody reads the output after it
    reporter.send(status=int(reporter.status))
    _exit(0)


def _out_of_reach(descriptor: int) -> int:
    """Move a descriptor to a number above all that a test can open and may close in one go. Programs that tests start
    do not inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, most - 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(descriptor)


def _flush() -> None:
    """Flush the output streams: pytest's message on an internal error comes last."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


def _arguments(config: dict[str, Any]) -> list[str]:
    """Return the caller's arguments, and those that make node ids relative to the root. Any other argument could affect
    tests."""
    return [*config["args"], "--rootdir=" + config["root"]]


class Reporter:
    """Selects exactly the wanted tests and sends each outcome as it is known."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.root = config["root"]
        self.cwd = config["cwd"]
        self.ids = {node_id: index for index, node_id in enumerate(config["ids"])}
        self._with_parameters = config["with_parameters"]
        self.import_path = config["import_path"]
        self.later = _Later(self.import_path)
        self._doctests: dict[str, dict[str, tuple[str, int]]] = {}
        paths = {node_id: self._file(node_id) for node_id in self.ids}
        for node_id, docstring in config["doctests"].items():
            if path := paths[node_id]:
                self._doctests.setdefault(path, {})[node_id[len(path) + 2 :]] = docstring
        others = {path for node_id, path in paths.items() if node_id not in config["doctests"]}
        self._only_doctests = {os.path.join(self.root, path) for path in self._doctests if path not in others}
        self.files = sorted({*paths.values()} - {""}, key=_parts)
        self._named = self._arguments()
        odd = any(_readable(path) != path for path in self.files)
        roots = {self.root, os.path.realpath(self.root)} if odd else set()
        ways = [path.split("/") for path in self.files]
        self._leads = {os.path.join(root, *way[:end]) for root in roots for way in ways for end in range(len(way) + 1)}
        self._results = config["results"]
        self._pid = getpid()
        self.status: int | None = None
        if self._doctests:
            import doctest

            self._finder: Any = doctest.DocTestFinder

    def _file(self, node_id: str) -> str:
        """Return the existing file of a test, or an empty string. The path may have any character of file names."""
        parts = node_id.split("::")
        paths = ("::".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((path for path in paths if os.path.isfile(os.path.join(self.root, path))), "")

    def _arguments(self) -> list[str]:
        """Return pytest's arguments for the files: a file's path, or its nearest directory whose path pytest reads
        correctly."""
        named = [*dict.fromkeys(map(_readable, self.files))]
        above = [path and path + "/" for path in named if path not in self.files]
        named = [path for path in named if not any(path.startswith(each) and path != each for each in above)]
        return [os.path.join(self.root, path) if self.cwd or not path else path for path in named]

    def send(self, **event: Any) -> None:
        """Send one event, whose values are texts and numbers. Does nothing in a forked child of the test process."""
        if getpid() != self._pid:
            return
        fields = [
            f"{_quoted(name)}: {_quoted(value) if isinstance(value, str) else value}" for name, value in event.items()
        ]
        data = ("{" + ", ".join(fields) + "}\n").encode()
        while data:
            data = data[write(self._results, data) :]

    def index_of(self, node_id: str) -> int | None:
        """Return the index of a test among the wanted tests, or None."""
        index = self.ids.get(node_id)
        if index is None and self._with_parameters:
            return next((index for plain, index in self.ids.items() if node_id.startswith(plain + "[")), None)
        return index

    def pytest_load_initial_conftests(self) -> None:
        """Put the project's directories first in `sys.path`. All plugins are loaded by now."""
        sys.meta_path.remove(self.later)
        sys.path[:] = self.import_path + [entry for entry in sys.path if entry not in self.import_path]

    def pytest_cmdline_main(self, config: Any) -> None:
        """Make pytest run all tests in order in one process. Command-line options can't do this, because pytest refuses
        options of plugins that are not loaded."""
        config.option.maxfail = 0
        if hasattr(config.option, "stepwise"):
            config.option.stepwise = config.option.stepwise_skip = False
        if hasattr(config.option, "randomly_reorganize"):
            config.option.randomly_reorganize = False
        if hasattr(config.option, "numprocesses"):
            config.option.numprocesses = None
            config.option.dist = "no"
            config.option.tx = []

    def pytest_configure(self, config: Any) -> None:
        """Make pytest collect the wanted files, even if the configuration would not collect them."""
        config.args = self._named
        if hasattr(config, "ArgsSource"):
            config.args_source = config.ArgsSource.ARGS
        if self.cwd:  # not earlier: without arguments, pytest looks for its configuration in the current directory
            chdir(self.cwd)

    def pytest_ignore_collect(self, collection_path: Any) -> bool | None:
        """Ignore files that are not wanted, below a directory that is an argument in place of a file."""
        path = str(collection_path)
        return True if self._leads and path not in self._leads and not path.endswith("/__init__.py") else None

    def pytest_pycollect_makemodule(self, module_path: Any) -> Iterator[None]:
        """Look for no tests in a source file that is wanted only for its doctests."""
        made = yield
        if str(module_path) in self._only_doctests:
            made.force_result(None)  # type: ignore[attr-defined]

    def pytest_make_collect_report(self, collector: Any) -> Iterator[None]:
        """Use the given docstrings instead of the module's own."""
        if collector.nodeid not in self._doctests:
            yield
            return
        find = self._finder.find
        self._finder.find = _finding(self._doctests[collector.nodeid])
        try:
            yield
        finally:
            self._finder.find = find

    def pytest_collection_modifyitems(self, items: list[Any]) -> Iterator[None]:
        """Keep only the wanted tests. Runs after all other hooks of this name."""
        yield
        items[:] = [item for item in items if self.index_of(item.nodeid) is not None]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._explain(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Note the exit status of the tests. After this hook, pytest only tidies up."""
        self.status = exitstatus

    def pytest_runtest_logreport(self, report: Any) -> None:
        index = self.index_of(report.nodeid)
        outcome = _outcome(report)
        if index is None or outcome is None:
            return
        self.send(index=index, outcome=outcome)
        if outcome in (FAILED, ERROR):
            self._explain(report)

    def _explain(self, report: Any) -> None:
        try:
            self.send(where=report.nodeid[:_WHERE_CHARS], text=report.longreprtext[-_TEXT_CHARS:])
        except Exception:  # pytest makes the text with functions that the test may have replaced
            pass


def _readable(path: str) -> str:
    """Return the path, or its nearest parent, that pytest does not misread as something other than a path."""
    while "[" in path or "::" in path:
        path = os.path.dirname(path)
    return path


def _parts(path: str) -> list[str]:
    return path.split("/")


def _finding(docstrings: dict[str, tuple[str, int]]) -> Callable[..., list[Any]]:
    """Return a replacement for `DocTestFinder.find` that finds these examples, with the searched module's names."""

    def find(finder: Any, module: Any, *_: Any, **__: Any) -> list[Any]:
        names = {"__name__": "__main__", **vars(module)}
        return [
            finder._parser.get_doctest(text, dict(names), name, getattr(module, "__file__", None), line)
            for name, (text, line) in docstrings.items()
        ]

    return find


class _Later:
    """An import finder for the project's modules (`-p project.plugin`) that finds no distributions; asked last.

    If the project's directories were on `sys.path`, pytest would load plugins from entry points there, and any user of
    the slot can write a file of entry points.
    """

    def __init__(self, import_path: list[str]) -> None:
        self._import_path = import_path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, self._import_path, target) if path is None else None


def _outcome(report: Any) -> str | None:
    """Return the outcome if this phase of a test decides it; else None."""
    if report.failed:
        return FAILED if report.when == "call" else ERROR
    if hasattr(report, "context"):  # a subtest: apart from its failure, the test's own report decides
        return None
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped:
        return XFAILED if expected_to_fail else SKIPPED
    if report.when == "call":
        return XPASSED if expected_to_fail else PASSED
    return None


def _as_plugin(reporter: Reporter, pytest: Any) -> Reporter:
    """Mark the reporter's methods as pytest hooks, and return the reporter. Decorators in the class would need pytest
    when this module is imported."""
    kind = type(reporter)
    pytest.hookimpl(tryfirst=True)(kind.pytest_load_initial_conftests)
    pytest.hookimpl(tryfirst=True)(kind.pytest_cmdline_main)
    pytest.hookimpl(trylast=True)(kind.pytest_configure)
    for hook in (kind.pytest_pycollect_makemodule, kind.pytest_make_collect_report, kind.pytest_collection_modifyitems):
        pytest.hookimpl(hookwrapper=True, tryfirst=True)(hook)
    return reporter


if __name__ == "__main__":
    if sys.argv[2:] == ["tests"]:
        run_tests()
    sys.exit(supervise(sys.argv[1]))
