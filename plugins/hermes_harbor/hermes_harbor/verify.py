"""Runs the tests of a task or a step, in the agent's sandbox or in one of their own, and reads their reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hermes_core import CommandError, Cwd, RolloutHandle, SetupFailed, SlotCommands, SlotHandle, VerifierError, watched
from hermes_harbor.artifacts import Collection, collect_artifacts, keep, lay_out
from hermes_harbor.config import HarborConfig
from hermes_harbor.container import (
    MAX_OUTPUT,
    Beginning,
    begin,
    clear,
    directory,
    kill_others,
    kinds,
    run_script,
    script,
    tail,
    tidy,
    upload,
)
from hermes_harbor.image import start_image
from hermes_harbor.packages import Packages, offer, packages_of
from hermes_harbor.rewards import MAX_REWARD_BYTES, rewards_in, the_reward
from hermes_harbor.tasks import HarborTask, TaskPart, VerifierSandbox

LOGS = "/logs/verifier"
REWARDS = ("reward.json", "reward.txt")
"""The files that tests write their reward to. The first that is there counts."""
REPORT = "ctrf.json"
"""The file with how many tests passed and failed, where tests write one."""
OUTPUT_KEPT = 4000
"""Number of characters of the tests' output that the record keeps."""
SAID = 500
"""The same, for the message of tests that gave no reward."""

_NO_TOOLS = re.compile(
    r"could not resolve host|temporary failure in name resolution|temporary failure resolving|failed to connect to"
    r"|connection timed out|failed to download|failed to fetch|unable to locate package|network is unreachable"
    r"|could not find a version that satisfies|no matching distribution found|max retries exceeded|ssl_error_syscall"
    r"|(?:curl|wget|uv|uvx|pip|pip3|pytest|apt-get|python3?): (?:command )?not found|no module named '?pytest"
    r"|error sending request for url|dns error",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PartVerdict:
    """What the tests of a part said."""

    reward: float
    details: Mapping[str, Any]
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All rewards, by name; none if the tests gave none."""

    @property
    def tampered(self) -> list[str]:
        """Return what the agent did to forge its reward."""
        return [*self.details.get("tampered", ())]


class TestsCouldNotRun(VerifierError):
    """The tests lacked their own tools, such as pytest, because a download failed. It says nothing about the agent."""


@dataclass(frozen=True)
class Verification:
    """Checks the parts of one task in one rollout."""

    rollout: RolloutHandle
    task: HarborTask
    config: HarborConfig
    beginning: Beginning

    async def of(self, part: TaskPart, *, begun: bool) -> PartVerdict:
        """Run the tests of a part where they belong, and return what they said.

        Args:
            begun: whether they were begun before, and broken off; what they left is then no forgery.

        Raises:
            TestsCouldNotRun: they lacked their own tools.
            VerifierError: they wrote no valid reward.
        """
        if (alive := await kill_others(self.rollout.commands, self.beginning)) is not None:
            return tampered([f"its processes can't be killed: {alive}"])
        details: dict[str, Any] = {}
        collection = Collection()
        if part.place is not None or part.verifier.collect or self.config.artifacts_dir is not None:
            collection = await collect_artifacts(
                self.rollout,
                part.verifier.collect,
                part.artifacts,
                directory(self.rollout, self.task.workdir),
                self.config,
            )
            details["artifacts"] = collection.manifest
        if self.config.artifacts_dir is not None:
            name = "-".join(each for each in (self.rollout.trajectory_id, part.name) if each)
            kept = await asyncio.to_thread(keep, collection, self.config.artifacts_dir, name)
            details["artifacts_in"] = kept and str(kept)
        if part.place is None:
            return await self._shared(part, details, begun=begun)
        return await self._separate(part, part.place, collection, details)

    async def _shared(self, part: TaskPart, details: dict[str, Any], *, begun: bool) -> PartVerdict:
        """Run the tests in the agent's sandbox."""
        commands = self.rollout.commands
        cleared = await clear(commands, self.beginning)
        if cleared.forged and not begun:
            return tampered([*cleared.forged])
        if cleared.removed:
            details["removed"] = [*cleared.removed]
        await self._upload_tests(commands, part)
        with contextlib.suppress(SetupFailed):  # it ended with the agent's processes, and the agent may have broken it
            await start_image(self.rollout, self.task.workdir)
        return await self._scored(self.rollout, part, self.beginning, details)

    async def _separate(
        self, part: TaskPart, place: VerifierSandbox, collection: Collection, details: dict[str, Any]
    ) -> PartVerdict:
        """Run the tests in a fresh sandbox of their own, which gets only the artifacts."""
        cwd, image = place.workdir or Cwd.IMAGE, place.image or self.task.image
        async with self.rollout.fresh_slot(image=place.image, cwd=cwd, env=place.variables) as fresh:
            commands = fresh.commands
            try:
                await script(commands, 'mkdir -p -- "$1"', directory(fresh, place.workdir))
                beginning = await begin(fresh)
                await start_image(fresh, place.workdir)
                await lay_out(commands, collection)
                await tidy(commands, beginning)  # an artifact may have brought a reward
            except SetupFailed as error:
                raise VerifierError(f"the sandbox of the tests: {error.message}", hint=error.hint) from error
            if not place.has_tests:
                await self._upload_tests(commands, part)
            return await self._scored(fresh, part, beginning, {**details, "tests_in": str(image) if image else None})

    async def _upload_tests(self, commands: SlotCommands, part: TaskPart) -> None:
        try:
            for folder in part.tests:
                if folder.is_dir():
                    await upload(commands, folder, "/tests", self.config.max_upload_bytes)
        except SetupFailed as error:
            raise VerifierError(error.message) from error

    async def _scored(
        self, leased: SlotHandle, part: TaskPart, beginning: Beginning, details: dict[str, Any]
    ) -> PartVerdict:
        """Run /tests/test.sh and return its reward."""
        commands, config, limit_s = leased.commands, self.config, part.verifier.timeout_sec
        packages = Packages()
        if config.package_cache is not None:
            packages = await asyncio.to_thread(packages_of, config.package_cache)
        try:
            await offer(commands, packages, config.max_upload_bytes)
        except SetupFailed as error:
            raise VerifierError(error.message) from error
        run = partial(
            run_script,
            leased,
            "/tests/test.sh",
            user=part.verifier.user,
            env={**packages.variables, **part.verifier_variables},
            timeout_s=limit_s,
            output=f"{LOGS}/test-stdout.txt",
            programs=packages.programs,
        )
        ran, starved = await watched(commands, run(), limit_s)
        await kill_others(commands, beginning)
        if ran.timed_out and starved is not None:
            await script(commands, "rm -rf /logs/verifier && mkdir /logs/verifier && chmod 777 /logs/verifier")
            ran = await self.rollout.check_again(leased, starved, run)
            await kill_others(commands, beginning)
        output = ran.text + await tail(commands, f"{LOGS}/test-stdout.txt")
        details = {**details, "exit_code": ran.returncode, "output": output.strip()[-OUTPUT_KEPT:]}
        if ran.timed_out:
            return PartVerdict(0.0, {**details, "reason": f"the tests did not end within {limit_s:g} s"})
        left = await _left(commands)
        try:
            rewards = await _rewards(commands, left)
            reward = the_reward(rewards, config.reward_key, config.least_reward, config.most_reward)
        except VerifierError as error:
            await self._check_tools(part, output, left, error)
            where = f", step {part.name!r}" if part.name else ""
            said = output.strip()[-SAID:]
            ending = f"; the end of their output: {said}" if said else "; they printed nothing"
            raise VerifierError(f"task {self.task.id!r}{where}: {error.message}{ending}", hint=error.hint) from error
        if reward <= config.least_reward:
            await self._check_tools(part, output, left, None)
        if len(rewards) > 1 or "reward" not in rewards:
            details["rewards"] = rewards
        return PartVerdict(reward, {**details, **await _counts(commands, left)}, rewards)

    async def _check_tools(
        self, part: TaskPart, output: str, left: Mapping[str, str], cause: VerifierError | None
    ) -> None:
        """Tell tests that failed for want of their own tools from tests that failed.

        A test script that makes a report (`ctrf.json`) and has made none did not get as far as the tests. If its output
        says that a download failed or a tool is missing, it could not run.

        Raises:
            TestsCouldNotRun: they could not.
        """
        missing = _NO_TOOLS.search(output)
        if missing is None or left[REPORT] != "none" or not await _makes_report(part):
            return
        raise TestsCouldNotRun(
            f"the tests of task {self.task.id!r} could not run: {_line_around(output, missing)}",
            hint="put the tools of the tests into the task's image, or give its sandbox the network that they need",
        ) from cause


def tampered(reasons: list[str]) -> PartVerdict:
    """Return the verdict on a part in which the agent tried to forge its reward."""
    reason = f"the agent tampered with its verification: {'; '.join(reasons)}"
    return PartVerdict(0.0, {"reason": reason, "tampered": reasons})


async def _left(commands: SlotCommands) -> Mapping[str, str]:
    """Return the kind of everything by which tests say what came of them: of the directories, and of the files."""
    paths = ("/logs", LOGS, *(f"{LOGS}/{name}" for name in (*REWARDS, REPORT)))
    return dict(zip(("/logs", LOGS, *REWARDS, REPORT), await kinds(commands, *paths), strict=True))


async def _rewards(commands: SlotCommands, left: Mapping[str, str]) -> Mapping[str, float]:
    """Return the rewards that the tests wrote, by name.

    Raises:
        VerifierError: there are none, or they can't be used.
    """
    if (left["/logs"], left[LOGS]) != ("dir", "dir"):
        raise VerifierError(f"{LOGS} is no directory any more, so the tests' reward can't be trusted")
    for name in REWARDS:
        if (kind := left[name]) == "none":
            continue
        if kind != "file":
            raise VerifierError(f"{name} is a {kind} and no file, so it can't be trusted")
        try:
            content = await commands.read_file(f"{LOGS}/{name}", limit=MAX_REWARD_BYTES + 1)
        except CommandError as error:
            raise VerifierError(f"{name} can't be read: {error.message}") from error
        return rewards_in(name, content.data)
    raise VerifierError(
        "the tests wrote neither reward.json nor reward.txt", hint="have test.sh write /logs/verifier/reward.txt"
    )


async def _makes_report(part: TaskPart) -> bool:
    """Return whether the test script names the report."""
    scripts = [folder / "test.sh" for folder in part.tests if (folder / "test.sh").is_file()]
    return bool(scripts) and b"ctrf" in await asyncio.to_thread(scripts[-1].read_bytes)


async def _counts(commands: SlotCommands, left: Mapping[str, str]) -> dict[str, Any]:
    """Return how many tests passed and failed, as the report says, if there is one. It decides nothing."""
    if left[REPORT] != "file":
        return {}
    try:
        report = await commands.read_file(f"{LOGS}/{REPORT}", limit=MAX_OUTPUT)
        summary = json.loads(report.data)["results"]["summary"]
        return {key: int(summary[key]) for key in ("passed", "failed")}
    except (CommandError, ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return {}


def _line_around(text: str, found: re.Match[str]) -> str:
    begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[begin : end if end >= 0 else None].strip()[:300]
