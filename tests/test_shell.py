"""`hermes-rl shell`, driven as a person drives it: through a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHELL = [sys.executable, "-m", "hermes_core", "shell"]


class Person:
    """Reads and types."""

    def __init__(self, environ: dict[str, str], *arguments: str) -> None:
        import ptyprocess

        self._program: Any = ptyprocess.PtyProcess.spawn([*SHELL, *arguments], env=environ, dimensions=(24, 80))
        self.seen = b""

    def type(self, keys: str) -> None:
        self.seen = b""
        self._program.write(keys.encode())

    def sees(self, pattern: str) -> re.Match[bytes]:
        """Wait until the pattern has been shown since the last keys."""
        import select

        deadline = time.monotonic() + 60
        while (found := re.search(pattern.encode(), self.seen)) is None:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._program.fd], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self._program.fd, 4096)
                except OSError:
                    found = re.search(pattern.encode(), self.seen)
                    assert found is not None, self.seen
                    return found
        return found

    def resize(self, rows: int, columns: int) -> None:
        self._program.setwinsize(rows, columns)

    def exit_status(self) -> int:
        import select

        while True:
            if select.select([self._program.fd], [], [], 60)[0]:
                try:
                    if not (data := os.read(self._program.fd, 4096)):
                        break
                    self.seen += data
                except OSError:
                    break
        return int(self._program.wait())

    def kill(self) -> None:
        if self._program.isalive():
            self._program.kill(9)
        self._program.close(force=True)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    given = {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "", "HERMES_ENV_FILE": "", "TERM": "xterm-256color"}
    return {**kept, **given, "HERMES_OWNER": f"shell-{os.getpid()}-{tmp_path.name}"}


@pytest.fixture
def person(environ: dict[str, str]) -> Iterator[Any]:
    pytest.importorskip("ptyprocess", reason="ptyprocess: pip install 'hermes-rl[pty]'")
    persons: list[Person] = []

    def new(*arguments: str) -> Person:
        persons.append(Person(environ, *arguments))
        return persons[-1]

    yield new
    for each in persons:
        each.kill()
    subprocess.run([sys.executable, "-m", "hermes_core", "reap"], env=environ, check=False, capture_output=True)


def shells(environ: dict[str, str]) -> list[Path]:
    return list(Path(environ["XDG_STATE_HOME"]).glob("hermes-rl/shells/*"))


@pytest.mark.full
def test_a_person_s_shell(person: Any, environ: dict[str, str]) -> None:
    someone = person("--backend", "local")
    someone.sees(r"Ctrl-\] leaves it[\s\S]*\$ ")
    someone.type("stty size; tty; echo $((6 * 7))\r")
    someone.sees(r"24 80\r\n/dev/pts/\d+\r\n42\r\n")
    someone.resize(40, 100)
    time.sleep(0.5)
    someone.type("stty size\r")
    someone.sees(r"40 100\r\n")
    someone.type("sleep 1000\r")
    someone.sees("sleep 1000")
    time.sleep(0.5)
    someone.type("\x03")
    someone.type("echo status $?\r")
    someone.sees(r"status 130\r\n")
    someone.type("exit 5\r")
    assert someone.exit_status() == 5
    assert shells(environ) == []


def test_left_and_come_back_to(person: Any, environ: dict[str, str]) -> None:
    first = person()
    sandbox = first.sees(r"in sandbox (\S+);").group(1).decode()
    first.sees(r"\$ ")
    first.type("word=kept; cat\r")
    first.sees("cat\r\n")
    first.type("\x1d")
    assert first.exit_status() == 0
    assert f"hermes-rl shell {sandbox}".encode() in first.seen
    second = person(sandbox)
    second.sees("Ctrl-")
    second.type("typed\r")
    second.sees("typed\r\ntyped\r\n")
    second.type("\x04")
    second.sees(r"\$ ")
    second.type("echo $word; exit\r")
    second.sees("kept\r\n")
    assert second.exit_status() == 0
    assert shells(environ) == []


@pytest.mark.full
def test_killed_and_come_back_to(person: Any) -> None:
    first = person()
    sandbox = first.sees(r"in sandbox (\S+);").group(1).decode()
    first.sees(r"\$ ")
    first.type("word=kept; echo rea''dy\r")
    first.sees("ready\r\n")
    first.kill()
    second = person(sandbox)
    second.sees(r"ready\r\n[\s\S]*\$ ")
    second.type("echo $word; exit 3\r")
    second.sees("kept\r\n")
    assert second.exit_status() == 3


@pytest.mark.full
def test_the_shells_of_one_owner_leave_each_other_alone(person: Any) -> None:
    neighbour, first = person(), person()
    neighbour.sees(r"Ctrl-\] leaves it[\s\S]*\$ ")
    sandbox = first.sees(r"in sandbox (\S+);").group(1).decode()
    first.sees(r"\$ ")
    first.type("\x1d")
    assert first.exit_status() == 0
    second = person(sandbox)
    second.sees(r"\$ ")
    second.type("exit\r")
    assert second.exit_status() == 0
    neighbour.type("echo he''re; exit 4\r")
    neighbour.sees("here\r\n")
    assert neighbour.exit_status() == 4


@pytest.mark.full
def test_wrong_use(person: Any, environ: dict[str, str]) -> None:
    unknown = person("no-such-sandbox")
    assert unknown.exit_status() == 2 and b"no-such-sandbox" in unknown.seen
    both = person("some-sandbox", "--backend", "local")
    assert both.exit_status() == 2 and b"leave out --backend" in both.seen
    piped = subprocess.run(SHELL, env=environ, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    assert piped.returncode == 2 and b"must be a terminal" in piped.stderr
