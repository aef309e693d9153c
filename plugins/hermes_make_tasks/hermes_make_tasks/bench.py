"""Runs a repository's tests in slots, with and without a bug, as the verification of `swe-smith` runs them."""

from __future__ import annotations

import asyncio
import inspect
import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from hermes_swe_smith.dependencies import prepare_environment
from hermes_swe_smith.doctests import docstring
from hermes_swe_smith.names import test_file
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.rows import SweTask
from hermes_swe_smith.verify import run_tests
from hermes_swe_smith.workspace import (
    OPERATION_TIMEOUT_S,
    PreparedRepository,
    TreeUnderTest,
    operate,
    prepare_programs,
    prepare_repository,
    track,
)

from hermes_core import CommandResult, DatasetError, NewSandbox, PytestReport, SetupFailed, SlotCommands, SlotHandle
from hermes_make_tasks import example_run, survey
from hermes_make_tasks.examples import ExampleRun, FailedTest
from hermes_make_tasks.project import File
from hermes_make_tasks.sources import Unreadable, parse_source
from hermes_make_tasks.statement import plain

EXAMPLE_TIMEOUT_S = 30.0
_LOADER = "import sys; exec(compile(sys.argv[1], '<given>', 'exec'), {'__name__': '__main__'})"
_ANSWER_LIMIT = 64 << 20
_ID_CHARS = 1000
"""The longest node id that is used. A row holds all ids of a repository."""


@dataclass(frozen=True)
class Ground:
    """The files of a sandbox that the tests need."""

    repository: PreparedRepository
    environment: TestEnvironment
    checkout: str
    """The clean tree, which slots can read."""


@dataclass(frozen=True)
class SurveyedTest:
    """The survey's findings about one test."""

    node_id: str
    outcome: str
    seconds: float
    lines: Mapping[str, int]
    """The lines that the test ran, by file: bit n stands for line n."""

    def ran(self, path: str, lines: tuple[int, int]) -> bool:
        """Return whether the test ran any line from the first to the last of `lines`."""
        first, last = lines
        return bool(self.lines.get(path, 0) >> first & ((1 << (last - first + 1)) - 1))


@dataclass(frozen=True)
class Surveyed:
    """The tests of a repository, and the lines that run before the first test."""

    tests: tuple[SurveyedTest, ...]
    importing: SurveyedTest
    """The lines that run while the tests are collected."""
    broken: tuple[tuple[str, str], ...] = ()
    """Files that can't be collected, each with the end of the reason."""


class Bench:
    """Tests one repository at one commit.

    Args:
        task: a task of the repository, without tests and patch.
        source: the repository, and the settings with which its tests are run.
        variables: variables of git and pip.
    """

    def __init__(
        self, task: SweTask, source: RepositorySource, variables: Mapping[str, str], install_timeout_s: float
    ) -> None:
        self.task = task
        self.source = source
        self.files: Mapping[str, File] = {}
        self._variables = variables
        self._install_timeout_s = install_timeout_s
        self._known: dict[tuple[str, str], PreparedRepository] = {}
        self._examples: dict[str, tuple[str, int]] = {}

    async def repository(self, site: SlotHandle | NewSandbox) -> PreparedRepository:
        """Return the repository on the site's sandbox."""
        return await prepare_repository(
            site, self.task, self.source, self._variables, self._install_timeout_s, known=self._known
        )

    async def ground(self, site: SlotHandle | NewSandbox) -> Ground:
        """Return the files that the tests need on the site's sandbox. They are made once per sandbox."""
        repository = await self.repository(site)
        environment = await prepare_environment(site, self.source, repository, self._variables, self._install_timeout_s)
        programs = await prepare_programs(site)

        async def build(commands: SlotCommands, directory: str) -> None:
            await operate(commands, programs, "check_out", {"repo": repository.git_dir, "to": f"{directory}/tree"})

        directory = await site.prepare(f"make-tasks-tree-{self.source.key}", build)
        return Ground(repository, environment, f"{directory}/tree")

    def know_doctests(self, node_ids: Iterable[str]) -> None:
        """Read the docstrings of the tests that are doctests of modules, in the same way as the verification."""
        task = replace(self.task, fail_to_pass=tuple(node_ids))
        for path, names in task.doctests.items():
            try:
                module = parse_source(self.files[path].data.decode("utf-8-sig"), path)
            except (Unreadable, UnicodeDecodeError, KeyError):
                continue
            for name in names:
                if (found := docstring(module, path, name)) is not None:
                    self._examples[f"{path}::{name}"] = found

    def test_files(self, node_ids: Iterable[str]) -> set[str]:
        """Return the files of these tests, except for sources whose only tests are doctests with known docstrings."""
        return {test_file(node_id) for node_id in node_ids if node_id not in self._examples}

    async def lay_out(self, slot: SlotHandle, changes: Mapping[str, bytes]) -> Ground:
        """Put the repository into an empty slot, with new contents of some files."""
        ground = await self.ground(slot)
        directory = self.task.directory
        done = await slot.commands.run(["cp", "-RP", ground.checkout, directory], timeout_s=OPERATION_TIMEOUT_S)
        if not done.ok:
            raise SetupFailed(f"the repository can't be copied into the slot: {done.error_text.strip()[-500:]}")
        for path, data in changes.items():
            mode = 0o755 if self.files[path].program else 0o644
            await slot.commands.write_file(f"{directory}/{path}", data, mode=mode)
        await track(slot.commands, directory)
        return ground

    async def run(
        self, slot: SlotHandle, changes: Mapping[str, bytes], node_ids: Sequence[str], timeout_s: float
    ) -> PytestReport:
        """Run some tests in the slot, which must be empty.

        Raises:
            VerifierError: pytest can't be started.
            Disturbed: pytest can't be started, because a process was killed.
        """
        ground = await self.lay_out(slot, changes)
        task = replace(self.task, fail_to_pass=tuple(node_ids))
        examples = {node_id: self._examples[node_id] for node_id in node_ids if node_id in self._examples}
        tested = TreeUnderTest("", "", "", (), (), examples)
        async with slot.processor():
            checked = await run_tests(slot, task, tested, self.source, ground.environment, timeout_s=timeout_s)
        return checked.report

    async def survey(self, slot: SlotHandle, files: Sequence[str], tests: Sequence[str], timeout_s: float) -> Surveyed:
        """Find all tests, and the lines of some files that each test runs.

        Args:
            tests: paths to search for tests; empty means the paths of the project's configuration.

        Raises:
            DatasetError: there are no tests, or the run of the tests did not come to its end.
        """
        done = await self._survey(slot, {}, files, tests, timeout_s)
        said = done.error_text.strip()[-2000:]
        if done.timed_out:
            raise DatasetError(f"the tests took longer than {timeout_s:g} s", hint="choose some with --tests")
        surveyed = await asyncio.to_thread(_read_survey, done.stdout, files)
        if not surveyed.tests:
            reasons = [f"{name}: {text[-800:]}" for name, text in surveyed.broken[:2]]
            raise DatasetError(
                f"pytest found no tests: {plain('; '.join(reasons) or said or 'it said nothing')}",
                hint="name what they need with --requirements, where they are with --tests, or the command with "
                "--test-command",
            )
        return surveyed

    async def failures(
        self, slot: SlotHandle, changes: Mapping[str, bytes], tests: Sequence[str], timeout_s: float
    ) -> dict[str, FailedTest]:
        """Run tests in an empty slot, and return the place and the cause of each failure, by node id."""
        done = await self._survey(slot, changes, (), tests, timeout_s)
        return await asyncio.to_thread(_failures, done.stdout)

    async def show(self, slot: SlotHandle, code: str, *, clean: bool) -> ExampleRun | None:
        """Run an example in the slot's checkout, or in the clean checkout. Return None if it gives no answer."""
        ground = await self.ground(slot)
        root = ground.checkout if clean else self._root(slot)
        asked = {"import_path": self._import_path(ground, root), "code": code}
        done = await self._run_source(slot, ground, example_run, asked, timeout_s=EXAMPLE_TIMEOUT_S, cwd=root)
        try:
            value = json.loads(done.stdout.strip().rsplit(b"\n", 1)[-1])
            values = tuple(plain(str(value["values"][number])) for number in sorted(value["values"]))
            ran = ExampleRun(plain(str(value["error"])), int(value["line"]), values)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None
        return None if slot.commands.workspace_dir in f"{ran}" or ground.checkout in f"{ran}" else ran

    def _root(self, slot: SlotHandle) -> str:
        return posixpath.join(slot.commands.workspace_dir, self.task.directory)

    def _import_path(self, ground: Ground, root: str) -> list[str]:
        path = [posixpath.normpath(posixpath.join(root, part)) for part in ground.environment.pythonpath]
        return list(dict.fromkeys([*([root] if self.source.command.checkout_on_path else []), *path]))

    async def _survey(
        self,
        slot: SlotHandle,
        changes: Mapping[str, bytes],
        files: Sequence[str],
        tests: Sequence[str],
        timeout_s: float,
    ) -> CommandResult:
        ground = await self.lay_out(slot, changes)
        root = self._root(slot)
        asked: dict[str, Any] = {
            "root": root,
            "import_path": self._import_path(ground, root),
            "args": list(self.source.command.args),
            "env": dict(self.source.command.env or {}),
            "tests": list(tests),
            "files": list(files),
        }
        return await self._run_source(slot, ground, survey, asked, timeout_s=timeout_s)

    async def _run_source(
        self,
        slot: SlotHandle,
        ground: Ground,
        program: ModuleType,
        asked: Mapping[str, Any],
        *,
        timeout_s: float,
        cwd: str | None = None,
    ) -> CommandResult:
        async with slot.processor():
            return await slot.commands.run(
                [ground.environment.python, "-s", "-B", "-c", _LOADER, inspect.getsource(program)],
                stdin=json.dumps(asked).encode(),
                env={"PYTHONHASHSEED": "0"},
                cwd=cwd,
                timeout_s=timeout_s,
                output_limit=_ANSWER_LIMIT,
            )


def _read_survey(output: bytes, files: Sequence[str]) -> Surveyed:
    """Read the output of the survey. Lines of another form are ignored: the project's code may have printed them."""
    names: list[str] = []
    about: dict[int, SurveyedTest] = {}
    broken: list[tuple[str, str]] = []
    for line in output.split(b"\n"):
        try:
            event = json.loads(line)
            if "tests" in event:
                names = [each for each in event["tests"] if isinstance(each, str)]
            elif "broken" in event:
                broken.append((str(event["broken"])[:500], str(event["text"])[-2000:]))
            elif "test" in event:
                number = int(event["test"])
                lines = {files[int(index)]: int(bits, 16) for index, bits in event["lines"].items()}
                name = names[number] if number >= 0 else ""
                earlier = about.get(number)
                if earlier is not None:
                    lines = {path: lines.get(path, 0) | earlier.lines.get(path, 0) for path in {*lines, *earlier.lines}}
                about[number] = SurveyedTest(name, str(event["outcome"]), float(event["seconds"]), lines)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            continue
    nothing = SurveyedTest("", "", 0.0, {})
    tests = tuple(about[number] for number in range(len(names)) if number in about and _usable(names[number]))
    return Surveyed(tests, about.get(survey.COLLECTION, nothing), tuple(broken[:20]))


def _usable(node_id: str) -> bool:
    """Return whether a row may name the test: `swe-smith` takes only tests of `.py` files inside the checkout."""
    path = test_file(node_id)
    inside = path.endswith(".py") and not path.startswith("/") and ".." not in path.split("/")
    try:
        node_id.encode()
    except UnicodeEncodeError:
        return False
    return inside and "\0" not in path and "\n" not in path and len(node_id) <= _ID_CHARS


def _failures(output: bytes) -> dict[str, FailedTest]:
    found = {}
    for line in output.split(b"\n"):
        try:
            event = json.loads(line)
            values = {str(name): plain(str(value)) for name, value in event["values"].items()}
            told = [plain(str(event[key])) for key in ("error", "session")]
            found[event["failed"]] = FailedTest(str(event["failed"]), int(event["line"]), values, *told)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found
