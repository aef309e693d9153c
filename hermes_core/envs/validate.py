"""Are the tasks sound? The reference solution must score 1.0 and doing nothing 0.0, on each item, every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hermes_core.agents.base import AgentSettings
from hermes_core.environment import Environment
from hermes_core.envs.options import RunOptions
from hermes_core.envs.runner import Jobs, Run
from hermes_core.envs.session import open_agent, open_session
from hermes_core.envs.summary import NoProgress, Progress
from hermes_core.runtime import Runtime
from hermes_core.validation import validated

EXPECTED = {"oracle": 1.0, "nop": 0.0}
"""The reward that each baseline must get."""


@dataclass
class Verdict:
    """What one baseline got on one item, and how often."""

    item_id: str
    agent: str
    rewards: list[float | None] = field(default_factory=list)
    """None for a rollout without a reward."""
    failures: list[str] = field(default_factory=list)
    """What those said."""
    details: list[Mapping[str, Any]] = field(default_factory=list)
    """What the verification said of each reward that is not the expected one."""

    @property
    def sound(self) -> bool:
        """Whether it got the expected reward every time."""
        return all(reward == EXPECTED[self.agent] for reward in self.rewards)

    @property
    def flaky(self) -> bool:
        """Whether it got the expected reward sometimes only."""
        return not self.sound and EXPECTED[self.agent] in self.rewards


@dataclass(frozen=True)
class Validation:
    """The outcome of `validate`."""

    items: int
    repeat: int
    unsound: tuple[Verdict, ...]
    """What did not get the expected reward every time."""
    stopped: str | None = None
    """Why it ended before everything had been tried."""

    @property
    def sound(self) -> bool:
        """Whether every item passed every time."""
        return not self.unsound and self.stopped is None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        unsound = [{**asdict(verdict), "flaky": verdict.flaky} for verdict in self.unsound]
        return {
            "items": self.items,
            "repeat": self.repeat,
            "sound": self.sound,
            "stopped": self.stopped,
            "unsound": unsound,
        }


async def validate(
    runtime: Runtime,
    environment: str | Environment,
    *,
    env: Mapping[str, Any] | None = None,
    repeat: int = 1,
    progress: Callable[[str], Progress] = lambda agent: NoProgress(),
    **options: Any,
) -> Validation:
    """Let `oracle` and `nop` work on each item, `repeat` times, on the same sandboxes.

    Args:
        progress: the display for each of the two agents, by its name.
        options: the fields of `RunOptions`; `group_size` is `repeat`.

    Raises:
        HermesError: as `run_rollouts` does.
    """
    chosen = validated(RunOptions, {**options, "group_size": repeat}, "the run")
    verdicts: list[Verdict] = []
    stopped = None
    async with open_session(runtime, environment, "oracle", chosen, env=env) as session:
        jobs = Jobs(session.environment, repeat)
        async with session.sandboxes(len(jobs)) as context:
            for agent in EXPECTED:
                found: dict[str, Verdict] = {}
                run = Run(session.tools, jobs, _collector(agent, found), (), progress(agent), chosen.stop_on_infra)
                async with open_agent(runtime, agent, AgentSettings()) as worker:
                    summary = await run.all(replace(context, agent=worker), session.room)
                stopped = stopped or summary.stopped
                verdicts += found.values()
    return Validation(len(jobs) // repeat, repeat, tuple(verdict for verdict in verdicts if not verdict.sound), stopped)


def _collector(agent: str, found: dict[str, Verdict]) -> Callable[[Mapping[str, Any]], None]:
    """Gathers the records of one agent by item."""

    def take(record: Mapping[str, Any]) -> None:
        verdict = found.setdefault(record["item_id"], Verdict(record["item_id"], agent))
        verdict.rewards.append(record["reward"])
        if record["failure"]:
            verdict.failures.append(f"{record['failure']['stage']}: {record['failure']['message']}")
        elif record["reward"] != EXPECTED[agent]:
            verdict.details.append(record["details"])

    return take
