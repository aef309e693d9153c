"""The environment `swe-smith`: the agent fixes a bug in a real repository, whose own tests decide."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hermes_core import (
    Cheat,
    Environment,
    Intake,
    Item,
    NewSandbox,
    RolloutHandle,
    SlotHandle,
    VerifierError,
    alongside,
    hookimpl,
    read_rows,
)
from hermes_swe_smith import demo_tasks
from hermes_swe_smith.attribution import OperationRefused
from hermes_swe_smith.canary import Canary, CheckedReport, new_canary
from hermes_swe_smith.cheats import cheats
from hermes_swe_smith.config import DEMO, SweSmithConfig
from hermes_swe_smith.dataset import load_tasks
from hermes_swe_smith.dependencies import installer_variables, prepare_environment
from hermes_swe_smith.reach import Reach
from hermes_swe_smith.repos import Catalog, TestEnvironment
from hermes_swe_smith.rows import SweTask
from hermes_swe_smith.verify import (
    NOT_PASSED,
    Score,
    as_clean,
    doubt,
    find_disturbance,
    run_tests,
    score,
    tampering_score,
    undone_changes,
)
from hermes_swe_smith.workspace import (
    ENVIRONMENT_LINK,
    PreparedRepository,
    TreeUnderTest,
    apply_fix,
    give_checkout,
    prepare_repository,
    prepare_trees,
    reference_fix,
    remove_tested,
    take_patch,
    take_work,
    unpack_tested,
)

log = logging.getLogger("hermes_core.swe_smith")

_PROMPT = """\
The directory `{directory}` (in the current directory) holds a Python project, as a git repository. It has a bug, \
which this issue describes:

<issue>
{issue}
</issue>

Find the cause in the project's source and fix it there. The issue is settled when the project behaves as it says; \
tests that you cannot see will be run on your changes, together with those that are in the project now. You need not \
commit anything, and changes to existing tests do not count.

{how_to_test}"""

_HOW_TO_TEST = """\
What the tests need is installed in `{link}`, beside the project. To run them: `cd {directory} && \
PATH=$PWD/../{link}/bin:$PATH PYTHONPATH={path} python -m pytest`"""


class SweSmithEnvironment(Environment):
    """SWE-smith tasks. Setup gives the agent a checkout with the bug; verification runs the tests in a fresh slot."""

    name = "swe-smith"
    config_class = SweSmithConfig
    hides_files = True
    config: SweSmithConfig

    def __init__(self, config: SweSmithConfig | None = None) -> None:
        super().__init__(config or SweSmithConfig())
        self.item_images = self.config.use_image_name or bool(self.config.image_template)
        self._tasks: dict[str, SweTask] = {}
        self._items: Sequence[Item] = ()
        self._catalog = Catalog({}, None, "")
        self._scratch = ExitStack()
        self._repositories: dict[tuple[str, str], PreparedRepository] = {}
        self._reach = Reach()
        self._installer_variables = installer_variables(self.config.installer_variables)
        self._clean: dict[str, Mapping[str, str]] = {}
        self._no_canary: dict[str, str] = {}

    async def setup(self) -> None:
        """Read the dataset, and check that every row's repository is there.

        Raises:
            DatasetError: a file, a row or a repository can't be used; the message names it.
            ConfigError: `repo_base_url` is wrong.
        """
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        config, name, base = self.config, self.config.dataset_name, self.config.repo_base_url
        if name == DEMO:
            base = self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="hermes-demo-"))
            name = str(demo_tasks.write(Path(base)))
        self._catalog = Catalog.open(base)
        intake = Intake(name, skip=config.skip_refused)
        rows = read_rows(name, config.dataset_split, intake)
        self._tasks = load_tasks(rows, config, intake, self._catalog.source)
        self._reach = Reach(self._tasks.values(), self._catalog.source)
        self._items = [_as_item(task) for task in self._tasks.values()]

    async def aclose(self) -> None:
        """Remove the demo's files, if they were written."""
        self._scratch.close()

    def items(self) -> Sequence[Item]:
        """Return the dataset's rows in its order, with the fields of SWE-smith."""
        return self._items

    def image(self, item: Item) -> str | None:
        """Return the task's own image, if the configuration demands it."""
        return self._task(item).image

    def doubt(self, item: Item, agent: str, details: Mapping[str, Any]) -> str | None:
        """Return a sentence on the listed tests that do not behave as listed; None if there are none."""
        return doubt(item, agent, details)

    def cheats(self) -> Mapping[str, Cheat]:
        """Return a cheat of each kind."""
        return cheats(self._task)

    def format_prompt(self, item: Item) -> str:
        """Return the prompt: where the checkout is, the issue, and how to run tests."""
        task = self._task(item)
        issue = task.problem_statement.strip()
        if self.config.prompt_mode == "problem_statement+text" and task.text:
            issue += f"\n\n{task.text.strip()}"
        pythonpath = self._catalog.source(task).pythonpath or (".",)
        path = ":".join("$PWD" if part == "." else f"$PWD/{part}" for part in pythonpath)
        how = _HOW_TO_TEST.format(link=ENVIRONMENT_LINK, directory=task.directory, path=path)
        return _PROMPT.format(directory=task.directory, issue=issue, how_to_test=how)

    async def prepare_sandbox(self, sandbox: NewSandbox) -> None:
        """Clone the repositories of all items, and install the packages for their tests, while there is a network."""
        done = set()
        for item in self.select_items():
            task = self._task(item)
            source = self._catalog.source(task)
            if source.key not in done and task.image in (None, sandbox.image):
                await self._prepare(sandbox, task)
                done.add(source.key)

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> dict[str, Any]:
        """Give the agent the buggy tree."""
        task = self._task(item)
        trees_dir, environment = await self._prepare(rollout, task)
        async with alongside(self._reach.look(rollout, task, environment)) as looking:
            await give_checkout(rollout, task, trees_dir, environment)
            await looking
        return {"repo_dir": f"{rollout.commands.workspace_dir}/{task.directory}", "base_commit": task.base_commit}

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: RolloutHandle) -> None:
        """Apply the reference fix."""
        task = self._task(item)
        trees_dir, _ = await self._prepare(rollout, task)
        await apply_fix(rollout, task, trees_dir)

    @hookimpl
    async def verify_and_score_trajectory(self, item: Item, rollout: RolloutHandle) -> Score:
        """Take the agent's work as a patch, and test it in a fresh slot."""
        task = self._task(item)
        trees_dir, environment = await self._prepare(rollout, task)
        limits = {"max_workspace": self.config.max_workspace_bytes, "max_patch": self.config.max_patch_bytes}
        try:
            tested = await take_work(rollout, task, trees_dir, environment, canary=self._canary(task), **limits)
            rollout.record_patch(tested.patch)
            return await self._score(task, tested, rollout)
        except OperationRefused as refused:
            return 0.0, {"reason": refused.message}

    async def score_patch(self, item: Item, patch: str, rollout: RolloutHandle) -> Score:
        """Test a recorded patch, as verification did."""
        task = self._task(item)
        trees_dir, environment = await self._prepare(rollout, task)
        try:
            tested = await take_patch(rollout, task, trees_dir, environment, patch, canary=self._canary(task))
        except OperationRefused as refused:
            raise VerifierError(
                f"instance {task.instance_id!r}: {refused.message}", hint="was it recorded with another dataset?"
            ) from refused
        return await self._score(task, tested, rollout)

    async def _score(self, task: SweTask, tested: TreeUnderTest, rollout: RolloutHandle) -> Score:
        """Run the tests, and score their outcomes and those of the canary.

        If the canary passes, or PASS_TO_PASS tests do not, the project may be the cause instead of the agent. So the
        same tests and the same canary are run on the clean tree. If the canary passes there or disturbs other tests,
        the task has no canary from then on. If tests are skipped or expected to fail there, the same outcome counts as
        passed here.
        """
        checked = await self._check(task, tested, rollout)
        reward, details = score(task, checked.report, self.config)
        violations = tested.canary.violations(checked.canary) if tested.canary else []
        odd = violations if reward else not all(map(checked.report.passed, task.pass_to_pass))
        if checked.report.complete and odd:
            clean = await self._on_the_clean_tree(task, tested.canary, rollout)
            if clean is None:  # the tests did not end on the clean tree, so the outcomes count as they are
                pass
            elif tested.canary and task.instance_id in self._no_canary:
                trees_dir, environment = await self._prepare(rollout, task)
                again = await take_patch(rollout, task, trees_dir, environment, tested.patch, canary=None)
                return await self._score(task, again, rollout)
            else:
                reward, details = score(task, as_clean(checked.report, clean), self.config)
        details = {**details, **undone_changes(tested)}
        if why := self._no_canary.get(task.instance_id):
            details["no_canary"] = why
        return tampering_score(violations, details) if violations and reward else (reward, details)

    async def _on_the_clean_tree(
        self, task: SweTask, canary: Canary | None, rollout: RolloutHandle
    ) -> Mapping[str, str] | None:
        """Return the outcomes of the PASS_TO_PASS tests that are skipped or expected to fail on the clean tree, where
        nobody tampers; None if the tests do not come to their end.

        If the canary does not fail there, or other tests fail beside it, the task has no canary from then on.
        """
        if task.instance_id in self._clean:
            return self._clean[task.instance_id]
        trees_dir, environment = await self._prepare(rollout, task)
        fix = await reference_fix(rollout, trees_dir)
        clean = await take_patch(rollout, task, trees_dir, environment, fix, canary=canary)
        checked = await self._check(task, clean, rollout)
        if not checked.report.complete:
            return None
        outcomes = {node_id: checked.report.outcomes[node_id] for node_id in task.pass_to_pass}
        failing = [node_id for node_id, outcome in outcomes.items() if outcome not in ("passed", *NOT_PASSED)]
        odd = {node_id: outcome for node_id, outcome in outcomes.items() if outcome in NOT_PASSED}
        if canary and (violations := canary.violations(checked.canary)):
            self._no_canary[task.instance_id] = f"on the clean tree, {'; '.join(violations)}"
        elif canary and failing:
            self._no_canary[task.instance_id] = f"beside it, tests fail on the clean tree: {', '.join(failing[:5])}"
        elif odd:
            log.warning(
                "instance %r: %d PASS_TO_PASS tests are skipped or expected to fail on the clean tree, and may be: %s",
                *(task.instance_id, len(odd), ", ".join([*odd][:5])),
            )
        if not canary or task.instance_id not in self._no_canary:
            self._clean[task.instance_id] = odd
        return odd

    async def _check(self, task: SweTask, tested: TreeUnderTest, rollout: RolloutHandle) -> CheckedReport:
        """Run the tests in a fresh slot, of this sandbox or of another one."""
        source = self._catalog.source(task)

        async def lay_out(fresh: SlotHandle) -> None:
            await unpack_tested(rollout, tested, fresh.commands, task.directory)

        async def check(fresh: SlotHandle) -> CheckedReport:
            _, environment = await self._prepare(fresh, task)
            async with fresh.processor():
                return await run_tests(fresh, task, tested, source, environment, timeout_s=self.config.test_timeout_s)

        try:
            return await rollout.check_afresh(lay_out, check, disturbed=find_disturbance)
        finally:
            await remove_tested(rollout, tested)

    def _canary(self, task: SweTask) -> Canary | None:
        """Return a new canary for the task; None if the task has none."""
        return new_canary(task) if self.config.canaries and task.instance_id not in self._no_canary else None

    def _task(self, item: Item) -> SweTask:
        return self._tasks[self.item_id(item)]

    async def _prepare(self, site: SlotHandle | NewSandbox, task: SweTask) -> tuple[str, TestEnvironment]:
        """Return the directory of the task's trees, and the environment of its tests. Make both if they are missing."""
        source = self._catalog.source(task)
        variables, limit, hide = self._installer_variables, self.config.install_timeout_s, self.config.hide_fail_to_pass
        repository = await prepare_repository(site, task, source, variables, limit, known=self._repositories)
        trees_dir = await prepare_trees(site, task, repository, hide=hide)
        python = self.config.image_python
        environment = await prepare_environment(site, source, repository, variables, limit, image_python=python)
        return trees_dir, environment


def _as_item(task: SweTask) -> Item:
    """Return the task under the names of the dataset's fields."""
    return {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "base_commit": task.base_commit,
        "problem_statement": task.problem_statement,
        "text": task.text,
        "patch": task.patch,
        "FAIL_TO_PASS": task.fail_to_pass,
        "PASS_TO_PASS": task.pass_to_pass,
    }
