"""Runs the tests of a task or a step, in the agent's sandbox or in a fresh one, and reads the reward that they
write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hermes_core import (
    CommandError,
    CommandResult,
    Cwd,
    RolloutHandle,
    SetupFailed,
    SlotCommands,
    SlotHandle,
    VerifierError,
    watch_for_starvation,
)
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
"""The files to which tests write their reward. The first one that exists counts."""
REPORT = "ctrf.json"
"""The file with the numbers of passed and failed tests, which tests may write."""
OUTPUT_KEPT = 4000
"""Number of last characters of the tests' output that the record keeps."""
OUTPUT_SHOWN = 500
"""Number of last characters of the tests' output in the error of tests that gave no reward."""

_NO_TOOLS = re.compile(
    r"could not resolve host|temporary failure in name resolution|temporary failure resolving|failed to connect to"
    r"|connection timed out|failed to download|failed to fetch|unable to locate package|network is unreachable"
    r"|could not find a version that satisfies|no matching distribution found|max retries exceeded|ssl_error_syscall"
    r"|(?:curl|wget|uv|uvx|pip|pip3|pytest|apt-get|python3?): (?:command )?not found|no module named '?pytest"
    r"|error sending request for url|dns error|tunnel (?:connection )?failed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PartVerdict:
    """The outcome of a part's tests."""

    reward: float
    details: Mapping[str, Any]
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All rewards by name; empty if the tests gave none."""

    @property
    def forgeries(self) -> list[str]:
        """Return the agent's attempts to forge its reward."""
        return [*self.details.get("tampered", ())]


class TestsCouldNotRun(VerifierError):
    """The tests lacked their own tools, such as pytest, because a download failed. The agent is not to blame."""


@dataclass(frozen=True)
class Verification:
    """Checks the parts of one task in one rollout."""

    rollout: RolloutHandle
    task: HarborTask
    config: HarborConfig
    beginning: Beginning

    async def of(self, part: TaskPart, *, begun: bool) -> PartVerdict:
        """Run the tests of a part, and return their verdict.

        Args:
            begun: whether an earlier run of the tests was broken off. Then a reward that is there already may come
                from that run, and is no forgery.

        Raises:
            TestsCouldNotRun: the tests lacked their own tools.
            VerifierError: the tests wrote no valid reward.
        """
        if (alive := await kill_others(self.rollout.commands, self.beginning)) is not None:
            return forgery_verdict([f"its processes can't be killed: {alive}"])
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
            path = await asyncio.to_thread(keep, collection, self.config.artifacts_dir, name)
            details["artifacts_in"] = path and str(path)
        if part.place is None:
            return await self._verify_in_place(part, details, begun=begun)
        return await self._verify_apart(part, part.place, collection, details)

    async def _verify_in_place(self, part: TaskPart, details: dict[str, Any], *, begun: bool) -> PartVerdict:
        """Run the tests in the agent's sandbox."""
        commands = self.rollout.commands
        traces = await clear(commands, self.beginning)
        if traces.forged and not begun:
            return forgery_verdict([*traces.forged])
        if traces.removed:
            details["removed"] = [*traces.removed]
        await self._upload_tests(commands, part)
        # The image's service ended with the agent's processes. If it can't start again, the agent may have broken it.
        with contextlib.suppress(SetupFailed):
            await start_image(self.rollout, self.task.workdir)
        return await self._run_tests(self.rollout, part, self.beginning, details)

    async def _verify_apart(
        self, part: TaskPart, place: VerifierSandbox, collection: Collection, details: dict[str, Any]
    ) -> PartVerdict:
        """Run the tests in a fresh sandbox, which gets only the artifacts of the agent's work."""
        cwd, image = place.workdir or Cwd.IMAGE, place.image or self.task.image
        async with self.rollout.fresh_slot(image=place.image, cwd=cwd, env=place.variables) as fresh:
            commands = fresh.commands
            try:
                await script(commands, 'mkdir -p -- "$1"', directory(fresh, place.workdir))
                beginning = await begin(fresh)
                await start_image(fresh, place.workdir)
                await lay_out(commands, collection)
                await tidy(commands, beginning)  # an artifact may have a reward in it
            except SetupFailed as error:
                raise VerifierError(f"the sandbox of the tests: {error.message}", hint=error.hint) from error
            if not place.has_tests:
                await self._upload_tests(commands, part)
            details["tests_in"] = str(image) if image else None
            return await self._run_tests(fresh, part, beginning, details)

    async def _upload_tests(self, commands: SlotCommands, part: TaskPart) -> None:
        try:
            for folder in part.tests:
                if folder.is_dir():
                    await upload(commands, folder, "/tests", self.config.max_upload_bytes)
        except SetupFailed as error:
            raise VerifierError(error.message) from error

    async def _run_tests(
        self, leased: SlotHandle, part: TaskPart, beginning: Beginning, details: dict[str, Any]
    ) -> PartVerdict:
        """Run the tests of a part, which are in /tests, and read their reward."""
        commands, config = leased.commands, self.config
        result = await self._run_script(leased, part, beginning)
        output = result.text + await tail(commands, f"{LOGS}/test-stdout.txt")
        details = {**details, "exit_code": result.returncode, "output": output.strip()[-OUTPUT_KEPT:]}
        if result.timed_out:
            reason = f"the tests did not end within {part.verifier.timeout_sec:g} s"
            return PartVerdict(0.0, {**details, "reason": reason})
        files = await _kinds_of_files(commands)
        try:
            rewards = await _rewards(commands, files)
            reward = the_reward(rewards, config.reward_key, config.least_reward, config.most_reward)
        except VerifierError as error:
            await self._check_tools(part, output, files, error)
            where = f", step {part.name!r}" if part.name else ""
            end = output.strip()[-OUTPUT_SHOWN:]
            ending = f"; the end of their output: {end}" if end else "; they printed nothing"
            raise VerifierError(f"task {self.task.id!r}{where}: {error.message}{ending}", hint=error.hint) from error
        if reward <= config.least_reward:
            await self._check_tools(part, output, files, None)
        if len(rewards) > 1 or "reward" not in rewards:
            details["rewards"] = rewards
        return PartVerdict(reward, {**details, **await _counts(commands, files)}, rewards)

    async def _run_script(self, leased: SlotHandle, part: TaskPart, beginning: Beginning) -> CommandResult:
        """Run /tests/test.sh, and kill the processes that it leaves. If the script ran out of time because the sandbox
        was starved of processor time, run it once more when nothing else runs there."""
        commands, limit_s = leased.commands, part.verifier.timeout_sec
        packages = Packages()
        if self.config.package_cache is not None:
            packages = await asyncio.to_thread(packages_of, self.config.package_cache)
        try:
            await offer(commands, packages, self.config.max_upload_bytes)
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
        result, starved = await watch_for_starvation(commands, run(), limit_s)
        await kill_others(commands, beginning)
        if result.timed_out and starved is not None:
            await script(commands, f"rm -rf {LOGS} && mkdir {LOGS} && chmod 777 {LOGS}")
            result = await self.rollout.check_again(leased, starved, run)
            await kill_others(commands, beginning)
        return result

    async def _check_tools(
        self, part: TaskPart, output: str, files: Mapping[str, str], cause: VerifierError | None
    ) -> None:
        """Check that tests without a reward did not fail for want of their own tools.

        If the test script would write a report (`ctrf.json`), but there is none, the script did not get as far as the
        tests. If its output also says that a download failed or a tool is missing, the tests could not run.

        Raises:
            TestsCouldNotRun: the tests lacked their tools.
        """
        missing = _NO_TOOLS.search(output)
        if missing is None or files[REPORT] != "none" or not await _makes_report(part):
            return
        raise TestsCouldNotRun(
            f"the tests of task {self.task.id!r} could not run: {_line_around(output, missing)}",
            hint="put the tools of the tests into the task's image, or give its sandbox the network that they need",
        ) from cause


def forgery_verdict(forgeries: list[str]) -> PartVerdict:
    """Return the verdict on a part in which the agent tried to forge its reward."""
    reason = f"the agent tampered with its verification: {'; '.join(forgeries)}"
    return PartVerdict(0.0, {"reason": reason, "tampered": forgeries})


async def _kinds_of_files(commands: SlotCommands) -> Mapping[str, str]:
    """Return the kinds of the files that tests write, by name, and of their directories, by path. See `kinds`."""
    paths = ("/logs", LOGS, *(f"{LOGS}/{name}" for name in (*REWARDS, REPORT)))
    return dict(zip(("/logs", LOGS, *REWARDS, REPORT), await kinds(commands, *paths), strict=True))


async def _rewards(commands: SlotCommands, files: Mapping[str, str]) -> Mapping[str, float]:
    """Return the rewards that the tests wrote, by name.

    Raises:
        VerifierError: there is no reward, or a reward can't be used.
    """
    if (files["/logs"], files[LOGS]) != ("dir", "dir"):
        raise VerifierError(f"{LOGS} is no directory any more, so the tests' reward can't be trusted")
    for name in REWARDS:
        if (kind := files[name]) == "none":
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
    """Return whether the test script makes the report, by its text."""
    scripts = [folder / "test.sh" for folder in part.tests if (folder / "test.sh").is_file()]
    return bool(scripts) and b"ctrf" in await asyncio.to_thread(scripts[-1].read_bytes)


async def _counts(commands: SlotCommands, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of passed and failed tests in the report, if there is one. They do not affect the reward."""
    if files[REPORT] != "file":
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
