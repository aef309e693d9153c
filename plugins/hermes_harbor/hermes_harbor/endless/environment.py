"""The environment `endless-terminals`: the agent changes the state of a system, and tests look at it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hermes_core import (
    Environment,
    Intake,
    Isolation,
    Item,
    PytestReport,
    RolloutHandle,
    SetupFailed,
    SlotUser,
    VerifierError,
    hookimpl,
)
from hermes_harbor.endless.config import EndlessConfig
from hermes_harbor.endless.slot import end_agent, make_initial_state, run_tests
from hermes_harbor.endless.tasks import EndlessTask, Tests, tasks_of
from hermes_harbor.tasks import content_digest

log = logging.getLogger("hermes_core.harbor")

Score = tuple[float, dict[str, Any]]

SHOWN = 5
"""Maximum number of failed tests whose messages the record keeps."""
_EXPECTED = ("passed", "skipped", "xfailed")

_PROMPT = """\
{description}

You are the user `{user}` of a Linux system, without root. Commands start in `/home/{user}`. When you are done, all of \
your processes are ended, and tests look at the state of the system."""


class EndlessTerminalsEnvironment(Environment):
    """Tasks of endless-terminals. Each slot is root of a root directory of its own, in which the agent is another
    user."""

    name = "endless-terminals"
    config_class = EndlessConfig
    isolation = Isolation.PRIVATE_ROOT
    slot_user = SlotUser.ROOT
    default_toolsets = ("terminal",)
    config: EndlessConfig

    def __init__(self, config: EndlessConfig) -> None:
        super().__init__(config)
        self.item_images = config.use_images
        self._tasks: dict[str, EndlessTask] = {}
        self._items: Sequence[Item] = ()

    async def setup(self) -> None:
        """Read the tasks.

        Raises:
            DatasetError: a task is wrong, or can't run here; the message names the file.
        """
        taken = await asyncio.to_thread(self._load)
        self._tasks = {name: task for name, (task, _) in taken.items()}
        self._items = [item for _, item in taken.values()]
        ignored = {name for task in self._tasks.values() for name in task.definition.ignored}
        if ignored:
            log.info("sections of container.def without an effect here: %s", ", ".join(sorted(ignored)))

    def _load(self) -> dict[str, tuple[EndlessTask, Item]]:
        intake = Intake(self.config.dataset_name, skip=self.config.skip_refused)
        readers = ((where, partial(_with_item, read)) for where, read in tasks_of(self.config, intake))
        return intake.read_all(readers, lambda pair: pair[0].id)

    def items(self) -> Sequence[Item]:
        """Return the tasks, in the order of the rows or of their folders' names."""
        return self._items

    def image(self, item: Item) -> str | None:
        """Return the task's image."""
        return self._task(item).image

    def cwd(self, item: Item) -> str | None:
        """Return the home of the agent's user."""
        return f"/home/{self.config.user}"

    def agent_user(self, item: Item) -> str | None:
        """Return the agent's user."""
        return self.config.user

    def variables(self, item: Item) -> Mapping[str, str]:
        """Return the variables of the task's `%environment`."""
        return self._task(item).definition.variables

    def agent_timeout_s(self, item: Item) -> float | None:
        """Return the `max_time` of the task's row."""
        return self._task(item).agent_timeout_s

    def format_prompt(self, item: Item) -> str:
        """Return the task's description, and the name of the agent's user."""
        return _PROMPT.format(description=self._task(item).description, user=self.config.user)

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> dict[str, Any]:
        """Make the initial state, and check that its tests pass."""
        task = self._task(item)
        python = await make_initial_state(rollout.commands, task, self.config)
        try:
            report = await self._run(task.initial, task, python, rollout)
        except VerifierError as error:
            raise SetupFailed(
                f"task {task.id!r}: its tests can't be run: {error.message}",
                hint="use an image with python3 and pytest 7 or newer (--env.image), or install them in %post",
            ) from error
        wrong = [node_id for node_id, outcome in report.outcomes.items() if outcome not in _EXPECTED]
        if wrong or not report.complete:
            texts = "; ".join(text.strip()[-300:] for _, text in report.texts[:SHOWN])
            raise SetupFailed(
                f"task {task.id!r}: the initial state fails {', '.join(wrong[:SHOWN]) or 'its tests'}: {texts}",
                hint="its %post does not make what the tests expect; does it need a network, or another image?",
            )
        return {"python": python}

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: RolloutHandle) -> None:
        """Run the task's `solution.sh` as the agent's user."""
        task = self._task(item)
        solution = task.solution
        if solution is None:
            raise SetupFailed(
                f"task {task.id!r} has no solution.sh",
                hint="the format knows no solutions; the agent oracle needs one",
            )
        await rollout.as_user(self.config.user).run(solution, cwd=f"/home/{self.config.user}")

    @hookimpl
    async def verify_and_score_trajectory(
        self, item: Item, rollout: RolloutHandle, workspace_meta: Mapping[str, Any]
    ) -> Score:
        """End the agent's processes, and run the tests of the final state."""
        task = self._task(item)
        if (alive := await end_agent(rollout.commands, self.config.user)) is not None:
            return 0.0, {"reason": f"the agent's processes can't be ended: {alive}"}
        report = await self._run(task.final, task, workspace_meta["python"], rollout)
        if report.disturbance is not None and not all(map(report.passed, report.outcomes)):
            run = partial(self._run, task.final, task, workspace_meta["python"], rollout)
            report = await rollout.check_again(rollout, report.disturbance, run)
        return _score(report)

    async def _run(self, tests: Tests, task: EndlessTask, python: str, rollout: RolloutHandle) -> PytestReport:
        return await run_tests(rollout, tests, python, self.config, task.definition.variables)

    def _task(self, item: Item) -> EndlessTask:
        return self._tasks[self.item_id(item)]


def _score(report: PytestReport) -> Score:
    failing = [node_id for node_id in report.outcomes if not report.passed(node_id)]
    details: dict[str, Any] = {
        "passed": len(report.outcomes) - len(failing),
        "total": len(report.outcomes),
        "tests": str(report.status),
        "tests_s": report.duration_s,
    }
    if not report.complete:
        details["reason"] = f"the tests did not end by themselves ({report.status})"
    if failing:
        details["failing"] = failing
        details["texts"] = [list(text) for text in report.texts[:SHOWN]]
        details["output"] = report.output[-2000:]
    return (0.0 if failing else 1.0), details


def _with_item(read: Callable[[], EndlessTask]) -> tuple[EndlessTask, Item]:
    """Return a task and its item, which the record keeps. Blocking."""
    task = read()
    return task, {
        "id": task.id,
        "content": content_digest(task.folder),
        "description": task.description,
        "image": task.image,
    }
