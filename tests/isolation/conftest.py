"""Drivers in processes of their own, run by root and by an ordinary user, each with one sandbox of several slots."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hermes_core
from tests.support.accounts import AGAIN, interpreter_for_others

ORDINARY_UID = 54_322
PROGRAM = Path(__file__).with_name("driver_process.py")
ANSWER_S = 60.0
KEY_OF_AN_ENDPOINT = "key-in-the-drivers-environment"


@dataclass(frozen=True)
class Ran:
    """How a command in a slot ended."""

    status: int
    out: str
    err: str
    timed_out: bool
    spool: str | None


class Refused(Exception):
    """What the driver raised; `kind` is the name of its class."""

    def __init__(self, message: str, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.code = code


@dataclass(frozen=True)
class Account:
    """A user that drivers run as. `folder` is the user's, and open to all: a home, a data set, state directories."""

    name: str
    uid: int
    python: str
    path: str
    folder: Path

    @property
    def secrets(self) -> list[Path]:
        """The files that no slot may read."""
        names = ("home/.ssh/id_ed25519", "home/.config/token", "home/.env", "dataset/tasks.jsonl")
        return [self.folder / name for name in names]

    def furnish(self) -> None:
        """Make the home, which is private, and the data set, which is not."""
        for path in self.secrets:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"secret of {path.name}")
        self.give(self.folder)
        (self.folder / "home").chmod(0o700)

    def give(self, path: Path) -> None:
        """Make the account the owner of a directory and all in it."""
        for each in (path, *path.rglob("*")):
            os.chown(each, self.uid, self.uid)

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start the account's interpreter."""
        home = self.folder / "home"
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": self.path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(home),
            "HERMES_ENV_FILE": "",
            "OPENAI_API_KEY": KEY_OF_AN_ENDPOINT,
        }
        user = {} if self.uid == os.geteuid() else {"user": self.uid, "group": self.uid, "extra_groups": []}
        return subprocess.Popen(
            [self.python, *arguments], env=environment, cwd=home, start_new_session=True, **user, **options
        )


class Driver:
    """A driver process and its one sandbox. Its methods raise `Refused` for what it raises."""

    def __init__(self, account: Account, level: str, config: dict[str, Any], state_dir: Path) -> None:
        self.account = account
        self.level = level
        self.state_dir = state_dir
        self.leases: dict[str, dict[str, str]] = {}
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer = b""
        words = [str(PROGRAM), str(state_dir), level, json.dumps(config)]
        self.process = account.popen(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.facts = self._line()
        if "error" in self.facts:
            self.close()
            raise Refused(**{("message" if key == "error" else key): value for key, value in self.facts.items()})

    def close(self) -> None:
        """End the driver, and with it the sandbox; everything is gone when this returns. Idempotent."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(ANSWER_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    @property
    def granted(self) -> str:
        """The level that the slots have."""
        return next(iter(self.leases.values()))["isolation"]

    def acquire(self, *slots: str) -> None:
        """Lease slots under these names, in order."""
        for slot in slots:
            self.leases[slot] = self.call("acquire", slot=slot)

    def reset(self, slot: str) -> None:
        """End the lease, and take another one of a slot that nobody has."""
        self.call("release", slot=slot)
        self.acquire(slot)

    def workspace(self, slot: str) -> str:
        return self.leases[slot]["workspace"]

    def directory(self, slot: str = "a") -> Path:
        """The sandbox's directory on the host."""
        return self.state_dir / self.leases[slot]["sandbox"]

    def call(self, op: str, **arguments: Any) -> Any:
        """Do one request; its result."""
        assert self.process.stdin
        number = next(self._numbers)
        self.process.stdin.write(json.dumps([number, {"op": op, **arguments}]).encode() + b"\n")
        self.process.stdin.flush()
        while number not in self._answers:
            answer = self._line()
            self._answers[answer["number"]] = answer
        answer = self._answers.pop(number)
        if "error" in answer:
            raise Refused(answer["error"], answer["kind"], answer["code"])
        return answer["result"]

    def run(
        self,
        slot: str,
        command: str | Sequence[str],
        *,
        stdin: str | None = None,
        timeout_s: float = 20.0,
        spool: bool = False,
    ) -> Ran:
        """Run a command in the slot of that name."""
        request = {"slot": slot, "command": command, "stdin": stdin, "timeout_s": timeout_s, "spool": spool}
        return Ran(**self.call("run", **request))

    def python(self, slot: str, program: str, *arguments: object) -> Any:
        """What a Python program in the slot prints as JSON; it has to succeed."""
        ran = self.run(slot, ["python3", "-I", "-S", "-c", program, *map(str, arguments)])
        assert ran.status == 0, ran
        return json.loads(ran.out)

    def until(self, slot: str, command: str, *, limit_s: float = 10.0) -> str:
        """Run a shell command until it succeeds; its output."""
        deadline = time.monotonic() + limit_s
        while (ran := self.run(slot, command)).status != 0:
            assert time.monotonic() < deadline, ran
            time.sleep(0.02)
        return ran.out.strip()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout
        deadline = time.monotonic() + ANSWER_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                assert selector.select(max(0.0, deadline - time.monotonic())), "the driver does not answer"
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, f"the driver ended with status {self.process.wait()}"
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Drivers:
    """Starts drivers of one account."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._shared: dict[tuple[str, str], Driver] = {}

    @contextlib.contextmanager
    def started(self, level: str, *slots: str, state_dir: Path | None = None, **config: Any) -> Iterator[Driver]:
        """A driver with one sandbox and these slots leased, ended after the block."""
        driver = self._start(level, slots, state_dir, config)
        try:
            yield driver
        finally:
            driver.close()
            assert list(driver.state_dir.iterdir()) == []

    def shared(self, level: str, **config: Any) -> Driver:
        """The one driver of that level and settings, with slots `a` and `b`: for tests that leave both as they were."""
        key = (level, json.dumps(config, sort_keys=True))
        if key not in self._shared:
            self._shared[key] = self._start(level, ("a", "b"), None, config)
        return self._shared[key]

    def close(self) -> None:
        for driver in self._shared.values():
            driver.close()

    def _start(self, level: str, slots: Sequence[str], state_dir: Path | None, config: dict[str, Any]) -> Driver:
        place = state_dir or Path(tempfile.mkdtemp(prefix="state-", dir=self.account.folder))
        place.chmod(0o711)
        self.account.give(place)
        driver = Driver(self.account, level, {"slots_per_sandbox": 4, "max_sandboxes": 1, **config}, place)
        try:
            driver.acquire(*slots)
        except BaseException:
            driver.close()
            raise
        return driver


@pytest.fixture(scope="session")
def _drivers_by_account(require: Callable[[str, str | None], None]) -> Iterator[Callable[[str], Drivers]]:
    found: dict[str, Drivers] = {}

    def drivers(name: str) -> Drivers:
        if name not in found:
            folder = Path(tempfile.mkdtemp(prefix="hermes-isolation-", dir="/tmp"))
            folders.append(folder)
            folder.chmod(0o755)
            account = _account(name, folder, require)
            account.furnish()
            found[name] = Drivers(account)
        return found[name]

    folders: list[Path] = []
    try:
        yield drivers
    finally:
        for each in found.values():
            each.close()
        left = [path for folder in folders for path in folder.glob("state-*/*")]
        for folder in folders:
            shutil.rmtree(folder)
        assert left == []


@pytest.fixture(params=["root", pytest.param("ordinary", marks=AGAIN)])
def drivers(request: pytest.FixtureRequest, _drivers_by_account: Callable[[str], Drivers]) -> Drivers:
    """Drivers run by root, if the tests are, and by an ordinary user."""
    return _drivers_by_account(request.param)


@pytest.fixture
def root(_drivers_by_account: Callable[[str], Drivers]) -> Drivers:
    """Drivers run by root: the only ones that give slots users of their own."""
    return _drivers_by_account("root")


@pytest.fixture
def ordinary(_drivers_by_account: Callable[[str], Drivers]) -> Drivers:
    """Drivers run by an ordinary user."""
    return _drivers_by_account("ordinary")


@pytest.fixture(
    params=[
        "root-user",
        pytest.param("root-namespace", marks=pytest.mark.full),
        pytest.param("ordinary-user", marks=AGAIN),
    ]
)
def shared(request: pytest.FixtureRequest, _drivers_by_account: Callable[[str], Drivers]) -> Callable[..., Driver]:
    """`Drivers.shared` by way of everything that grants `user` or more, the level left out.

    An ordinary user who asks for `user` gets what one who asks for `namespace` gets.
    """
    account, level = request.param.split("-")
    return functools.partial(_drivers_by_account(account).shared, level)


@pytest.fixture
def pair(shared: Callable[..., Driver]) -> Driver:
    """Slots `a` and `b` of one sandbox."""
    return shared()


@pytest.fixture
def bounded(shared: Callable[..., Driver]) -> Iterator[Driver]:
    """The same with little room and few processes, in a sandbox that has to survive the test."""
    driver = shared(tmpfs_size=16, max_processes=64)
    yield driver
    for slot in ("a", "b"):
        driver.reset(slot)
    assert driver.call("healthy") == 1


# --- who runs the drivers ------------------------------------------------------------------------------------------


def _account(name: str, folder: Path, require: Callable[[str, str | None], None]) -> Account:
    checkout = str(Path(hermes_core.__file__).resolve().parents[1])
    ours = os.pathsep.join([checkout, *filter(None, [os.environ.get("PYTHONPATH")])])
    if name == "root":
        require("root", None if os.geteuid() == 0 else "the tests are not run by root")
        return Account(name, 0, sys.executable, ours, folder)
    if os.geteuid() != 0:
        return Account(name, os.geteuid(), sys.executable, ours, folder)
    python = interpreter_for_others()
    require("ordinary", None if python else f"no Python {sys.version.split()[0]} here is one that other users can run")
    _copy_of_the_code(folder / "checkout")
    return Account(name, ORDINARY_UID, str(python), str(folder / "checkout"), folder)


def _copy_of_the_code(target: Path) -> None:
    """What a driver imports, where every user can read it: our package, and the packages that it imports."""
    code = (
        "import hermes_core.runtime, hermes_core.sandbox.guest_client.client, hermes_core.sandbox.local.backend\n"
        "import hermes_core.tools.slot_tools, runpy, sys\n"
        f"runpy.run_path({str(PROGRAM)!r})\n"
        "for name in {name.split('.')[0] for name in sys.modules}:\n"
        "    file = getattr(sys.modules.get(name), '__file__', None) or ''\n"
        "    if 'site-packages' in file or name == 'hermes_core':\n"
        "        print(file)\n"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    target.mkdir()
    for file in map(Path, listed.stdout.splitlines()):
        source = file.parent if file.name == "__init__.py" else file
        if source.is_dir():
            shutil.copytree(source, target / source.name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(source, target)
    shutil.copy(PROGRAM, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
