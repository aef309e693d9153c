"""The environment `harbor`: task folders with an image, an instruction, and tests that write a reward."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_core import (
    Cwd,
    DatasetError,
    Environment,
    Image,
    Isolation,
    Item,
    Rollout,
    SetupFailed,
    SlotUser,
    hookimpl,
)
from hermes_harbor.config import HarborConfig
from hermes_harbor.container import Beginning, begin, run_script, upload
from hermes_harbor.tasks import Refused, Task, load_task, resolved, task_folders
from hermes_harbor.verify import Score, TestsCouldNotRun, verified

log = logging.getLogger("hermes_core.harbor")

SHOWN = 5
"""Maximum number of refused tasks that one error names."""


class HarborEnvironment(Environment):
    """Tasks of Harbor. The agent is root of a sandbox of its own, and the tests run there after its processes are dead.

    The absolute paths /tests, /solution and /logs belong to the task, so each slot needs a whole file system.
    """

    name = "harbor"
    config_class = HarborConfig
    isolation = Isolation.DEDICATED
    slot_user = SlotUser.ROOT
    default_toolsets = ("terminal",)
    item_images = True
    config: HarborConfig

    def __init__(self, config: HarborConfig) -> None:
        super().__init__(config)
        self._tasks: dict[str, Task] = {}
        self._items: Sequence[Item] = ()
        self._verified: Counter[str] = Counter()

    async def setup(self) -> None:
        """Read the tasks.

        Raises:
            DatasetError: a task is wrong, or can't run here; names the file and the reason.
        """
        tasks = await asyncio.to_thread(lambda: [*self.load()])
        self._tasks = {task.id: task for task in tasks}
        if not tasks:
            raise DatasetError(f"no task of {self.config.dataset_name!r} can run here", hint="see the log for reasons")
        if len(self._tasks) < len(tasks):
            twice = next(name for name, count in Counter(task.id for task in tasks).items() if count > 1)
            raise DatasetError(f"two tasks of {self.config.dataset_name!r} are named {twice!r}", hint="rename one")
        self._items = [_as_item(task) for task in tasks]

    def load(self) -> Iterable[Task]:
        """Return the tasks of the dataset. Blocking.

        Raises:
            DatasetError: a task is wrong, or can't run here.
        """
        return self._accepted(task_folders(self.config.dataset_name))

    def _accepted(self, folders: Iterable[Path]) -> list[Task]:
        """Return the tasks in these folders that can run here.

        Raises:
            DatasetError: a task is wrong; or it can't run here, and is not to be left out.
        """
        tasks: list[Task] = []
        refused: list[Refused] = []
        for folder in folders:
            try:
                tasks.append(load_task(folder, self.config))
            except Refused as error:
                refused.append(error)
        if refused and not self.config.skip_refused:
            more = f"; and {len(refused) - SHOWN} more tasks" if len(refused) > SHOWN else ""
            raise DatasetError("; ".join(each.message for each in refused[:SHOWN]) + more, hint=refused[0].hint)
        for each in refused:
            log.warning("left out: %s", each.message)
        return tasks

    async def aclose(self) -> None:
        """Report how many verifications could not run."""
        if lacking := self._verified["lacking"]:
            log.warning(
                "%d of %d verifications lacked their own tools and gave no reward", lacking, self._verified.total()
            )

    def items(self) -> Sequence[Item]:
        """Return the tasks, in the order of their folders' names."""
        return self._items

    def image(self, item: Item) -> Image | None:
        """Return the task's image."""
        return self._task(item).image

    def cwd(self, item: Item) -> str | Cwd | None:
        """Return the task's working directory."""
        return self._task(item).workdir or Cwd.IMAGE

    def variables(self, item: Item) -> Mapping[str, str]:
        """Return the variables of the task's `environment.env`."""
        return self._task(item).variables

    def agent_timeout_s(self, item: Item) -> float | None:
        """Return the task's `agent.timeout_sec`."""
        return self._task(item).toml.agent.timeout_sec

    def format_prompt(self, item: Item) -> str:
        """Return the task's instruction."""
        return self._task(item).instruction

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: Rollout) -> dict[str, Any]:
        """Make the directories of the logs."""
        return {"beginning": await begin(rollout.commands)}

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: Rollout) -> None:
        """Run the task's `solution/solve.sh`. As with an agent, its exit status does not matter."""
        task = self._task(item)
        if not (task.solution / "solve.sh").is_file():
            raise SetupFailed(f"task {task.id!r} has no solution/solve.sh", hint="the agent oracle runs it")
        env = resolved(task.toml.solution.env, f"task {task.id!r}, solution.env")
        await upload(rollout.commands, task.solution, "/solution", self.config.max_upload_bytes)
        await run_script(
            rollout.commands,
            "/solution/solve.sh",
            user=None,
            env={"DEBIAN_FRONTEND": "noninteractive", **env},
            timeout_s=None,
        )

    @hookimpl
    async def verify_and_score_trajectory(
        self, item: Item, rollout: Rollout, workspace_meta: Mapping[str, Any]
    ) -> Score:
        """Run the tests and read their reward."""
        beginning: Beginning = workspace_meta["beginning"]
        try:
            score = await verified(rollout.commands, self._task(item), beginning, self.config)
        except TestsCouldNotRun:
            self._verified["lacking"] += 1
            raise
        self._verified["done"] += 1
        return score

    def _task(self, item: Item) -> Task:
        return self._tasks[self.item_id(item)]


def _as_item(task: Task) -> Item:
    """Return what the record keeps of a task."""
    return {
        "id": task.id,
        "instruction": task.instruction,
        "image": task.image if isinstance(task.image, str) else None,
        "metadata": task.toml.metadata,
        "keywords": task.toml.task.keywords if task.toml.task else [],
    }
