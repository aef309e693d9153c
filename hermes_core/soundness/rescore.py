"""Verifies the recorded patches of a run again, to see whether the environment still gives each the same reward."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hermes_core.environment import Environment, Item, check_scores_patches
from hermes_core.errors import UsageError
from hermes_core.records.jsonable import json_line
from hermes_core.records.record import Record
from hermes_core.records.run_files import LineFile
from hermes_core.records.store import RUN, OutputFolder, read_run, records
from hermes_core.records.summary import Key, NoProgress, Progress, Tally
from hermes_core.rollout.rollout import RolloutContext, run_rescoring
from hermes_core.rollout.trajectory import Trajectory
from hermes_core.runs.options import RunOptions
from hermes_core.runs.runner import STOPPING, each
from hermes_core.runs.session import make_environment, open_session
from hermes_core.runs.stall_watchdog import STALLS
from hermes_core.runtime import Runtime
from hermes_core.validation import validate_data

RESCORED = "rescored.jsonl"


@dataclass(frozen=True)
class Rescoring:
    """The outcome of `rescore`."""

    patches: int
    """Number of recorded patches that were verified again."""
    agreed: int
    """Number of patches with the same reward as before. A patch that had no reward before can't agree."""
    differing: tuple[Mapping[str, Any], ...]
    """The patches with another reward than before: their lines in `rescored.jsonl`, without details and timings."""
    without_patch: int
    """Number of rollouts that recorded no patch."""
    stopped: str | None = None
    """The reason why the rescoring ended before every patch had been tried, or None."""

    @property
    def agrees(self) -> bool:
        """Return whether every patch got the same reward again."""
        return not self.differing and self.stopped is None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return asdict(self)


async def rescore(
    runtime: Runtime,
    run_dir: str | Path,
    *,
    env: Mapping[str, Any] | None = None,
    environment: Environment | str | None = None,
    trust_run: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Rescoring:
    """Verify the last recorded patch of every rollout in `run_dir` again, and write `run_dir/rescored.jsonl`.

    Args:
        env: changes to the environment's configuration.
        environment: an environment or its name. If given, nothing that `run.json` names is used.
        trust_run: use the environment and the backend that `run.json` names, with their settings, unless others are
            given. Settings can name programs that run on this host, so trust only a folder whose origin you know.
        options: the fields of `RunOptions`.

    Raises:
        UsageError: `run_dir` holds no run, a run is writing to it, or the environment can't score patches; or neither
            `environment` nor `trust_run` is given.
        HermesError: as `run_rollouts`.
    """
    path = Path(run_dir)
    ran = run_configuration_of(path, environment, trust_run=trust_run)
    inherited: dict[str, Any] = {
        key: ran[key] for key in ("backend", "backend_config", "isolation", "verify_timeout") if key in ran
    }
    chosen = validate_data(RunOptions, {**inherited, **options}, "the run")
    with closing(OutputFolder(path)):
        made = make_environment(runtime, ran["environment"], {**ran["env"], **(env or {})}, None)
        check_scores_patches(made)
        places, without_patch = _places_of_patches(path)
        async with open_session(runtime, made, "nop", chosen, work_of=str(ran["agent"])) as session:
            items = {made.item_id(item): item for item in made.items()}
            check_items(items, _at(path, places))
            async with session.sandboxes(len(places), stalls=path / STALLS) as context:
                hint = "free some space, or fix its access rights"
                with closing(LineFile(path / RESCORED, hint, os.O_TRUNC)) as out:
                    again = _Again(context, items, out, progress or NoProgress())
                    await again.all(_at(path, places), len(places), session.room)
    differing = tuple(again.differing)
    return Rescoring(again.verified, again.verified - len(differing), differing, without_patch, again.stopped)


class _Again:
    """The second verification of a run's patches."""

    def __init__(self, context: RolloutContext, items: Mapping[str, Item], out: LineFile, progress: Progress) -> None:
        self.differing: list[Mapping[str, Any]] = []
        self.verified = 0
        self.stopped: str | None = None
        self._context = context
        self._items = items
        self._out = out
        self._progress = progress
        self._tally = Tally()

    async def all(self, patches: Iterator[Record], total: int, concurrency: int) -> None:
        self._out.append(b"")  # so that the file exists even if nothing is written
        self._tally.start_session()
        self._progress.begin(total, self._tally)
        try:
            await each(patches, self._one, concurrency)
        except STOPPING as error:
            self.stopped = str(error)
        finally:
            self._progress.end(self._tally)

    async def _one(self, recorded: Record) -> None:
        assert recorded.patch is not None
        trajectory = Trajectory(
            environment=recorded.environment,
            item_id=recorded.item_id,
            group=recorded.group,
            rollout_index=recorded.rollout_index,
            agent=recorded.agent,
            backend=self._context.backend_name,
        )
        await run_rescoring(self._context, self._items[recorded.item_id], recorded.patch, trajectory)
        self._keep(recorded, trajectory.to_record(self._context.redact))

    def _keep(self, recorded: Record, record: Record) -> None:
        written = record.to_json()
        line = {
            "trajectory_id": recorded.trajectory_id,
            "item_id": record.item_id,
            "rollout_index": record.rollout_index,
            "recorded_reward": recorded.reward,
            "reward": record.reward,
            "agrees": record.reward is not None and record.reward == recorded.reward,
            "failure": written["failure"],
        }
        self.verified += 1
        about = {key: written[key] for key in ("details", "timings", "infra_retries", "check_repeated")}
        self._out.append(json_line({**line, **about}))
        if not line["agrees"]:
            self.differing.append(line)
        self._tally.add(record)
        self._progress.update(self._tally)


def run_configuration_of(path: Path, environment: Environment | str | None, *, trust_run: bool) -> dict[str, Any]:
    """Return the initial configuration of a rescoring: the run's configuration, or only the given environment.

    Raises:
        UsageError: there is no run, or its configuration lacks a key; or the run is not trusted and no environment is
            given.
    """
    ran: dict[str, Any] = read_run(path)["configuration"]
    needed = {"environment", "env", "agent", "backend", "backend_config", "isolation", "verify_timeout"}
    if not needed <= ran.keys():
        raise UsageError(f"{path / RUN} lacks part of a run's configuration", hint="name the folder of a run")
    if environment is not None:
        return {"environment": environment, "env": {}, "agent": ran["agent"]}
    if not trust_run:
        named = {
            key: ran.get(key) for key in ("environment", "env", "backend", "backend_config", "profile", "isolation")
        }
        raise UsageError(
            f"what {path / RUN} names would run on this machine: {json.dumps(named)}",
            hint="if you made this run, or have looked at these settings, add --trust-run; or give your own: "
            "--environment NAME, --env.KEY=VALUE, --backend NAME",
        )
    return ran


def check_items(items: Mapping[str, Item], patches: Iterator[Record]) -> None:
    """Check that every patch belongs to one of the items.

    Raises:
        UsageError: a patch belongs to none of the items.
    """
    for recorded in patches:
        if recorded.item_id not in items:
            raise UsageError(
                f"the dataset no longer has item {recorded.item_id!r}", hint="rescore with the run's own dataset"
            )


def _places_of_patches(path: Path) -> tuple[set[int], int]:
    """Return the places of the records with a patch, and the number of rollouts without one. Only the last record of
    each rollout counts."""
    last: dict[Key, tuple[int, bool]] = {}
    for place, record in enumerate(records(path)):
        last[record.item_id, record.rollout_index] = (place, record.patch is not None)
    places = {place for place, has_patch in last.values() if has_patch}
    return places, len(last) - len(places)


def _at(path: Path, places: set[int]) -> Iterator[Record]:
    return (record for place, record in enumerate(records(path)) if place in places)
