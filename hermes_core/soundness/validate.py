"""Checks that the items of a dataset are sound: runs the baselines and the cheats, and writes the findings.

On each backend, `oracle` must get 1.0 and `nop` 0.0 every time, no cheat may get more than `nop`, and all backends must
agree. A validation has one run for each backend, in which each rollout of a group has another agent. So a validation is
recorded, resumed and viewed like any other run.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hermes_core.agents.base import Agent
from hermes_core.agents.baselines import CHEAT, CheatAgent, NopAgent, OracleAgent
from hermes_core.environment import Environment, Item
from hermes_core.errors import FailureKind, InfraError, PolicyError, UsageError, explain_errors
from hermes_core.records.store import (
    QUARANTINE,
    RESULTS,
    TABLE,
    TRAJECTORIES,
    OutputFolder,
    read_records,
    write_json,
    write_text,
)
from hermes_core.records.summary import NoProgress, Progress
from hermes_core.runs.options import RunOptions
from hermes_core.runs.quarantine import FORMAT, VERSION, Fingerprints, Quarantine
from hermes_core.runs.runner import Jobs, Run, in_thread
from hermes_core.runs.session import ITEMS, Session, check_scored, environment_error, open_session, versions
from hermes_core.runs.stall_watchdog import STALLS
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.soundness.verdicts import EXPECTED, UNTRIED, Finding, ItemResult, ItemStatus, Verdict
from hermes_core.validation import validate_data
from hermes_core.version import __version__

AGENT = "validate"
"""The agent's name in the configuration of a validation's runs. The records name each rollout's own agent."""

_AGAIN = (*UNTRIED, FailureKind.SETUP)
"""Kinds of failures after which a resumed validation repeats a rollout. A failed verification is a result, like a
reward, and is not repeated."""


@dataclass(frozen=True)
class Validation:
    """The outcome of `validate`."""

    environment: str
    repeat: int
    backends: tuple[str, ...]
    cheats: tuple[str, ...]
    """The names of the cheats that were tried."""
    results: tuple[ItemResult, ...]
    """The result of each item, in the dataset's order."""
    stopped: str | None = None
    """The reason why the validation ended before all rollouts had been tried, or None."""
    out_dir: str | None = None
    fingerprints: Fingerprints | None = None
    """The fingerprints of the dataset, for the quarantine."""

    @property
    def items(self) -> int:
        """Return the number of items."""
        return len(self.results)

    @property
    def findings(self) -> list[Finding]:
        """Return every reason why an item is not sound."""
        return [finding for result in self.results for finding in result.findings]

    @property
    def unsound(self) -> tuple[Verdict, ...]:
        """Return the verdicts of single agents that make an item unsound."""
        return tuple(verdict for result in self.results for verdict in result.unsound_verdicts())

    @property
    def complete(self) -> bool:
        """Return whether all rollouts were tried."""
        return self.stopped is None and not any(result.untried for result in self.results)

    @property
    def sound(self) -> bool:
        """Return whether all rollouts were tried, and every item is sound."""
        return self.complete and not any(result.findings for result in self.results)

    def with_status(self, status: ItemStatus) -> list[ItemResult]:
        """Return the items with this status."""
        return [result for result in self.results if result.status is status]

    @property
    def fails_everywhere(self) -> tuple[str, ...]:
        """Return the backends on which rollouts were tried and none has a reward, so that the cause is not in single
        items."""
        verdicts = [
            agent for result in self.results for agents in result.verdicts.values() for agent in agents.values()
        ]
        tried = {verdict.backend for verdict in verdicts if verdict.rewards}
        scored = {verdict.backend for verdict in verdicts if verdict.best is not None}
        return tuple(backend for backend in self.backends if backend in tried - scored)

    def rows(self) -> list[dict[str, str]]:
        """Return the table: a row for each item and backend."""
        return [_row(result, backend, agents) for result in self.results for backend, agents in result.verdicts.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {
            "environment": self.environment,
            "items": self.items,
            "repeat": self.repeat,
            "backends": list(self.backends),
            "cheats": list(self.cheats),
            "sound": self.sound,
            "complete": self.complete,
            "stopped": self.stopped,
            "count": {str(status): len(self.with_status(status)) for status in ItemStatus},
            "out_dir": self.out_dir,
            "unsound": [_verdict(verdict) for verdict in self.unsound],
            "results": [result.to_dict() for result in self.results],
        }

    def to_quarantine(self) -> dict[str, Any]:
        """Return the content of a quarantine file: the items that are not sound, with the reasons."""
        known = self.fingerprints
        return {
            "format": FORMAT,
            "version": VERSION,
            "environment": self.environment,
            "dataset": None if known is None else {"fingerprint": known.dataset, "items": len(known.items)},
            "validated": {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "hermes-rl": __version__,
                "items": self.items,
                "complete": self.complete,
                "repeat": self.repeat,
                "backends": list(self.backends),
                "cheats": list(self.cheats),
                "folder": self.out_dir,
            },
            "items": [
                {
                    "item_id": result.item_id,
                    "fingerprint": known and known.items.get(result.item_id),
                    "reasons": [_reason(finding) for finding in result.findings],
                }
                for result in self.with_status(ItemStatus.UNSOUND)
            ],
        }

    def to_markdown(self) -> str:
        """Return the table and the reasons, for readers."""
        counts = ", ".join(f"{len(self.with_status(status))} {status}" for status in ItemStatus)
        cheats = f", {len(self.cheats)} cheats" if self.cheats else ""
        lines = [
            f"# Validation of `{self.environment}`",
            "",
            f"{self.items} items: {counts}. Baselines {self.repeat} times{cheats}, on {', '.join(self.backends)}.",
        ]
        lines += ["", f"Stopped: {_cell(self.stopped)}"] if self.stopped else []
        rows = self.rows()
        lines += ["", f"| {' | '.join(rows[0])} |", f"|{' --- |' * len(rows[0])}"] if rows else []
        lines += [f"| {' | '.join(map(_cell, row.values()))} |" for row in rows]
        lines += ["", "## Findings", ""] if self.findings else []
        lines += [
            f"- {_cell(finding.item_id)}: **{finding.reason}**{f' on {finding.backend}' if finding.backend else ''}: "
            + _cell(finding.text)
            for finding in self.findings
        ]
        untried = [(result.item_id, why) for result in self.results for why in result.untried]
        lines += ["", "## Not tried", ""] if untried else []
        lines += [f"- {_cell(item_id)}: {_cell(why)}" for item_id, why in untried]
        return "\n".join(lines) + "\n"


async def validate(
    runtime: Runtime,
    environment: str | Environment,
    *,
    env: Mapping[str, Any] | None = None,
    repeat: int = 1,
    cheats: bool | Sequence[str] = False,
    backends: Mapping[str, Mapping[str, Any]] | None = None,
    out_dir: str | Path | None = None,
    runs_dir: str | Path | None = None,
    resume: bool = False,
    on_folder: Callable[[Path], None] | None = None,
    on_broken_off: Callable[[Validation], None] | None = None,
    progress: Callable[[str], Progress] = lambda backend: NoProgress(),
    **options: Any,
) -> Validation:
    """Let `oracle` and `nop` work on each item, `repeat` times, and each cheat once, on each backend.

    Args:
        environment: the environment's name; or an instance, for one backend only.
        cheats: True for all cheats of the environment, or the names of some.
        backends: maps a name for each backend in the results to the options that differ between backends (`backend`,
            `profile`, `backend_config`). None is one backend, given by `options`.
        out_dir: directory for the results and a run for each backend. Without `out_dir` and `runs_dir`, nothing is
            kept.
        runs_dir: directory in which the validation gets a new folder, if there is no `out_dir`.
        resume: continue the validation in `out_dir`.
        on_folder: called with the validation's folder, if there is one, before the first rollout begins.
        on_broken_off: called with the results so far, if the validation is cancelled or fails.
        progress: called with a backend's name; returns its display.
        options: the fields of `RunOptions`.

    Raises:
        HermesError: as `run_rollouts`. Failures to start a backend are raised only if no backend could be started.
    """
    places = backends or {str(options.get("backend", RunOptions().backend)): {}}
    if len(places) > 1 and isinstance(environment, Environment):
        raise UsageError("an environment instance is set up once, so it has one backend", hint="name the environment")
    if resume and out_dir is None:
        raise UsageError("no validation to resume was named", hint="give its folder: --out DIR")
    async with AsyncExitStack() as stack:
        sessions: dict[str, Session] = {}
        for label, differing in places.items():
            chosen = validate_data(RunOptions, {**options, **differing, "group_size": repeat}, "the run")
            opening = open_session(runtime, environment, "oracle", chosen, env=env, work_of=CHEAT if cheats else None)
            sessions[label] = await stack.enter_async_context(opening)
        first = next(iter(sessions.values()))
        check_scored(first.environment)
        names = _choose_cheats(sessions.values(), cheats)
        folder = OutputFolder.choose(out_dir, runs_dir, f"validate-{first.name}")
        if folder is not None:
            stack.callback(folder.close)
        known = None if folder is None else await asyncio.to_thread(_fingerprints, first.environment)
        if resume and folder is not None and known is not None:
            await asyncio.to_thread(_check_unchanged, folder.path / QUARANTINE, known)
        work = _Work(
            runtime=runtime,
            sessions=sessions,
            repeat=repeat,
            cheats=names,
            folder=folder,
            fingerprints=known,
            on_broken_off=on_broken_off,
        )
        if on_folder is not None and folder is not None:
            on_folder(folder.path)
        try:
            await work.on_every_backend(progress, resume)
        except BaseException as error:
            work.break_off(error)
            raise
        outcome = work.outcome()
        await in_thread(work.write, outcome)
        return outcome


def _choose_cheats(sessions: Collection[Session], cheats: bool | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the cheats to try.

    Raises:
        UnknownNameError: the environment does not have one of the cheats.
        PolicyError: the cheats would run on this host with the rights of its user.
    """
    if not cheats:
        return ()
    hooks = next(iter(sessions)).hooks
    names = tuple(hooks.cheats) if cheats is True else tuple(dict.fromkeys(cheats))
    for name in names:
        hooks.check_cheat(name)
    for session in sessions:
        on_host = session.backend.capabilities.on_driver_host
        if on_host and session.isolation < Isolation.USER:
            raise PolicyError(
                f"cheats kill processes and plant files; at isolation {session.isolation.label!r} these would be yours",
                hint="use --isolation user or namespace, or another backend",
            )
    return names


def _fingerprints(environment: Environment) -> Fingerprints:
    with explain_errors(functools.partial(environment_error, environment, ITEMS)):
        return Fingerprints.of(environment)


def _check_unchanged(written: Path, now: Fingerprints) -> None:
    """Refuse to continue a validation whose dataset has changed. Blocking.

    Raises:
        UsageError: the dataset has changed since the results in `written`.
    """
    if not written.exists():
        return
    then = Quarantine.read(written).file.dataset
    if then is not None and then.fingerprint != now.dataset:
        raise UsageError(
            f"the dataset was changed after {written.parent} was written, so its results are of other items",
            hint="validate it into another folder",
        )


@dataclass
class _Work:
    """A validation under way."""

    runtime: Runtime
    sessions: Mapping[str, Session]
    repeat: int
    cheats: tuple[str, ...]
    folder: OutputFolder | None
    """The folder of the whole validation; each run's folder is inside."""
    fingerprints: Fingerprints | None
    on_broken_off: Callable[[Validation], None] | None
    stopped: str | None = None
    _broken_off: bool = False
    _found: dict[str, dict[str, dict[str, Verdict]]] = field(default_factory=dict)
    """Verdicts by item, backend and agent."""

    @functools.cached_property
    def agents(self) -> list[Agent]:
        """Return the agent of each rollout of a group."""
        baselines = [agent for agent in (OracleAgent(), NopAgent()) for _ in range(self.repeat)]
        return [*baselines, *map(CheatAgent, self.cheats)]

    async def on_every_backend(self, progress: Callable[[str], Progress], resume: bool) -> None:
        """Run the rollouts that are left, on each backend.

        Raises:
            InfraError: no backend could be started.
        """
        jobs = {label: self._jobs(label, session) for label, session in self.sessions.items()}
        lost: list[InfraError] = []
        for number, (label, session) in enumerate(self.sessions.items()):
            if number:
                await in_thread(self.write, self.outcome())
            try:
                stopped = await self._on(label, session, jobs[label], progress(label), resume)
            except InfraError as error:
                lost.append(error)
                stopped = str(error)
            if stopped is not None:
                self.stopped = f"{self.stopped}; {label}: {stopped}" if self.stopped else f"{label}: {stopped}"
        if len(lost) == len(self.sessions):
            raise lost[0]

    def _jobs(self, label: str, session: Session) -> Jobs:
        jobs = Jobs(session, len(self.agents))
        tries = {agent.name: self.repeat if agent.name in EXPECTED else 1 for agent in self.agents}
        for item_id in jobs.item_ids:
            self._found.setdefault(item_id, {})[label] = {
                agent: Verdict(item_id, agent, label, missing=count) for agent, count in tries.items()
            }
        return jobs

    async def _on(self, label: str, session: Session, jobs: Jobs, progress: Progress, resume: bool) -> str | None:
        """Run the rollouts that are left on one backend. Return None, or the reason why the run ended before all
        rollouts had been tried."""
        async with AsyncExitStack() as stack:
            take = self._taking(label, session.environment)
            run = Run(
                session.tools,
                jobs,
                agents=self.agents,
                on_record=take,
                progress=progress,
                options=session.options,
            )
            if self.folder is not None:
                run.folder = OutputFolder(self.folder.path / run_folder(label))
                stack.callback(run.folder.close)
                await in_thread(self._begin, session, run, run.folder, resume, take)
            stalls = None if run.folder is None else run.folder.path / STALLS
            async with session.sandboxes(run.count_left(), start=jobs.need_slots, stalls=stalls) as context:
                try:
                    return (await run.all(context, session.room)).stopped
                except asyncio.CancelledError as error:  # at once: the sandboxes may take long to end
                    self.break_off(error)
                    raise

    def break_off(self, error: BaseException) -> None:
        """Keep the results so far when an error or a cancellation ends everything. Idempotent."""
        if self._broken_off:
            return
        self._broken_off = True
        self.stopped = "interrupted" if isinstance(error, asyncio.CancelledError) else str(error)
        outcome = self.outcome()
        self.write(outcome)
        if self.on_broken_off is not None:
            self.on_broken_off(outcome)

    def _begin(
        self,
        session: Session,
        run: Run,
        folder: OutputFolder,
        resume: bool,
        take: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Open the run's folder, and pass its records that stay to `take`. Blocking."""
        about = {"versions": versions(self.runtime), "concurrency": session.options.concurrency}
        configuration = {
            **session.configuration(),
            "agent": AGENT,
            "agents": [agent.name for agent in self.agents],
            "group_size": len(self.agents),
        }
        there = (folder.path / TRAJECTORIES).exists()
        changes = run.jobs.changes(session.redact)
        folder.open(configuration, about, run.tally, resume=resume and there, again=_AGAIN, changes=changes)
        if there:
            for record in read_records(folder.path):
                take(record)

    def _taking(self, label: str, environment: Environment) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that adds a record of one backend to the verdicts."""
        items = {environment.item_id(item): item for item in environment.select_items()}

        def doubt(item: Item, agent: str, details: Mapping[str, Any]) -> str | None:
            try:
                return environment.doubt(item, agent, details)
            except Exception as error:
                raise environment_error(environment, "doubt()", error) from error

        def take(record: Mapping[str, Any]) -> None:
            item_id, agent = record["item_id"], record["agent"]
            right = record["failure"] is None and record["reward"] == EXPECTED.get(agent)
            reason = doubt(items[item_id], agent, record["details"]) if right else None
            self._found[item_id][label][agent].add(record, reason)

        return take

    def outcome(self) -> Validation:
        """Return the outcome so far."""
        first = next(iter(self.sessions.values()))
        return Validation(
            environment=first.name,
            repeat=self.repeat,
            backends=tuple(self.sessions),
            cheats=self.cheats,
            results=tuple(ItemResult.of(item_id, verdicts) for item_id, verdicts in self._found.items()),
            stopped=self.stopped,
            out_dir=str(self.folder.path) if self.folder else None,
            fingerprints=self.fingerprints,
        )

    def write(self, outcome: Validation) -> None:
        """Write the results, if there is a folder and anything was recorded. Blocking."""
        if self.folder is None or not any(
            (self.folder.path / run_folder(session)).exists() for session in self.sessions
        ):
            return
        write_json(self.folder.path / RESULTS, outcome.to_dict())
        if not outcome.fails_everywhere:
            write_json(self.folder.path / QUARANTINE, outcome.to_quarantine())
        write_text(self.folder.path / TABLE, outcome.to_markdown())


def run_folder(backend: str) -> str:
    """Return the name of the folder of a backend's run, inside the validation's folder."""
    return re.sub(r"[^\w.-]+", "-", backend).strip(".") or "run"


def _row(result: ItemResult, backend: str, agents: Mapping[str, Verdict]) -> dict[str, str]:
    oracle, nop = agents["oracle"], agents["nop"]
    cheats = [verdict for verdict in agents.values() if verdict.cheats]
    solved = [
        finding.agent for finding in result.findings if finding.backend == backend and finding.reason == "cheat-solves"
    ]
    scored = [verdict for verdict in cheats if verdict.best is not None]
    unscored = sum(None in verdict.rewards for verdict in cheats)
    idle = [reward for reward in nop.rewards if reward is not None]
    reasons = dict.fromkeys(str(finding.reason) for finding in result.findings if finding.backend in (backend, None))
    return {
        "item": result.item_id,
        "backend": backend,
        "gold": f"{oracle.rewards.count(oracle.expected)}/{len(oracle.rewards)}",
        "nop": _share(sum(reward != 0.0 for reward in idle), len(idle), len(nop.rewards) - len(idle)),
        **({"cheats": _share(len(solved), len(scored), unscored)} if cheats else {}),
        "result": ", ".join(reasons) or str(result.status),
    }


def _share(scoring: int, scored: int, unscored: int) -> str:
    return f"{scoring}/{scored}" + (f", {unscored} without reward" if unscored else "")


def _verdict(verdict: Verdict) -> dict[str, Any]:
    kept = ("item_id", "agent", "backend", "rewards", "records", "failures", "details", "doubts", "flaky")
    return {name: getattr(verdict, name) for name in kept}


def _reason(finding: Finding) -> dict[str, Any]:
    return {
        "reason": str(finding.reason),
        "text": finding.text[:_LONGEST],
        "backend": finding.backend,
        "agent": finding.agent,
        "rewards": list(finding.rewards),
        "run": finding.backend and run_folder(finding.backend),
        "records": list(finding.records),
    }


_LONGEST = 500
"""Maximum number of characters of a text in the table and in the quarantine."""


def _cell(text: str) -> str:
    """Return a text, which may come from a sandbox, as one line of Markdown without markup."""
    line = " ".join(text.split())
    cut = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", cut)
