"""Takes a rollout through the parts of its task, and combines the rewards of the parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_core import CommandError, RolloutHandle, SetupFailed
from hermes_harbor.config import HarborConfig
from hermes_harbor.container import Beginning, as_user, directory, run_script, tidy, upload
from hermes_harbor.healthcheck import wait_until_healthy
from hermes_harbor.tasks import HarborTask, TaskPart
from hermes_harbor.verify import PartVerdict, Verification

Score = tuple[float, dict[str, Any]]


@dataclass
class StepProgress:
    """The progress of a rollout through the parts of its task."""

    beginning: Beginning
    verdicts: list[PartVerdict] = field(default_factory=list)
    """The verdicts on the parts that are done, in order."""
    over: str | None = None
    """The reason why no further part is begun; None if the next part may begin."""
    excused: bool = False
    """Whether the parts that are not begun do not count, because a reward below `min_reward` ended the task."""
    checking: bool = False
    """Whether the tests of the current part were begun."""


async def prepare_part(rollout: RolloutHandle, task: HarborTask, part: TaskPart, config: HarborConfig) -> None:
    """Put a step's files into the working directory, run its `setup.sh`, and wait until its health check succeeds.

    Raises:
        SetupFailed: the files can't be copied, `setup.sh` failed, or the health check failed.
    """
    where = f"step {part.name!r}"
    if part.workdir is not None:
        target = directory(rollout, task.workdir)
        await upload(rollout.commands, part.workdir, target, config.max_upload_bytes)
        if (part.workdir / "setup.sh").is_file():
            user = part.agent.user
            done = await run_script(rollout, f"{target}/setup.sh", user=user, env={}, timeout_s=None)
            if not done.ok:
                said = done.text.strip()[-500:]
                raise SetupFailed(f"setup.sh of {where} ended with status {done.returncode}: {said}")
    if part.healthcheck is not None:
        await wait_until_healthy(as_user(rollout, part.agent.user), part.healthcheck, f"the healthcheck of {where}")


async def check_part(verification: Verification, progress: StepProgress) -> PartVerdict:
    """Run the tests of the current part, and note the verdict. Set `progress.over` if the next part must not begin."""
    task = verification.task
    part = task.parts[len(progress.verdicts)]
    begun, progress.checking = progress.checking, True
    verdict = await verification.of(part, begun=begun)
    progress.verdicts.append(verdict)
    progress.checking = False
    low = [name for name, least in part.min_reward.items() if verdict.rewards.get(name, float("-inf")) < least]
    if verdict.forgeries:
        progress.over = f"the agent tampered with step {part.name!r}"
    elif low:
        progress.over = f"step {part.name!r} is below its min_reward of {', '.join(low)}"
        progress.excused = True
    return verdict


async def begin_next(
    rollout: RolloutHandle, task: HarborTask, progress: StepProgress, config: HarborConfig
) -> TaskPart | None:
    """Prepare the next part, and return it. If that fails, return None: the part counts 0, because the agent may be the
    cause."""
    part = task.parts[len(progress.verdicts)]
    try:
        await tidy(rollout.commands, progress.beginning)
        await prepare_part(rollout, task, part, config)
    except (SetupFailed, CommandError) as error:
        progress.over = f"step {part.name!r} could not begin: {error.message}"
        return None
    return part


def combine_verdicts(task: HarborTask, progress: StepProgress) -> Score:
    """Return the reward of the whole task, with details of each step."""
    verdicts = progress.verdicts
    if not task.parts[0].name:
        return verdicts[0].reward, dict(verdicts[0].details)
    steps = [_step(part, verdict) for part, verdict in zip(task.parts, verdicts, strict=False)]
    left = [part.name for part in task.parts[len(verdicts) :]]
    reason = progress.over or ("the agent stopped before the last step" if left else None)
    details: dict[str, Any] = {"steps": steps, **({"not_begun": left, "reason": reason} if left and reason else {})}
    if forgeries := [each for verdict in verdicts for each in verdict.forgeries]:
        return 0.0, {**details, "reason": progress.over, "tampered": forgeries}
    rewards = [verdict.reward for verdict in verdicts] + [0.0] * (0 if progress.excused else len(left))
    if task.toml.multi_step_reward_strategy == "final":
        return rewards[-1], details
    return sum(rewards) / len(rewards), details


def _step(part: TaskPart, verdict: PartVerdict) -> Mapping[str, Any]:
    return {"name": part.name, "reward": verdict.reward, **verdict.details}
