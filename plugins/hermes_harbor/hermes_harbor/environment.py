"""The environment `harbor`: task folders with an image, an instruction, and tests that write a reward."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hermes_core import (
    Cheat,
    Cwd,
    DatasetError,
    Environment,
    FollowUp,
    Image,
    Intake,
    Isolation,
    Item,
    McpServer,
    Network,
    NetworkPlan,
    RolloutHandle,
    SetupFailed,
    SlotUser,
    hookimpl,
)
from hermes_harbor.cheats import cheats
from hermes_harbor.config import HarborConfig
from hermes_harbor.container import as_user, begin, directory, run_script, script, upload
from hermes_harbor.healthcheck import wait_until_healthy
from hermes_harbor.image import start_image
from hermes_harbor.networks import plan_network
from hermes_harbor.packages import packages_of
from hermes_harbor.repository import Checkout, fetch, repository_of
from hermes_harbor.steps import Score, StepProgress, begin_next, check_part, combine_verdicts, prepare_part
from hermes_harbor.tasks import HarborTask, content_digest, load_task, task_folders
from hermes_harbor.variables import resolve_variables
from hermes_harbor.verify import TestsCouldNotRun, Verification

log = logging.getLogger("hermes_core.harbor")


class HarborEnvironment(Environment):
    """Tasks of Harbor. The agent is root, and the tests run in the same place once the agent's processes are dead.

    Each slot needs a file system of its own, a root directory or a whole sandbox, because the absolute paths /tests,
    /solution and /logs belong to the task.
    """

    name = "harbor"
    config_class = HarborConfig
    isolation = Isolation.PRIVATE_ROOT
    slot_user = SlotUser.ROOT
    share_network = True
    as_image = True
    default_toolsets = ("terminal",)
    config: HarborConfig

    def __init__(self, config: HarborConfig) -> None:
        super().__init__(config)
        self._tasks: dict[str, HarborTask] = {}
        self._items: Sequence[Item] = ()
        self._verified: Counter[str] = Counter()
        self._checkout: Checkout | None = None
        self.item_images = "image" not in config.accept

    async def setup(self) -> None:
        """Fetch the tasks, if they are in a repository, and read them.

        Raises:
            DatasetError: there is no such repository; or a task is wrong or can't run here, and the message names the
                file.
        """
        if self.config.package_cache is not None:
            await asyncio.to_thread(packages_of, self.config.package_cache)  # a wrong setting fails before the rollouts
        if (repository := repository_of(self.config.dataset_name)) is not None:
            self._checkout = await fetch(
                repository,
                self.config.cache,
                submodules=self.config.submodules,
                timeout_s=self.config.git_timeout_s,
            )
            log.info("%s is at commit %s", repository.url, self._checkout.commit)
        taken = await asyncio.to_thread(self._load)
        origin = {} if self._checkout is None else {"commit": self._checkout.commit}
        self._tasks = {name: task for name, (task, _) in taken.items()}
        self._items = [{**item, **origin} for _, item in taken.values()]

    def _load(self) -> dict[str, tuple[HarborTask, Item]]:
        intake = Intake(self.config.dataset_name, skip=self.config.skip_refused)
        readers = ((where, partial(_with_item, read)) for where, read in self.load(intake))
        return intake.read_all(readers, lambda pair: pair[0].id)

    def load(self, intake: Intake) -> Iterable[tuple[str, Callable[[], HarborTask]]]:
        """Yield the place of each task, with a function that reads it or raises `DatasetError`. Blocking.

        Args:
            intake: counts other parts of the dataset that can't be used.

        Raises:
            DatasetError: there are no tasks.
        """
        del intake  # nothing to count: folders have no unreadable rows
        checkout = self._checkout
        for folder in task_folders(checkout.path if checkout else Path(self.config.dataset_name).expanduser()):
            yield str(folder), partial(self._read, folder, checkout)

    def _read(self, folder: Path, checkout: Checkout | None) -> HarborTask:
        if checkout is not None and not folder.resolve().is_relative_to(checkout.top.resolve()):
            raise DatasetError(f"{folder} is a link that leads out of its repository", hint="put a copy there")
        return load_task(folder, self.config)

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

    def images(self, item: Item) -> Sequence[Image]:
        """Return the task's image, and those of its tests."""
        task = self._task(item)
        of_tests = (part.place.image for part in task.parts if part.place is not None)
        return [*dict.fromkeys(each for each in (task.image, *of_tests) if each is not None)]

    def network(self, item: Item) -> Network | NetworkPlan | None:
        """Return the networks that the task demands; None for a public one, for which it gets the profile's."""
        return None if "network" in self.config.accept else plan_network(self._task(item).toml)

    def cwd(self, item: Item) -> str | Cwd | None:
        """Return the task's working directory."""
        return self._task(item).workdir or Cwd.IMAGE

    def variables(self, item: Item) -> Mapping[str, str]:
        """Return the variables of the task's `environment.env`."""
        return self._task(item).variables

    def mcp_servers(self, item: Item) -> Mapping[str, McpServer]:
        """Return the servers of the task's `environment.mcp_servers`."""
        return self._task(item).mcp_servers

    def skills(self, item: Item) -> str | None:
        """Return the task's `environment.skills_dir`."""
        return self._task(item).toml.environment.skills_dir

    def agent_user(self, item: Item) -> str | None:
        """Return the `agent.user` of the task, or of its steps."""
        user = self._task(item).parts[0].agent.user
        return None if user is None else str(user)

    def agent_timeout_s(self, item: Item) -> float | None:
        """Return the `agent.timeout_sec` of the task, or of its first step."""
        return self._task(item).parts[0].agent.timeout_sec

    def cheats(self) -> Mapping[str, Cheat]:
        """Return forgeries of the reward, and the usual cheats."""
        return cheats(self.format_prompt, lambda item: [each for part in self._task(item).parts for each in part.tests])

    def format_prompt(self, item: Item) -> str:
        """Return the instruction of the task, or of its first step."""
        return self._task(item).parts[0].instruction

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> dict[str, Any]:
        """Make the directories of the logs, wait until the sandbox is healthy, and prepare the first step."""
        task, commands = self._task(item), rollout.commands
        beginning = await begin(rollout)
        if task.image is None:  # an image of the task's own has the working directory already
            await script(commands, 'mkdir -p -- "$1"', directory(rollout, task.workdir))
        await start_image(rollout, task.workdir)
        if (check := task.toml.environment.healthcheck) is not None:
            await wait_until_healthy(as_user(rollout, None), check, "environment.healthcheck")
        await prepare_part(rollout, task, task.parts[0], self.config)
        return {"progress": StepProgress(beginning)}

    @hookimpl
    async def continue_trajectory(
        self, item: Item, rollout: RolloutHandle, workspace_meta: Mapping[str, Any]
    ) -> FollowUp | None:
        """Run the tests of the step that the agent has finished, and prepare the next step."""
        task, progress = self._task(item), workspace_meta["progress"]
        if len(progress.verdicts) + 1 >= len(task.parts):
            return None
        await rollout.kill_everything()
        await self._check(task, rollout, progress)
        if progress.over is not None:
            return None
        part = await begin_next(rollout, task, progress, self.config)
        return None if part is None else FollowUp(part.instruction, part.agent.timeout_sec)

    @hookimpl
    async def solve_trajectory(self, item: Item, rollout: RolloutHandle, workspace_meta: Mapping[str, Any]) -> None:
        """Run `solution/solve.sh` of the task or the step. Its exit status does not matter, as the tests decide."""
        task = self._task(item)
        part = task.parts[len(workspace_meta["progress"].verdicts)]
        if not (part.solution / "solve.sh").is_file():
            place = part.solution.relative_to(task.folder)
            raise SetupFailed(f"task {task.id!r} has no {place}/solve.sh", hint="the agent oracle runs it")
        env = resolve_variables(task.toml.solution.env, f"task {task.id!r}, solution.env")
        await upload(rollout.commands, part.solution, "/solution", self.config.max_upload_bytes)
        await run_script(
            rollout,
            "/solution/solve.sh",
            user=part.agent.user,
            env={"DEBIAN_FRONTEND": "noninteractive", **env},
            timeout_s=None,
        )

    @hookimpl
    async def verify_and_score_trajectory(
        self, item: Item, rollout: RolloutHandle, workspace_meta: Mapping[str, Any]
    ) -> Score:
        """Run the tests of the task or of the current step, and return the reward of all steps."""
        task, progress = self._task(item), workspace_meta["progress"]
        if progress.over is None:
            await self._check(task, rollout, progress)
        return combine_verdicts(task, progress)

    async def _check(self, task: HarborTask, rollout: RolloutHandle, progress: StepProgress) -> None:
        try:
            await check_part(Verification(rollout, task, self.config, progress.beginning), progress)
        except TestsCouldNotRun:
            self._verified["lacking"] += 1
            raise
        self._verified["done"] += 1

    def _task(self, item: Item) -> HarborTask:
        return self._tasks[self.item_id(item)]


def _with_item(read: Callable[[], HarborTask]) -> tuple[HarborTask, Item]:
    """Return a task and its item, which the record keeps. Blocking."""
    task = read()
    return task, {
        "id": task.id,
        "content": content_digest(task.folder),
        "instruction": task.parts[0].instruction,
        "image": task.image if isinstance(task.image, str) else None,
        "metadata": task.toml.metadata,
        "keywords": task.toml.task.keywords if task.toml.task else [],
    }
