"""Judges whether items are sound, by the rewards of the baselines and the cheats on each backend.

`EXPECTED` has the reward that each baseline must get. A failure of the infrastructure or of the endpoint, a missing
image, and a cancelled rollout say nothing about an item: the item counts as not tried. A failure of the setup or of the
verification is the item's fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hermes_core.agents.baselines import CHEAT
from hermes_core.errors import FailureKind

EXPECTED = {"oracle": 1.0, "nop": 0.0}
"""The reward that each baseline must get. A cheat must get no more than `nop`."""

UNTRIED = frozenset({FailureKind.INFRA, FailureKind.IMAGE, FailureKind.MODEL, FailureKind.CANCELLED})
"""Kinds of failures that say nothing about the item."""

UNTRIED_BY_CHEATS = UNTRIED | {FailureKind.SETUP}
"""Kinds of failures that say nothing about the item if the agent is a cheat. They include a failed setup: the cheat
itself may be broken, and the baselines find a broken setup."""

KEPT = 3
"""Maximum number of messages, and of details, that are kept of one agent on one item."""


class Reason(StrEnum):
    """Why an item is not sound."""

    GOLD_FAILS = "gold-fails"
    """The reference solution never gets 1.0."""
    GOLD_FLAKES = "gold-flakes"
    """The reference solution does not always get the same reward."""
    NOP_SCORES = "nop-scores"
    """Doing nothing gets another reward than 0."""
    NOP_FAILS = "nop-fails"
    """A rollout that does nothing gets no reward at all, because its setup or its verification fails."""
    CHEAT_SOLVES = "cheat-solves"
    """A cheat gets a higher reward than doing nothing."""
    DOUBTED = "doubted"
    """The rewards are right, but the environment found another fault (`Environment.doubt`)."""
    DIFFERS = "differs"
    """Backends give different rewards."""


class ItemStatus(StrEnum):
    """The result of all checks of an item."""

    SOUND = "sound"
    UNSOUND = "unsound"
    NOT_TRIED = "not tried"
    """Some of the item's rollouts could not be tried, and the others show no fault."""


@dataclass(slots=True)
class Verdict:
    """The results of one agent on one item, on one backend."""

    item_id: str
    agent: str
    backend: str
    rewards: list[float | None] = field(default_factory=list)
    """The rewards of the rollouts that say something about the item; None for a failed setup or verification."""
    records: list[str] = field(default_factory=list)
    """The trajectory ids of these rollouts."""
    failures: list[str] = field(default_factory=list)
    """The first messages of failures that left rollouts without a reward."""
    details: list[Mapping[str, Any]] = field(default_factory=list)
    """The first details of verifications whose reward was not the expected one."""
    doubts: list[str] = field(default_factory=list)
    """The environment's texts on rollouts with the expected reward that show another fault of the item."""
    untried: list[str] = field(default_factory=list)
    """The reasons why rollouts say nothing about the item."""
    missing: int = 0
    """Number of rollouts that did not begin, or did not end."""

    def add(self, record: Mapping[str, Any], doubt: str | None) -> None:
        """Add the record of a rollout, and the environment's doubt about the item, if any."""
        failure = record["failure"]
        reason = failure and f"{failure['stage']}: {failure['message']}"
        self.missing -= 1
        if failure and FailureKind(failure["kind"]) in (UNTRIED_BY_CHEATS if self.cheats else UNTRIED):
            self.untried.append(reason)
            return
        self.rewards.append(record["reward"])
        self.records.append(record["trajectory_id"])
        if doubt is not None:
            self.doubts.append(doubt)
        if failure and len(self.failures) < KEPT:
            self.failures.append(reason)
        elif not failure and record["reward"] != self.expected and len(self.details) < KEPT:
            self.details.append(record["details"])

    @property
    def cheats(self) -> bool:
        """Return whether the agent cheats."""
        return self.agent.startswith(CHEAT)

    @property
    def expected(self) -> float:
        """Return the reward that the agent must get."""
        return EXPECTED.get(self.agent, 0.0)

    @property
    def right(self) -> int:
        """Return the number of rollouts with the expected reward and without a doubt."""
        return self.rewards.count(self.expected) - len(self.doubts)

    @property
    def tried(self) -> bool:
        """Return whether every rollout says something about the item."""
        return not self.untried and self.missing <= 0

    @property
    def sound(self) -> bool:
        """Return whether the agent got the expected reward every time, without a doubt of the environment."""
        return self.tried and self.right == len(self.rewards)

    @property
    def flaky(self) -> bool:
        """Return whether the agent's results are not all equal."""
        return len(set(self.rewards)) > 1 or 0 < len(self.doubts) < len(self.rewards)

    @property
    def best(self) -> float | None:
        """Return the highest reward; None if there is none."""
        return max((reward for reward in self.rewards if reward is not None), default=None)

    @property
    def why_untried(self) -> str | None:
        """Return the reason why a rollout says nothing about the item, or None."""
        if self.untried:
            return f"{self.agent} on {self.backend}: {self.untried[0]}"
        return f"{self.agent} on {self.backend}: {self.missing} rollouts were not ended" if self.missing > 0 else None


@dataclass(frozen=True)
class Finding:
    """One reason why an item is not sound, with the evidence."""

    item_id: str
    reason: Reason
    text: str
    """The observation, in one line."""
    backend: str | None = None
    """None if the finding is about several backends."""
    agent: str | None = None
    rewards: tuple[float | None, ...] = ()
    records: tuple[str, ...] = ()
    """The trajectory ids of the rollouts with these rewards."""


@dataclass(frozen=True)
class ItemResult:
    """All verdicts on one item, and the findings that follow from them."""

    item_id: str
    verdicts: Mapping[str, Mapping[str, Verdict]]
    """The verdicts by backend and agent."""
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, item_id: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> ItemResult:
        """Judge an item."""
        findings = [finding for agents in verdicts.values() for finding in _on_one_backend(agents)]
        return cls(item_id, verdicts, (*findings, *_differences(item_id, verdicts)))

    @property
    def status(self) -> ItemStatus:
        """Return the item's status. An item with a fault is unsound even if some of its rollouts could not be tried."""
        if self.findings:
            return ItemStatus.UNSOUND
        return ItemStatus.NOT_TRIED if self.untried else ItemStatus.SOUND

    @property
    def untried(self) -> list[str]:
        """Return the reasons why rollouts of the item were not tried."""
        all_of_it = (verdict.why_untried for agents in self.verdicts.values() for verdict in agents.values())
        return [why for why in all_of_it if why is not None]

    def unsound_verdicts(self) -> list[Verdict]:
        """Return the verdicts behind the findings about single backends."""
        named = {(finding.backend, finding.agent) for finding in self.findings if finding.backend is not None}
        return [self.verdicts[backend][agent] for backend, agent in sorted(named) if backend and agent]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "item_id": self.item_id,
            "status": str(self.status),
            "findings": [asdict(finding) for finding in self.findings],
            "not_tried": self.untried,
            "rewards": {
                backend: {agent: verdict.rewards for agent, verdict in agents.items()}
                for backend, agents in self.verdicts.items()
            },
        }


def _on_one_backend(agents: Mapping[str, Verdict]) -> Iterator[Finding]:
    oracle, nop = agents["oracle"], agents["nop"]
    if wrong := _of_oracle(oracle):
        yield _finding(oracle, *wrong)
    if any(reward not in (0.0, None) for reward in nop.rewards):
        yield _finding(nop, Reason.NOP_SCORES, f"doing nothing gets {_rewards(nop.rewards)}")
    if None in nop.rewards:
        yield _finding(nop, Reason.NOP_FAILS, _why(nop))
    for verdict in (oracle, nop):
        if verdict.doubts:
            yield _finding(verdict, Reason.DOUBTED, verdict.doubts[0])
    if nop.best is None:  # without the reward of `nop`, the gain of a cheat is unknown
        return
    least = max(nop.best, 0.0)
    for verdict in agents.values():
        if verdict.cheats and verdict.best is not None and verdict.best > least:
            beside = f", and doing nothing gets {nop.best:g}" if nop.best else ""
            text = f"the cheat {verdict.agent.removeprefix(CHEAT)!r} gets {verdict.best:g}{beside}"
            yield _finding(verdict, Reason.CHEAT_SOLVES, text)


def _of_oracle(oracle: Verdict) -> tuple[Reason, str] | None:
    right, tries = oracle.rewards.count(oracle.expected), len(oracle.rewards)
    if len(set(oracle.rewards)) > 1:
        text = f"the reference solution gets 1 in {right} of {tries} tries: {_rewards(oracle.rewards)}"
        return Reason.GOLD_FLAKES, f"{text}; {_why(oracle)}"
    if tries and not right:
        return Reason.GOLD_FAILS, f"the reference solution gets {_rewards(oracle.rewards)}; {_why(oracle)}"
    return None


def _differences(item_id: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> Iterator[Finding]:
    """Yield a finding for each agent that got different sets of rewards on two backends."""
    for agent in next(iter(verdicts.values()), {}):
        each = {backend: agents[agent].rewards for backend, agents in verdicts.items() if agents[agent].rewards}
        if len({frozenset(rewards) for rewards in each.values()}) > 1:
            by_backend = ", ".join(f"{backend} {_rewards(rewards)}" for backend, rewards in each.items())
            yield Finding(item_id, Reason.DIFFERS, f"{agent} gets {by_backend}", agent=agent)


def _finding(verdict: Verdict, reason: Reason, text: str) -> Finding:
    rewards, records = tuple(verdict.rewards), tuple(verdict.records)
    return Finding(verdict.item_id, reason, text, verdict.backend, verdict.agent, rewards, records)


def _rewards(rewards: Sequence[float | None]) -> str:
    """Return rewards in words: `1 three times, 0`."""
    words = ["none" if reward is None else f"{reward:g}" for reward in rewards]
    return ", ".join(
        dict.fromkeys(f"{words.count(word)} × {word}" if words.count(word) > 1 else word for word in words)
    )


_TELLING = ("reason", "output", "texts", "failing")
"""The keys of a reward's details that are most likely to explain the reward, best first."""


def _why(verdict: Verdict) -> str:
    """Return a text with the first reason for a reward other than the expected one."""
    return next(iter([*verdict.failures, *map(details_text, verdict.details)]), "the verification gave no details")


def details_text(details: Mapping[str, Any]) -> str:
    """Return the details that a verification gives for a reward, the most useful first."""
    first = [key for key in _TELLING if details.get(key)]
    pairs = [(key, details[key]) for key in [*first, *(key for key in details if key not in _TELLING)]]
    return "; ".join(f"{key}: {value}" for key, value in pairs) or "the verification gave no details"
