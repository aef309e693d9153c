"""Fixtures for every test: what the host has to have, a loop that never stalls, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest

from hermes_core.errors import PolicyError
from hermes_core.records.jsonable import json_line
from hermes_core.records.record import Record, record_schema
from hermes_core.sandbox.guest_client import bundle
from hermes_core.sandbox.local.host import remedies
from hermes_core.sandbox.local.launch import probe_host

ROOT = Path(__file__).resolve().parents[1]

KEPT = ("HERMES_REQUIRE", "HERMES_TEST_PYTHONS", "HERMES_SWE_TASKS", "HERMES_TEST_SSH_CONFIG", "HERMES_VLLM")
"""The variables of ours that tests do see: what has to be there, and where it is."""

hypothesis.settings.register_profile("default", max_examples=5, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=15, deadline=None)
hypothesis.settings.load_profile("default")  # `--hypothesis-profile` comes after it

gc.disable()  # until all tests are collected: they stay to the end, and each round would go through all of them again

RECORD = jsonschema.Draft202012Validator(record_schema())
"""What every record of a test has to fit."""

LOOP_STALL_S = 0.05
"""The longest that the event loop may be kept from running, unless the test says otherwise."""


# A script's background jobs ignore the one, and what `nohup` starts the other. So would the programs of the tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

LEAK_GRACE_S = 20.0
"""How long after a test what it started may take to end."""


ELSEWHERE = {
    "docker_images",
    "ssh_config",
    "make_server",
    "session_emulator",
    "own_emulator",
    "exact_extra",
    "openenv_extra",
    "atropos_extra",
    "torch_extra",
    "with_torch",
    "datasets_extra",
    "axolotl_extra",
    "tinker_extra",
    "trl_extra",
    "verifiers_extra",
}
"""Fixtures that need a server, Modal's emulated one included, or a heavy extra: what uses them is `full`."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which selects by mark
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
        if ELSEWHERE.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
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


def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of tests, which all stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Twice as many as there are processors: tests wait about as long as they compute."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have measured: `record_property("figure", "how many of what")`."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    for name, value in (each for report in reports for each in report.user_properties):
        if name == "figure":
            terminalreporter.write_line(str(value))


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


def _required() -> set[str]:
    return set(re.split(r"[,\s]+", os.environ.get("HERMES_REQUIRE", "")))


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
    if report.failed and (reason := no_namespaces()) and "local" not in _required():
        said = [report.longreprtext, *(text for _, text in report.sections)]
        if _refusals or any(map(REFUSED.search, said)):
            report.outcome = "skipped"
            report.longrepr = (str(Path(__file__)), None, f"Skipped: local: {reason}")
    if call.when == "teardown":
        _refusals.clear()
    return report


def pytest_configure(config: pytest.Config) -> None:
    if no_namespaces():
        _note_refusals()
    config.addinivalue_line("markers", "entry_points: loads the plugins that are installed here")
    config.addinivalue_line(
        "markers", "few(n, m): its first n cases are run by `make test`, m more (or all others) are `full`"
    )
    config.addinivalue_line("markers", "loop_stall(seconds): how long the event loop may stall under `loop_lag`")


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the developer's settings, keys or installed plugins (unless marked `entry_points`)."""
    for name in os.environ:
        if name.startswith(("HERMES_", "OPENAI_")) and name not in KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HERMES_ENV_FILE", "")
    if request.node.get_closest_marker("entry_points") is None:
        monkeypatch.setenv("HERMES_PLUGINS", "")


CHECKED_RECORDS = 100
"""The number of records of one test that are checked against the schema."""


@pytest.fixture(autouse=True)
def _records_fit_the_schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every record that a test makes fits the published schema. It is checked after the test, which may measure."""
    made: list[dict[str, Any]] = []
    to_json = Record.to_json

    def noted(record: Record) -> dict[str, Any]:
        value = to_json(record)
        if len(made) < CHECKED_RECORDS:
            made.append(value)
        return value

    monkeypatch.setattr(Record, "to_json", noted)
    yield
    for value in made:
        for error in RECORD.iter_errors(_shortened(json.loads(json_line(value)))):
            pytest.fail(f"a record does not fit its schema: {error.json_path}: {error.message}", pytrace=False)


def _shortened(value: Any) -> Any:
    """The value, of whose long lists of numbers only what their items differ in is left: a schema has looked at each of
    100,000 tokens for minutes."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > 100 and {type(item) for item in value} <= {int, float}:
        return [min(value), max(value), *{type(item): item for item in value}.values()]
    return [_shortened(item) for item in value]


@pytest.fixture(scope="session")
def times(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`times(some, many)`: how often to try what happens by chance, in `make test` and in `make test-all`."""
    thorough = request.config.getoption("--hypothesis-profile") == "thorough"
    return lambda some, many: many if thorough else some


@pytest.fixture(scope="session")
def require() -> Callable[[str, str | None], None]:
    """`require("docker", reason)`: skip with the reason, or fail if HERMES_REQUIRE names it; None means it is there."""
    named = _required()

    def check(name: str, missing: str | None) -> None:
        if missing is None:
            return
        if name in named:
            pytest.fail(f"HERMES_REQUIRE names {name}, but {missing}", pytrace=False)
        pytest.skip(f"{name}: {missing}")

    return check


@pytest.fixture(scope="session")
def isolates(require: Callable[[str, str | None], None]) -> None:
    """Namespaces can be made here: local sandboxes have a root of their own."""
    require("local", no_namespaces())


@pytest.fixture(scope="session")
def swe_tasks(require: Callable[[str, str | None], None]) -> Path:
    """The folder of real SWE-smith tasks: HERMES_SWE_TASKS, or `shared/swe_tasks` beside the checkout."""
    folder = Path(os.environ.get("HERMES_SWE_TASKS") or ROOT.parent / "shared" / "swe_tasks")
    there = (folder / "tasks.jsonl").is_file()
    require("swe_tasks", None if there else f"{folder} has no tasks.jsonl; set HERMES_SWE_TASKS")
    return folder


@pytest.fixture(scope="session")
def docker_images(require: Callable[[str, str | None], None]) -> tuple[str, str]:
    """The images that `.ci/docker` builds, with Python and with busybox alone, on a daemon that answers."""
    images = ("hermes-test-python:bookworm", "hermes-test-busybox:latest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the SDK loses the socket that it could not connect
        missing = _missing_of_docker(images)
        gc.collect()
    require("docker", missing)
    return images


def _missing_of_docker(images: Iterable[str]) -> str | None:
    import docker.errors

    with contextlib.closing(docker.APIClient(**docker.utils.kwargs_from_env(), version="1.41", timeout=20)) as api:
        try:
            for image in images:
                api.inspect_image(image)
        except docker.errors.NotFound:
            return f"the daemon has no image {image}; `.ci/docker` builds it"
        except (docker.errors.DockerException, OSError) as error:  # requests' errors are OSErrors
            return f"no daemon answers ({error}); `.ci/docker` starts one on Debian"
    return None


@pytest.fixture(scope="session")
def ssh_config(require: Callable[[str, str | None], None]) -> str:
    """A configuration file of OpenSSH's that names the server `hermes-test`."""
    named = os.environ.get("HERMES_TEST_SSH_CONFIG", "")
    require("ssh", None if named else 'HERMES_TEST_SSH_CONFIG is not set; `eval "$(.ci/ssh)"` as root sets it')
    return named


@pytest.fixture(scope="session")
def exact_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where the extra is not installed; imports it where it is, whatever it warns of."""
    missing = [name for name in ("transformers", "jinja2", "aiohttp") if importlib.util.find_spec(name) is None]
    require("exact", f"{', '.join(missing)} not installed; `make setup EXTRAS=exact`" if missing else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer  # noqa: F401


@pytest.fixture(scope="session")
def torch_extra(exact_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where there is no torch for the tiny model."""
    there = importlib.util.find_spec("torch") is not None
    require("torch", None if there else 'torch is not installed; `make setup EXTRAS="exact torch"`')
    import torch

    torch.set_num_threads(1)  # the machine has others to serve


@pytest.fixture(scope="session")
def tokenizers(exact_extra: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The tokenizer of a chat format; its folder is `name_or_path`."""
    from transformers import AutoTokenizer

    from hermes_core.runtime import Runtime
    from hermes_core.settings import Settings
    from hermes_core.testing.tiny_model.folder import make_tokenizer

    made: dict[str, Any] = {}
    tools = Runtime(Settings(), load_entry_points=False).tools
    schemas = tools.schemas(("terminal", "process", "read_file", "write_file", "patch", "search_files"))
    texts = [json.dumps(schemas), json.dumps(schemas, indent=4)]  # so that prompts are short, as in real models

    def of(form: str) -> Any:
        if form not in made:
            folder = tmp_path_factory.mktemp(form)
            make_tokenizer(folder, form, texts, vocabulary=3000)
            made[form] = AutoTokenizer.from_pretrained(str(folder))
        return made[form]

    return of


@pytest.fixture
def change_guest() -> Iterator[Callable[[str, str], None]]:
    """`change_guest(old, new)`: in the test, guests are started with this in their sources replaced."""
    read = Path.read_text

    def change(old: str, new: str) -> None:
        def changed(path: Path, *encoding: str) -> str:
            return read(path, *encoding).replace(old, new)

        sandbox = Path(bundle.__file__).parents[1]
        assert any(old in read(path) for sent in ("guest", "linux") for path in (sandbox / sent).glob("*.py"))
        patch.setattr(Path, "read_text", changed)
        patch.setattr(bundle, "_compiled", lambda *_: None)
        bundle.payload.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        yield change
    bundle.payload.cache_clear()


@pytest.fixture
async def loop_lag(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fails the test if its event loop stalled for more than 50 ms; `loop_stall(seconds)` is another limit.

    What counts is processor time of the loop's thread, and time in which it was blocked: not time in which the
    machine was busy with something else.
    """
    marker = request.node.get_closest_marker("loop_stall")
    limit = marker.args[0] if marker else LOOP_STALL_S
    stalls: list[float] = []
    witness = _Witness()

    async def watch() -> None:
        while True:
            began, worked, late = time.monotonic(), time.thread_time(), witness.late_s
            await asyncio.sleep(_Witness.INTERVAL_S)
            overrun = time.monotonic() - began - _Witness.INTERVAL_S
            stall = max(min(overrun, time.thread_time() - worked), overrun - (witness.late_s - late))
            if stall > limit:
                stalls.append(stall)

    witness.start()
    watcher = asyncio.create_task(watch())
    yield
    await asyncio.sleep(0)
    watcher.cancel()
    await asyncio.wait([watcher])
    witness.stop()
    if stalls:
        pytest.fail(f"the event loop stalled {len(stalls)} times, {max(stalls) * 1000:.0f} ms at worst", pytrace=False)


class _Witness(threading.Thread):
    """A thread that only sleeps: when it wakes late, the machine was busy, whatever the event loop did."""

    INTERVAL_S = 0.005

    def __init__(self) -> None:
        super().__init__(name="loop_lag witness", daemon=True)
        self.late_s = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(self.INTERVAL_S)
            self.late_s += max(0.0, time.monotonic() - began - self.INTERVAL_S)

    def stop(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fails the test if processes, descriptors or threads are left a few seconds after it.

    Orphans are adopted for the time of the test, so a process that was left by a dead parent is seen as well.
    """
    before = _Census.take()
    _adopt_orphans(True)
    try:
        yield
        deadline = time.monotonic() + LEAK_GRACE_S
        while (left := _Census.take(before.processes).beyond(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        _adopt_orphans(False)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@dataclass(frozen=True)
class _Census:
    """What this process holds: descendants by (pid, start time), descriptors, and threads."""

    processes: dict[tuple[int, str], str]
    descriptors: dict[int, str]
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls, known: Collection[tuple[int, str]] = ()) -> _Census:
        """What is here now, but for the `known` processes and what is below them: another fixture's, still at work."""
        return cls(_descendants(known), _descriptors(), frozenset(threading.enumerate()))

    def beyond(self, before: _Census) -> list[str]:
        """What is here and was not there before. The loop's own worker threads end with the loop."""
        processes = [f"process {pid} {command}" for (pid, _), command in self.processes.items()]
        descriptors = [
            f"descriptor {n} {what}" for n, what in self.descriptors.items() if before.descriptors.get(n) != what
        ]
        started = [t for t in self.threads - before.threads if not isinstance(t, _Witness)]
        threads = [f"thread {t.name}" for t in started if not t.name.startswith("asyncio_")]
        return processes + descriptors + threads


def _descendants(known: Collection[tuple[int, str]] = ()) -> dict[tuple[int, str], str]:
    """Every process below this one that has not ended, by pid and start time, with its command line."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        state, parent, start = rest.split()[0], int(rest.split()[1]), rest.split()[19]
        if state != "Z":
            children.setdefault(parent, []).append((int(entry.name), start, command or name))
    found, queue = {}, [os.getpid()]
    while queue:
        for pid, start, command in children.get(queue.pop(), []):
            if (pid, start) in known:
                continue
            found[pid, start] = command[:200]
            queue.append(pid)
    return found


def _descriptors() -> dict[int, str]:
    """The open descriptors and what they lead to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue  # the one of this very listing
    return found


def _adopt_orphans(adopt: bool) -> None:
    """Whether processes below this one whose parent ends become this one's children."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(adopt), 0, 0, 0)


@pytest.fixture
def sandboxes() -> Iterator[Path]:
    """A folder for local sandboxes. It is not below /tmp, of which slots may have their own."""
    folder = Path(tempfile.mkdtemp(prefix="hermes-test-", dir="/srv" if os.geteuid() == 0 else "/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(
    params=["local user", *(pytest.param(each, marks=pytest.mark.full) for each in ("local namespace", "docker user"))]
)
def where(request: pytest.FixtureRequest) -> dict[str, object]:
    """Options of a run: a backend that can be used here, and the level."""
    from hermes_core.sandbox.contract import Isolation
    from hermes_core.sandbox.local.backend import LocalBackend

    backend, level = request.param.split()
    config = {}
    if backend == "docker":
        config = {"image": request.getfixturevalue("docker_images")[0]}
    elif Isolation.parse(level) not in LocalBackend().capabilities.isolation:
        pytest.skip(f"this host grants no isolation {level}")
    return {"backend": backend, "isolation": level, "backend_config": config}
