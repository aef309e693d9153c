"""Makes the tasks: measures the repository's tests, tries changes in slots, and keeps the changes that are sound tasks.

Changes are tried at the same time, but accepted or rejected in a fixed order. So the same seed gives the same tasks, as
long as the tests behave the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.dependencies import installer_variables
from hermes_swe_smith.guard import Guard
from hermes_swe_smith.repos import RepositorySource, TestCommand
from hermes_swe_smith.rows import SweTask
from hermes_swe_smith.workspace import operate, prepare_programs

from hermes_core import (
    Agent,
    DatasetError,
    Environment,
    HermesError,
    InfraError,
    Item,
    LeasedSlot,
    NewSandbox,
    NoProgress,
    Progress,
    PytestReport,
    RolloutContext,
    RunOptions,
    Runtime,
    SingleFlight,
    SlotHandle,
    TaskSet,
    UsageError,
    hookimpl,
    open_session,
    write_bytes,
)
from hermes_make_tasks import difficulty, examples, requirements, statement
from hermes_make_tasks.bench import Bench, Surveyed, SurveyedTest
from hermes_make_tasks.candidates import COMBINED, BugCandidate, combinations, most_of_a_kind, singles
from hermes_make_tasks.examples import FailedTest
from hermes_make_tasks.folder import PROJECT, REPOS, Folder
from hermes_make_tasks.origin import RepositoryOrigin
from hermes_make_tasks.progress import MakingStanding
from hermes_make_tasks.project import find_needs, import_project, read_sources
from hermes_make_tasks.sources import SourceFile, Unreadable, meaning, read_source, unbound
from hermes_make_tasks.wanted import Wanted

log = logging.getLogger("hermes_core.make_tasks")

T = TypeVar("T")
Record = dict[str, Any]

SURVEY, MEASURED = "survey.json", "measured.json"

KEPT = "kept"
"""The outcome of a change that is a sound task."""

_SINGLES_PER_COMBINATION = 4
_COMBINATIONS_TRIED = 3
_SPARED = 6
"""Number of sound changes that wait for a combination. Further ones become tasks by themselves."""
_EXAMINED = 8
"""Maximum number of broken tests from which examples are made."""
_ATTEMPTS = 3
"""Number of attempts at a piece of work if the infrastructure breaks it off."""
_AHEAD = 2
"""Number of changes that may be under way in addition to one for each slot, while the first of them is undecided."""
_COLLECTED = frozenset({"passed", "failed", "error"})


@dataclass
class MakingOutcome:
    """The outcome of a run."""

    wanted: int
    folder: str
    repo: str = ""
    tasks: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of changes with each outcome."""
    kinds: Counter[str] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)
    stable: int = 0
    """Number of tests that passed every time."""
    flaky: list[str] = field(default_factory=list)
    """Tests that passed only sometimes. They are in no task."""
    unreadable: list[str] = field(default_factory=list)
    """Sources that were left out, each with the reason."""
    broken: list[str] = field(default_factory=list)
    """Test files that can't be collected, each with the end of the reason."""
    elapsed_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Return whether there are as many tasks as wanted."""
        return self.tasks >= self.wanted

    def to_dict(self) -> Record:
        """Return the outcome as JSON values."""
        return {**asdict(self), "complete": self.complete}


class _Making(Environment):
    """The environment for whose sandboxes the session is opened. It has no items, because the work is no rollout."""

    name = "make-tasks"
    scored = False
    hides_files = True

    def __init__(self, prepare: Callable[[NewSandbox], Any]) -> None:
        super().__init__()
        self._prepare = prepare

    def items(self) -> Sequence[Item]:
        """Return nothing."""
        return ()

    def format_prompt(self, item: Item) -> str:
        """Return nothing: there are no items."""
        return ""

    async def prepare_sandbox(self, sandbox: NewSandbox) -> None:
        """Bring the repository and the packages for its tests into a sandbox whose network is cut afterwards."""
        await self._prepare(sandbox)

    @hookimpl
    async def setup_trajectory_workspace(self) -> dict[str, Any]:
        """Do nothing: there are no items."""
        return {}


async def make_tasks(
    runtime: Runtime,
    options: RunOptions,
    wanted: Wanted,
    out: Path,
    *,
    writer: Agent | None = None,
    progress: Progress | None = None,
) -> MakingOutcome:
    """Make tasks, or go on with the tasks in the folder, until there are as many as wanted or nothing is left to try.

    Args:
        writer: writes the problem statements; None takes the template.

    Raises:
        UsageError: an option can't be used here, or the folder has other tasks.
        DatasetError: the repository or its tests can't be used.
        SetupFailed: a package that the tests need can't be installed.
        InfraError: the sandboxes failed again and again.
    """
    _check_level(runtime, options)
    origin = await asyncio.to_thread(RepositoryOrigin.parse, wanted.repo)
    folder = await asyncio.to_thread(Folder, out)
    with folder:
        await asyncio.to_thread(folder.check_same, wanted.configuration())
        display = progress or NoProgress()
        maker = _TaskMaker(folder, wanted, origin, writer, display)
        display.begin(wanted.count, maker.standing)
        try:
            async with (
                maker.working(),
                open_session(runtime, _Making(maker.prepare), "nop", options) as session,
                session.sandboxes() as context,
            ):
                return await maker.make(context, session.room)
        except ExceptionGroup as group:  # raised by work that ran at the same time
            expected = [error for error in group.exceptions if isinstance(error, HermesError)]
            if not expected:
                raise
            raise expected[0] from group
        finally:
            display.end(maker.standing)


def _check_level(runtime: Runtime, options: RunOptions) -> None:
    """Check that a stranger's tests are not run on this host without isolation.

    Raises:
        UsageError: the options ask for that.
    """
    weak = options.isolation == "shared"
    if weak and not options.allow_unisolated and runtime.backend(options.backend).capabilities.on_driver_host:
        raise UsageError(
            "the repository's tests would run on this host, with your rights (isolation 'shared')",
            hint="use --isolation user or namespace, another backend, or --allow-unisolated if you trust them",
        )


class _Trial(NamedTuple):
    """A change in a slot."""

    slot: SlotHandle
    candidate: BugCandidate
    changes: Mapping[str, bytes]
    """The new contents of the changed files."""


class _TaskMaker:
    """One run."""

    def __init__(
        self, folder: Folder, wanted: Wanted, origin: RepositoryOrigin, writer: Agent | None, display: Progress
    ) -> None:
        self.standing = MakingStanding()
        self._folder = folder
        self._wanted = wanted
        self._origin = origin
        self._writer = writer
        self._display = display
        self._tasks = TaskSet()
        self._opening: SingleFlight[Bench] = SingleFlight("reading the repository", keep=True)
        self._variables = installer_variables(SweSmithConfig().installer_variables)
        self._project: Record = {}
        self._sources: dict[str, SourceFile] = {}
        self._surveyed = Surveyed((), SurveyedTest("", "", 0.0, {}))
        self._by_id: dict[str, SurveyedTest] = {}
        self._stable: list[str] = []
        self._full_s = 0.0
        self._done: dict[str, Record] = {}
        self._clean: dict[str, tuple[Any, set[str]]] = {}
        self._shapes: dict[tuple[str, str], str] = {}
        self._used: Counter[str] = Counter()
        self._known: set[frozenset[str] | str] = set()
        self._outcome = MakingOutcome(wanted.count, str(folder.path))

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Keep the files and the thread open while the block runs."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="make-tasks")
        self._attempts = await asyncio.to_thread(self._folder.attempts)
        self._rows = await asyncio.to_thread(self._folder.tasks)
        self._done = {value["key"]: value for value in self._attempts.values}
        self._written = {value["instance_id"] for value in self._rows.values}
        try:
            yield
        finally:
            self._attempts.close()
            self._rows.close()
            self._thread.shutdown(wait=False, cancel_futures=True)
            await self._tasks.aclose()

    async def prepare(self, site: SlotHandle | NewSandbox) -> None:
        """Bring the repository and the packages for its tests to a sandbox."""
        bench = await self._bench(site)
        await bench.ground(site)

    async def make(self, context: RolloutContext, room: int) -> MakingOutcome:
        """Do the whole work in the sandboxes of `context`, at most `room` changes at the same time."""
        self._backend = context.backend
        self._room = room
        self._seats = asyncio.Semaphore(room)
        clock = asyncio.get_running_loop().time
        began = clock()
        self._show("reading the repository")

        async def open_bench(slot: SlotHandle) -> Bench:
            bench = await self._bench(slot)
            self._show("installing what the tests need")
            await bench.ground(slot)
            return bench

        self._tester = await self._with_slot("open", open_bench)
        await self._survey()
        await self._measure()
        self._show("choosing changes")
        chosen = await self._in_thread(self._choose)
        self._show("trying changes")
        async with asyncio.TaskGroup() as group:
            await self._decide(chosen, group)
        outcome = self._outcome
        outcome.elapsed_s = round(clock() - began, 1)
        outcome.repo, outcome.stable = self._project["repo"], len(self._stable)
        self._show("done")
        return outcome

    # ------------------------------------------------------------------ the repository

    async def _bench(self, site: SlotHandle | NewSandbox) -> Bench:
        return await self._opening.get(self._tasks, functools.partial(self._open, site))

    async def _open(self, site: SlotHandle | NewSandbox) -> Bench:
        """Read the repository: from its origin the first time, and later from the bundle in the folder."""
        wanted, limit = self._wanted, self._wanted.install_timeout_s
        project = await asyncio.to_thread(self._folder.read, PROJECT)
        if project is None:
            project = await self._import(site)
        self._project = project
        bench = self._bench_of(project)
        repository = await bench.repository(site)
        bench.files = await read_sources(site, repository)
        self._sources = await self._in_thread(self._read, bench)
        if "pins" not in project:
            imported = project.pop("imported")
            needs = await find_needs(
                site,
                imported,
                repository,
                python=wanted.python,
                wanted=wanted.requirements,
                install=wanted.install,
                env=self._variables,
                timeout_s=limit,
            )
            path = wanted.pythonpath or requirements.import_path(imported.files, list(bench.files))
            project.update(python=needs.python, pins=list(needs.pins), pythonpath=path)
            await asyncio.to_thread(self._write_dataset, project)
            files = bench.files
            bench = self._bench_of(project)
            bench.files = files
        return bench

    async def _import(self, site: SlotHandle | NewSandbox) -> Record:
        wanted = self._wanted
        name = wanted.name or self._origin.name
        imported = await import_project(
            site, self._origin, wanted.ref, name, env=self._variables, timeout_s=wanted.install_timeout_s
        )
        full = f"{name}.{imported.upstream[:8]}"
        bundle = f"repos/{full}.bundle"
        await asyncio.to_thread(write_bytes, self._folder.path / bundle, imported.bundle)
        return {
            "repo": f"swesmith/{full}",
            "upstream": imported.upstream,
            "commit": imported.commit,
            "bundle": bundle,
            "imported": imported,
        }

    def _bench_of(self, project: Mapping[str, Any]) -> Bench:
        bundle = self._folder.path / project["bundle"]
        full = project["repo"].split("/", 1)[1]
        source = RepositorySource(
            key=f"{full}-{project['commit'][:16]}",
            commit=project["commit"],
            bundle=bundle.read_bytes,
            python=project.get("python", ""),
            requirements=tuple(project.get("pins", ())),
            pythonpath=tuple(project.get("pythonpath", ".").split(":")),
            command=TestCommand.parse(self._wanted.test_command),
        )
        task = SweTask(
            instance_id=full,
            repo=project["repo"],
            variant="swe-smith",
            base_commit=None,
            base_is="clean",
            patch="",
            patch_is="bug",
            test_patch="",
            problem_statement="",
            text="",
            fail_to_pass=(),
            pass_to_pass=(),
            image=None,
        )
        return Bench(task, source, self._variables, self._wanted.install_timeout_s)

    def _write_dataset(self, project: Record) -> None:
        """Write all files of the dataset except the tasks."""
        full = project["repo"].split("/", 1)[1]
        listed = "".join(f"{pin}\n" for pin in project["pins"]).encode()
        file = f"requirements/{full}.txt"
        write_bytes(self._folder.path / file, listed)
        entry = {
            "repo": project["repo"],
            "upstream": self._origin.url or self._origin.name,
            "upstream_commit": project["upstream"],
            "bundle": project["bundle"],
            "base_commit": project["commit"],
            "python": project["python"],
            "requirements": project["pins"],
            "requirements_file": file,
            "pythonpath": project["pythonpath"],
            "test_cmd": self._wanted.test_command,
        }
        self._folder.write(REPOS, [entry], beside=True)
        self._folder.write(PROJECT, project)

    def _read(self, bench: Bench) -> dict[str, SourceFile]:
        """Return the sources that can be read, and note the others."""
        found = {}
        for path, file in sorted(bench.files.items()):
            try:
                found[path] = read_source(path, file.data)
            except Unreadable as error:
                self._outcome.unreadable.append(statement.plain(str(error)))
        return found

    # ------------------------------------------------------------------ its tests

    async def _survey(self) -> None:
        """Find the tests, and the lines that each of them runs."""
        self._show("looking at what each test runs")
        noted = await asyncio.to_thread(self._folder.read, SURVEY)
        if noted is None:
            files, tests, limit = list(self._sources), self._wanted.tests, 3 * self._wanted.test_timeout_s
            self._surveyed = await self._with_slot(
                "survey", lambda slot: self._tester.survey(slot, files, tests, limit)
            )
            await asyncio.to_thread(self._folder.write, SURVEY, _dump_survey(self._surveyed))
        else:
            self._surveyed = await asyncio.to_thread(_load_survey, noted)
        self._by_id = {test.node_id: test for test in self._surveyed.tests}
        self._outcome.broken = [f"{name}: {text[-300:]}" for name, text in self._surveyed.broken]
        await self._in_thread(self._tester.know_doctests, self._by_id)

    async def _measure(self) -> None:
        """Find the tests that pass every time."""
        measured = await asyncio.to_thread(self._folder.read, MEASURED)
        if measured is None:
            runs = self._wanted.runs
            self._show(f"running the tests {runs + 1} times")
            first = await self._clean_run(list(self._by_id), 0)
            passing = [name for name in self._by_id if first.passed(name)]
            if not passing:
                raise DatasetError(
                    f"no test passes: {_report_text(first)}",
                    hint="name what they need with --requirements, or the command with --test-command",
                )
            async with asyncio.TaskGroup() as group:
                again = [group.create_task(self._clean_run(passing, n)) for n in range(1, runs + 1)]
            reports = [task.result() for task in again]
            stable = [name for name in passing if all(report.passed(name) for report in reports)]
            ran = [first, *reports]
            flaky = [
                name for name in self._by_id if name not in set(stable) and any(report.passed(name) for report in ran)
            ]
            seconds = max(report.duration_s for report in reports)
            measured = {"stable": stable, "flaky": flaky, "seconds": seconds}
            await asyncio.to_thread(self._folder.write, MEASURED, measured)
        self._stable, self._full_s = measured["stable"], measured["seconds"]
        self._outcome.flaky = measured["flaky"]
        if not self._stable:
            raise DatasetError(
                f"none of {len(self._by_id)} tests passes {self._wanted.runs} times",
                hint="if they disturb each other at the same time, use --concurrency 1 or --isolation namespace",
            )

    async def _clean_run(self, names: Sequence[str], number: int) -> PytestReport:
        limit = self._wanted.test_timeout_s
        report = await self._with_slot(f"clean-{number}", lambda slot: self._tester.run(slot, {}, names, limit))
        if not report.complete:
            raise DatasetError(
                f"the tests do not come to their end ({report.status}): {_report_text(report)}",
                hint="leave out those that end the process with --tests, or raise --test-timeout",
            )
        return report

    # ------------------------------------------------------------------ the changes

    def _choose(self) -> list[BugCandidate]:
        """Return the changes to try. Blocking."""
        tests = self._tester.test_files(self._by_id)
        usable = {
            path: source
            for path, source in self._sources.items()
            if path not in tests and not Guard(tests, {path}).belongs(path)
        }
        self._tests = {**self._sources}
        self._sources = usable
        self._shapes = {(path, each.name): each.shape for path, source in usable.items() for each in source.functions}
        kinds = [kind for kind in self._wanted.kinds if kind not in COMBINED]
        stable = set(self._stable)
        tests_here = tuple(test for test in self._surveyed.tests if test.node_id in stable)
        return singles(
            usable, replace(self._surveyed, tests=tests_here), kinds, self._wanted.seed, self._wanted.candidates
        )

    async def _decide(self, chosen: Sequence[BugCandidate], group: asyncio.TaskGroup) -> None:
        """Make tasks of sound changes, in the order of `chosen`, and of combinations, until there are enough tasks."""
        wanted, waiting = self._wanted, deque(chosen)
        trying: deque[tuple[BugCandidate, asyncio.Task[Record]]] = deque()
        spared: list[BugCandidate] = []
        combined: list[BugCandidate] = []

        def begin() -> None:
            while waiting and len(trying) < self._room + _AHEAD:
                candidate = waiting.popleft()
                if self._is_free(candidate):  # not `_quota`: the kind may be wanted again when the attempt has ended
                    trying.append((candidate, group.create_task(self._attempt(candidate))))

        while self.standing.kept < wanted.count:
            begin()
            if not trying:
                break
            candidate, attempt = trying.popleft()
            record = await attempt
            if not self._is_free(candidate) or not self._quota(candidate.kind):
                continue
            kinds = [kind for kind in wanted.kinds if kind in COMBINED and self._quota(kind)]
            turn = self.standing.kept % (_SINGLES_PER_COMBINATION + 1) == _SINGLES_PER_COMBINATION
            if not kinds or not turn or len(spared) >= _SPARED or record["outcome"] != KEPT:
                if await self._accept(candidate, record):
                    self._used.update(self._shapes[each] for each in candidate.functions)
                continue
            spared.append(candidate)
            self._used.update(self._shapes[each] for each in candidate.functions)
            for new in combinations(spared, kinds, wanted.seed, _COMBINATIONS_TRIED, but=combined):
                combined.append(new)
                if await self._accept(new, await self._attempt(new)):
                    spared = [each for each in spared if not set(each.parts) & set(new.parts)]
                    break
        for candidate in spared:
            if self.standing.kept < wanted.count:
                await self._accept(candidate, self._done[candidate.key])
        for _, attempt in trying:
            attempt.cancel()

    def _quota(self, kind: str) -> bool:
        """Return whether there may be more tasks of a kind."""
        return self._outcome.kinds[kind] < most_of_a_kind(self.standing.kept, len(self._wanted.kinds))

    def _is_free(self, candidate: BugCandidate) -> bool:
        """Return whether one more task may change the candidate's functions. Once this is false, it stays false."""
        return all(self._used[self._shapes[each]] < self._wanted.per_function for each in candidate.functions)

    async def _accept(self, candidate: BugCandidate, record: Record) -> bool:
        """Count an attempt. Make a task of it if the change is sound, and no earlier task breaks the same tests or has
        one of the same examples."""
        outcome = record["outcome"]
        alike = {frozenset(record.get("broken", ())), *record.get("statement", "").split("```")[1::2]}
        if outcome == KEPT and alike & self._known:
            outcome = "same tests"
        self._outcome.outcomes[outcome] += 1
        if outcome != KEPT:
            return False
        self._known |= alike
        row = self._row(record)
        if row["instance_id"] not in self._written:
            self._written.add(row["instance_id"])
            await asyncio.to_thread(self._rows.append, row)
        self.standing.kept += 1
        self._outcome.tasks += 1
        self._outcome.kinds[candidate.kind] += 1
        self._outcome.levels[record["difficulty"]["level"]] += 1
        self._show("trying changes")
        return True

    async def _attempt(self, candidate: BugCandidate) -> Record:
        """Try a change, and return the record of the attempt; or return the record of an earlier session."""
        record = self._done.get(candidate.key)
        if record is None:
            async with self._seats:
                record = await self._try(candidate)
            self._done[candidate.key] = record
            await asyncio.to_thread(self._attempts.append, record)
        self.standing.tried += 1
        self._show("trying changes")
        return record

    async def _try(self, candidate: BugCandidate) -> Record:
        about = {"key": candidate.key, "kind": candidate.kind, "functions": candidate.functions}
        try:
            changes = await self._in_thread(self._change_files, candidate)
        except Unreadable:
            return {**about, "outcome": "no Python"}
        if isinstance(changes, str):
            return {**about, "outcome": changes}

        try:
            measured = await self._with_slot(
                candidate.key, lambda slot: self._measure_change(_Trial(slot, candidate, changes)), seated=True
            )
            return {**about, **measured}
        except InfraError as error:
            # A change can make code that no slot survives. Then only this change is left out, and the run goes on;
            # unless a slot does not survive the unchanged code, either.
            control = await self._with_slot(
                "control", lambda slot: self._tester.run(slot, {}, self._stable[:1], 60.0), seated=True
            )
            if not control.complete:
                raise
            log.warning("change %s is left out: it ends its sandbox or slot: %s", candidate.key, error)
            return {**about, "outcome": "ends its slot"}

    def _change_files(self, candidate: BugCandidate) -> dict[str, bytes] | str:
        """Return the new contents of the changed files, or the reason why the change can't be tried. Blocking."""
        changes = {}
        for path, edits in candidate.edits().items():
            source = self._sources[path]
            if path not in self._clean:
                self._clean[path] = meaning(source.text, path), unbound(source.text, path)
            text = source.apply_edits(edits)
            if meaning(text, path) == self._clean[path][0]:
                return "equivalent"
            if unbound(text, path) - self._clean[path][1]:
                return "undefined name"
            changes[path] = source.encode(text)
        return changes

    async def _measure_change(self, trial: _Trial) -> Record:
        """Run the tests on a change: first the tests that can notice it, then all tests."""
        slot, candidate, changes = trial
        most = self._wanted.max_broken
        near = self._noticing(candidate)
        broken: set[str] | None = None
        if near is not None:
            limit = 15.0 + 6.0 * sum(self._by_id[name].seconds for name in near) + 2.0 * self._full_s
            report = await self._tester.run(slot, changes, near, min(limit, self._wanted.test_timeout_s))
            broken = _find_broken(near, report)
            if (reason := _unfit(report, broken, most)) is not None:
                return {"outcome": reason}
            await slot.empty()
        limit = min(30.0 + 6.0 * self._full_s, self._wanted.test_timeout_s)
        report = await self._tester.run(slot, changes, self._stable, limit)
        every = _find_broken(self._stable, report)
        if (reason := _unfit(report, every, most)) is not None:
            return {"outcome": reason}
        if broken is None or broken != every:
            await slot.empty()
            second = await self._tester.run(slot, changes, self._stable, limit)
            broken = _find_broken(self._stable, second)
            if (reason := _unfit(second, broken, most)) is not None:
                return {"outcome": reason}
        certain = [name for name in self._stable if name in broken & every]
        unsure = sorted(broken ^ every)
        if not certain or len(unsure) > len(certain):
            return {"outcome": "flaky"}
        if len(candidate.parts) > 1 and not self._each_counts(candidate, certain):
            return {"outcome": "one part hides another"}
        await slot.empty()
        shown = await self._find_examples(trial, certain)
        if isinstance(shown, str):
            return {"outcome": shown}
        described = await self._complete_record(trial, certain, report, shown)
        return {"outcome": KEPT, "broken": certain, "left_out": unsure, **described}

    async def _find_examples(self, trial: _Trial, broken: Sequence[str]) -> list[tuple[str, ...]] | str:
        """Return examples that show each part of a change, in the form of the statement; or why there are none.

        An example fails with the change, and runs without it.
        """
        slot, candidate, changes = trial
        parts = [BugCandidate(part.mutation.kind, (part,)).key for part in candidate.parts]
        apart = [[name for name in broken if name in self._done[key]["broken"]] for key in parts] if parts[1:] else []
        looked = [name for names in (apart or [[*broken]]) for name in names[:_EXAMINED]]
        limit = min(30.0 + 6.0 * self._full_s, self._wanted.test_timeout_s)
        told = await self._tester.failures(slot, changes, looked, limit)
        if any(examples.names_a_missing_name(each.error) for each in told.values()):
            return "undefined name"
        if self._writer is not None:
            return []
        shown: list[tuple[str, ...]] = []
        for names, most in [(names[:_EXAMINED], 1) for names in apart] or [(looked, statement.SHOWN)]:
            found: dict[str, tuple[str, ...]] = {}
            for name in names:
                if name in told and len(found) < most:
                    each = await self._example(slot, candidate, told[name])
                    if each is not None and each[2] not in {happens for *_, happens in shown}:
                        found[each[0]] = each
            if not found:
                return "no example"
            shown += found.values()
        return shown

    async def _example(self, slot: SlotHandle, candidate: BugCandidate, failed: FailedTest) -> tuple[str, ...] | None:
        """Return an example of a failed test: title, code, and a text on what happens; None if there is no example."""
        if failed.session:
            return await self._in_thread(self._telling, candidate, *examples.describe_doctest_failure(failed))
        source = self._tests.get(failed.node_id.partition("::")[0])
        codes = await self._in_thread(lambda: [*examples.examples_of(source, failed)]) if source else []
        for code in codes:
            ran = await self._tester.show(slot, code, clean=False)
            if ran is None or not ran.error or examples.names_a_missing_name(ran.error):
                continue
            clean = await self._tester.show(slot, code, clean=True)
            if clean is not None and not clean.error:
                title, happens = await self._in_thread(examples.describe_failure, code, ran, clean)
                return await self._in_thread(self._telling, candidate, title, code, happens)
        return None

    def _telling(self, candidate: BugCandidate, *shown: str) -> tuple[str, ...] | None:
        """Return the texts of an example if they do not give away the changed place, and are not too long; else None.
        Blocking."""
        for part in candidate.parts:
            function = next(each for each in self._sources[part.path].functions if each.name == part.function)
            if examples.gives_away("\n".join(shown), function, part.mutation.lines):
                return None
        return shown if sum(map(len, shown)) <= 2 * examples.MOST_CHARS else None

    def _noticing(self, candidate: BugCandidate) -> list[str] | None:
        """Return the stable tests that run the changed lines; None if most of them do, or if the lines run while tests
        are collected, so that any test can notice the change."""
        places = [(part.path, part.mutation.lines) for part in candidate.parts]
        if any(self._surveyed.importing.ran(*place) for place in places):
            return None
        found = [name for name in self._stable if any(self._by_id[name].ran(*place) for place in places)]
        return found if len(found) <= 0.7 * len(self._stable) else None

    def _each_counts(self, candidate: BugCandidate, broken: Sequence[str]) -> bool:
        """Return whether each part of a combination breaks some of the tests that the whole combination breaks."""
        names = set(broken)
        singles = [BugCandidate(part.mutation.kind, (part,)) for part in candidate.parts]
        return all(names & set(self._done.get(single.key, {}).get("broken", ())) for single in singles)

    async def _complete_record(
        self, trial: _Trial, broken: Sequence[str], report: PytestReport, shown: Sequence[tuple[str, ...]]
    ) -> Record:
        """Return the further fields of a row: the patch, the statement, the difficulty."""
        slot, candidate, changes = trial
        ground = await self._tester.ground(slot)
        arguments = {"repo": ground.repository.git_dir, "files": [(path, len(data)) for path, data in changes.items()]}
        programs = await prepare_programs(slot)
        answer = await operate(slot.preparation, programs, "make_patch", arguments, b"".join(changes.values()))
        if self._writer is None:
            said = statement.from_template(re.sub(r".*__|\.\w+$", "", self._project["repo"]), shown)
        else:
            failures = [(name, text) for name, text in report.texts if name in set(broken)]
            said = await statement.from_model(self._writer, candidate.key, answer["patch"], failures)
        tests = [self._by_id[name] for name in broken]
        estimate = await self._in_thread(difficulty.estimate, candidate, tests, self._sources)
        return {"patch": answer["patch"], "statement": said, "difficulty": estimate}

    def _row(self, record: Record) -> Record:
        """Return the row of a sound task."""
        full = self._project["repo"].split("/", 1)[1]
        out = {*record["broken"], *record["left_out"]}
        digest = hashlib.sha256(record["patch"].encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return {
            "instance_id": f"{full}.{record['kind'].replace('-', '_')}__{digest}",
            "patch": record["patch"],
            "FAIL_TO_PASS": record["broken"],
            "PASS_TO_PASS": [name for name in self._stable if name not in out],
            "image_name": "",
            "repo": self._project["repo"],
            "problem_statement": record["statement"],
            "difficulty": record["difficulty"],
        }

    # ------------------------------------------------------------------ slots and threads

    @contextlib.asynccontextmanager
    async def _slot(self, name: str) -> AsyncIterator[SlotHandle]:
        async with self._backend.lease(f"make-tasks-{name}") as slot:
            yield LeasedSlot(self._backend, slot, lambda error, origin: None)

    async def _with_slot(self, name: str, work: Callable[[SlotHandle], Awaitable[T]], *, seated: bool = False) -> T:
        """Return the result of work in a slot; on another slot if the infrastructure breaks it off.

        Raises:
            InfraError: the infrastructure broke off each of `_ATTEMPTS` attempts.
        """
        async with contextlib.nullcontext() if seated else self._seats:
            for left in reversed(range(_ATTEMPTS)):
                try:
                    async with self._slot(name) as slot:
                        return await work(slot)
                except InfraError as error:
                    if not left:
                        raise
                    log.warning("%s is tried again: %s", name, error)
        raise AssertionError("not reached")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a blocking function. All functions run in the same thread: parsing changes the process's
        warnings, and Python 3.11 counts the depth of all threads' parsing together."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _show(self, stage: str) -> None:
        self.standing.stage = stage
        self._display.update(self.standing)


def _find_broken(names: Sequence[str], report: PytestReport) -> set[str]:
    return {name for name in names if not report.passed(name)}


def _unfit(report: PytestReport, broken: set[str], most: int) -> str | None:
    """Return the reason why a change makes no task, or None if it may make one."""
    if not report.complete:
        return "no end"
    if not broken:
        return "unnoticed"
    if {report.outcomes[name] for name in broken} - _COLLECTED:
        return "not collected"
    return "too many" if len(broken) > most else None


def _report_text(report: PytestReport) -> str:
    texts = [f"{name}: {text[-500:]}" for name, text in report.texts[:2]]
    return statement.plain("; ".join(texts) or report.output.strip()[-1500:] or "it said nothing")


def _dump_survey(surveyed: Surveyed) -> Record:
    def of(test: SurveyedTest) -> Record:
        return {**asdict(test), "lines": {path: f"{bits:x}" for path, bits in test.lines.items()}}

    return {
        "tests": [of(test) for test in surveyed.tests],
        "importing": of(surveyed.importing),
        "broken": list(surveyed.broken),
    }


def _load_survey(noted: Mapping[str, Any]) -> Surveyed:
    def of(value: Mapping[str, Any]) -> SurveyedTest:
        lines = {path: int(bits, 16) for path, bits in value["lines"].items()}
        return SurveyedTest(**{**value, "lines": lines})

    broken = tuple((name, text) for name, text in noted["broken"])
    return Surveyed(tuple(map(of, noted["tests"])), of(noted["importing"]), broken)
