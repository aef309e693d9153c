"""Runs a task's tests in the agent's sandbox, after its processes are dead, and reads the reward that they write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hermes_core import CommandError, SetupFailed, SlotCommands, VerifierError
from hermes_harbor.config import HarborConfig
from hermes_harbor.container import (
    MAX_OUTPUT,
    Beginning,
    clear,
    kill_others,
    kinds,
    run_script,
    upload,
)
from hermes_harbor.rewards import MAX_REWARD_BYTES, rewards_in, the_reward
from hermes_harbor.tasks import Task

LOGS = "/logs/verifier"
OUTPUT_KEPT = 4000
"""Number of characters of the tests' output that the record keeps."""

_NO_TOOLS = re.compile(
    r"could not resolve host|temporary failure in name resolution|temporary failure resolving|failed to connect to"
    r"|connection timed out|failed to download|failed to fetch|unable to locate package|network is unreachable"
    r"|could not find a version that satisfies|no matching distribution found|max retries exceeded|ssl_error_syscall"
    r"|(?:curl|wget|uv|uvx|pip|pip3|pytest|apt-get|python3?): (?:command )?not found|no module named '?pytest"
    r"|error sending request for url|dns error",
    re.IGNORECASE,
)

Score = tuple[float, dict[str, Any]]


class TestsCouldNotRun(VerifierError):
    """The tests lacked their own tools, such as pytest, because a download failed. It says nothing about the agent."""


async def verified(commands: SlotCommands, task: Task, beginning: Beginning, config: HarborConfig) -> Score:
    """Run the tests where the agent worked, and return the reward with details.

    Raises:
        VerifierError: the tests wrote no valid reward.
    """
    if (alive := await kill_others(commands, beginning)) is not None:
        return tampered([f"its processes can't be killed: {alive}"])
    cleared = await clear(commands, beginning)
    if cleared.forged:
        return tampered([*cleared.forged])
    details: dict[str, Any] = {"removed": [*cleared.removed]} if cleared.removed else {}
    await _upload_tests(commands, task, config)
    return await scored(commands, task, beginning, config, details)


async def _upload_tests(commands: SlotCommands, task: Task, config: HarborConfig) -> None:
    try:
        await upload(commands, task.tests, "/tests", config.max_upload_bytes)
    except SetupFailed as error:
        raise VerifierError(error.message) from error


async def scored(
    commands: SlotCommands, task: Task, beginning: Beginning, config: HarborConfig, details: dict[str, Any]
) -> Score:
    """Run /tests/test.sh and return its reward.

    Raises:
        TestsCouldNotRun: they lacked their own tools.
        VerifierError: they wrote no valid reward.
    """
    verifier = task.toml.verifier
    ran = await run_script(
        commands,
        "/tests/test.sh",
        user=verifier.user,
        env=task.verifier_variables,
        timeout_s=verifier.timeout_sec,
        output=f"{LOGS}/test-stdout.txt",
    )
    await kill_others(commands, beginning)
    output = ran.text + await _output(commands)
    details = {**details, "exit_code": ran.returncode, "output": output.strip()[-OUTPUT_KEPT:]}
    if ran.timed_out:
        return 0.0, {**details, "reason": f"the tests did not end within {verifier.timeout_sec:g} s"}
    try:
        rewards = await _rewards(commands)
        reward = the_reward(rewards, config.reward_key, config.least_reward, config.most_reward)
    except VerifierError as error:
        await _check_tools(commands, task, output, error)
        raise VerifierError(f"task {task.id!r}: {error.message}", hint=error.hint) from error
    if reward <= config.least_reward:
        await _check_tools(commands, task, output, None)
    if len(rewards) > 1 or "reward" not in rewards:
        details["rewards"] = rewards
    return reward, {**details, **await _counts(commands)}


def tampered(reasons: list[str]) -> Score:
    """Return the score of a rollout that tried to forge its reward."""
    return 0.0, {"reason": f"the agent tampered with its verification: {'; '.join(reasons)}", "tampered": reasons}


async def _rewards(commands: SlotCommands) -> Mapping[str, float]:
    """Return the rewards that the tests wrote, by name.

    Raises:
        VerifierError: there are none, or they can't be used.
    """
    names = ("reward.json", "reward.txt")
    logs, directory, *found = await kinds(commands, "/logs", LOGS, *(f"{LOGS}/{name}" for name in names))
    if (logs, directory) != ("dir", "dir"):
        raise VerifierError(f"{LOGS} is no directory any more, so the tests' reward can't be trusted")
    for name, kind in zip(names, found, strict=True):
        if kind == "none":
            continue
        if kind != "file":
            raise VerifierError(f"{name} is a {kind} and no file, so it can't be trusted")
        try:
            content = await commands.read_file(f"{LOGS}/{name}", limit=MAX_REWARD_BYTES + 1)
        except CommandError as error:
            raise VerifierError(f"{name} can't be read: {error.message}") from error
        return rewards_in(name, content.data)
    raise VerifierError(
        "the tests wrote neither reward.json nor reward.txt", hint="their output is in the message of the record"
    )


async def _check_tools(commands: SlotCommands, task: Task, output: str, cause: VerifierError | None) -> None:
    """Tell tests that failed for want of their own tools from tests that failed.

    A test script that makes a report (`ctrf.json`) and has made none did not get as far as the tests. If its output
    says that a download failed or a tool is missing, it could not run.

    Raises:
        TestsCouldNotRun: they could not.
    """
    missing = _NO_TOOLS.search(output)
    if missing is None or not await _report_is_missing(commands, task):
        return
    raise TestsCouldNotRun(
        f"the tests of task {task.id!r} could not run: {_line_around(output, missing)}",
        hint="put the tools of the tests into the task's image, or give its sandbox the network that they need",
    ) from cause


async def _report_is_missing(commands: SlotCommands, task: Task) -> bool:
    script = (task.tests / "test.sh").read_bytes()
    return b"ctrf" in script and await kinds(commands, f"{LOGS}/ctrf.json") == ["none"]


async def _counts(commands: SlotCommands) -> dict[str, Any]:
    """Return how many tests passed and failed, as the report says, if there is one. It decides nothing."""
    try:
        report = await commands.read_file(f"{LOGS}/ctrf.json", limit=MAX_OUTPUT)
        summary = json.loads(report.data)["results"]["summary"]
        return {key: int(summary[key]) for key in ("passed", "failed")}
    except (CommandError, ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return {}


async def _output(commands: SlotCommands) -> str:
    path = f"{LOGS}/test-stdout.txt"
    try:
        if await kinds(commands, path) != ["file"]:
            return ""
        size = (await commands.stat(path)).size
        tail = await commands.read_file(path, offset=max(0, size - MAX_OUTPUT), limit=MAX_OUTPUT)
    except CommandError:
        return ""
    return tail.data.decode("utf-8", "replace")


def _line_around(text: str, found: re.Match[str]) -> str:
    begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[begin : end if end >= 0 else None].strip()[:300]
