"""The program as its users run it, in this process, with everything watched that it must not start or leave."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hermes_core.cli.main import main
from hermes_core.sandbox.local.backend import LocalBackend

LONGEST = 700
"""Characters that an error may have: two or three lines on a wide terminal, a dataset's long names included."""

NOISE = re.compile(r"Traceback|^  File |asyncio|pydantic|Exception|never awaited|INFO|DEBUG", re.M)


@dataclass(frozen=True)
class Outcome:
    """What a run of the program came to."""

    code: int
    out: str
    err: str
    sandboxes: int
    """How many it asked the local backend for."""

    @property
    def errors(self) -> list[str]:
        """The lines on standard error that say what is wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]

    def is_refused(self, *words: str) -> None:
        """Wrong use: exit code 2, one line that says what is wrong and what to do, and nothing was begun."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == ""
        assert self.sandboxes == 0
        self.says(*words)

    def says(self, *words: str) -> None:
        """The one error has these words in it, in plain text and of reasonable length."""
        [error] = self.errors
        for word in words:
            assert word in error, error
        assert len(error) <= LONGEST, error
        self.has_no_noise()

    def has_no_noise(self) -> None:
        assert not NOISE.search(self.err), self.err
        assert not NOISE.search(self.out), self.out


@pytest.fixture
def hermes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    """`hermes("rollout", "tasks", …)` in a directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    created = _counted(monkeypatch)
    logger = logging.getLogger("hermes_core")
    handlers, level = logger.handlers, logger.level

    def run(*arguments: object, **environment: str | None) -> Outcome:
        created.clear()
        done = CliRunner().invoke(main, [str(argument) for argument in arguments], env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout, done.stderr, len(created))

    yield run
    logger.handlers, logger.level = handlers, level


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every sandbox that is asked for from now on."""
    created: list[Any] = []
    create = LocalBackend.create

    async def noted(self: LocalBackend, spec: Any) -> Any:
        created.append(spec)
        return await create(self, spec)

    monkeypatch.setattr(LocalBackend, "create", noted)
    return created


GOOD = {"id": "good", "prompt": "p", "check": "test -f a", "solution": "touch a"}


@pytest.fixture
def tasks(tmp_path: Path) -> Callable[..., str]:
    """`tasks(row, …)`: the option that names a file of these rows (one good task if there are none)."""

    def write(*rows: Any, name: str = "tasks.jsonl") -> str:
        lines = (json.dumps({"prompt": "p", **row}) + "\n" for row in rows or [GOOD])
        (tmp_path / name).write_text("".join(lines))
        return f"--env.dataset_name={name}"

    return write


@pytest.fixture(scope="session")
def level() -> list[str]:
    """The isolation that every host gives the one who runs the tests."""
    return ["--isolation", "user"] if os.geteuid() == 0 else ["--isolation", "shared", "--allow-unisolated"]


@pytest.fixture
def records(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`records()`: those in the folder `out`."""

    def read(folder: str = "out", file: str = "trajectories.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / folder / file).read_bytes().splitlines()]

    return read
