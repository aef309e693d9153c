"""Checks that tasks are sound: on each item, every time, the reference solution scores 1.0 and doing nothing 0.0.

An environment may know more about a rollout than its reward says, and doubt the item (`Environment.doubt`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hermes_core.agents.base import AgentSettings
from hermes_core.environment import Environment, Item
from hermes_core.envs.options import RunOptions
from hermes_core.envs.runner import Jobs, Run
from hermes_core.envs.session import broken, check_scored, open_agent, open_session
from hermes_core.envs.summary import NoProgress, Progress
from hermes_core.runtime import Runtime
from hermes_core.validation import validated

EXPECTED = {"oracle": 1.0, "nop": 0.0}
"""The reward that each baseline must get."""


@dataclass
class Verdict:
    """The results of one baseline on one item."""

    item_id: str
    agent: str
    rewards: list[float | None] = field(default_factory=list)
    """None for a rollout without a reward."""
    failures: list[str] = field(default_factory=list)
    """The messages of rollouts without a reward."""
    details: list[Mapping[str, Any]] = field(default_factory=list)
    """Details of the verification for each reward that is not the expected one."""
    doubts: list[str] = field(default_factory=list)
    """What the environment said about rollouts that have the expected reward but show another fault of the item."""

    @property
    def sound(self) -> bool:
        """Return whether it got the expected reward every time, without a doubt."""
        return self._right == len(self.rewards)

    @property
    def flaky(self) -> bool:
        """Return whether it got the expected reward without a doubt only sometimes."""
        return 0 < self._right < len(self.rewards)

    @property
    def _right(self) -> int:
        return self.rewards.count(EXPECTED[self.agent]) - len(self.doubts)


@dataclass(frozen=True)
class Validation:
    """The outcome of `validate`."""

    items: int
    repeat: int
    unsound: tuple[Verdict, ...]
    """Baselines and items that were not sound every time."""
    stopped: str | None = None
    """Why it ended before everything had been tried, or None."""

    @property
    def sound(self) -> bool:
        """Return whether every item passed every time."""
        return not self.unsound and self.stopped is None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
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
        check_scored(session.environment)
        jobs = Jobs(session, repeat)
        items = {session.environment.item_id(item): item for item in session.environment.selected_items()}
        async with session.sandboxes(len(jobs)) as context:
            for agent in EXPECTED:
                found: dict[str, Verdict] = {}
                collect = _collector(session.environment, items, agent, found)
                run = Run(
                    session.tools,
                    jobs,
                    collect,
                    progress=progress(agent),
                    stop_on_infra=chosen.stop_on_infra,
                    prefetch=chosen.prefetch,
                )
                async with open_agent(runtime, agent, AgentSettings()) as worker:
                    summary = await run.all(replace(context, agent=worker), session.room)
                stopped = stopped or summary.stopped
                verdicts += found.values()
    return Validation(len(jobs) // repeat, repeat, tuple(verdict for verdict in verdicts if not verdict.sound), stopped)


def _collector(
    environment: Environment, items: Mapping[str, Item], agent: str, found: dict[str, Verdict]
) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that collects the records of one agent by item."""

    def doubt(item: Item, details: Mapping[str, Any]) -> str | None:
        try:
            return environment.doubt(item, agent, details)
        except Exception as error:
            raise broken(environment, "doubt()", error) from error

    def take(record: Mapping[str, Any]) -> None:
        verdict = found.setdefault(record["item_id"], Verdict(record["item_id"], agent))
        verdict.rewards.append(record["reward"])
        if record["failure"]:
            verdict.failures.append(f"{record['failure']['stage']}: {record['failure']['message']}")
        elif record["reward"] != EXPECTED[agent]:
            verdict.details.append(record["details"])
        elif said := doubt(items[record["item_id"]], record["details"]):
            verdict.doubts.append(said)

    return take
