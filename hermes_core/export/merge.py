"""Joins runs into a folder like that of a single run, with every rollout once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hermes_core.errors import UsageError
from hermes_core.export.exporting import new_folder
from hermes_core.export.selection import Candidate, ExportFilters, open_run, select
from hermes_core.records.index import RecordedRun
from hermes_core.records.jsonable import Redact
from hermes_core.records.record import Record
from hermes_core.records.store import RUN, SUMMARY, TRAJECTORIES, configuration_hash, write_json
from hermes_core.records.summary import Tally


@dataclass(frozen=True)
class Merge:
    """The outcome of a merge."""

    out_dir: str
    runs: int
    rollouts: int
    repeated: int
    """Number of rollouts left out because an earlier run has a rollout with the same trajectory id."""
    renumbered: int
    """Number of rollouts that got a new rollout index because an earlier run uses theirs."""
    renamed: int
    """Number of items that got a new id because an earlier run has a different item with theirs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return asdict(self)


def merge_runs(runs: Sequence[str | Path], out_dir: str | Path, *, redact: Redact | None = None) -> Merge:
    """Join runs into a new one, which can be exported and viewed like any other. Blocking.

    If several runs have rollouts of the same item, those of later runs get further rollout indexes, and stay in the
    item's group. Items are the same if their ids, environments and prompts are equal. A different item with an id that
    is taken gets the id `ITEM@RUN`.

    Args:
        runs: the folders of the runs, or files of records. Of runs that are not over, the rollouts so far are joined.
        out_dir: the folder to make.
        redact: as for `export_run`.

    Raises:
        UsageError: there is no such run, it has no records, or `out_dir` exists.
        OutputError: the files can't be written.
    """
    out = Path(out_dir)
    if not runs:
        raise UsageError("no run is named", hint="name the folders of the runs to join")
    with ExitStack() as stack, new_folder(out) as folder:
        readers = [stack.enter_context(closing(open_run(Path(run), redact))) for run in runs]
        numbering, tally = _Numbering(), Tally()
        with (folder / TRAJECTORIES).open("wb") as file:
            counts = []
            for reader in readers:
                selection = select(reader, ExportFilters(), lambda record: None)
                before = tally.session
                for candidate, record in zip(selection.chosen, selection.records(), strict=True):
                    placed = numbering.place(reader.name, candidate, record)
                    if placed is not None:
                        file.write(placed.line())
                        tally.add(placed)
                counts.append(tally.session - before)
        if not tally.session:
            raise UsageError("the runs have no records", hint="name runs with records")
        write_json(folder / RUN, _about(readers, counts))
        write_json(folder / SUMMARY, tally.summary(tally.session, out_dir=str(out)).to_dict())
    return Merge(
        str(out), len(readers), tally.session, numbering.repeated, numbering.renumbered, len(numbering.renamed)
    )


class _Numbering:
    """Gives each rollout a unique pair of item id and rollout index. Keeps a few small values per rollout."""

    def __init__(self) -> None:
        self.repeated = 0
        self.renumbered = 0
        self.renamed: dict[tuple[str, str, str, bytes], str] = {}
        """New item ids, by run, environment, item id and prompt."""
        self._seen: set[str] = set()
        self._items: dict[str, tuple[str, bytes | None]] = {}
        self._taken: dict[str, set[int]] = {}

    def place(self, run: str, candidate: Candidate, record: Record) -> Record | None:
        """Return the record with its new item id and index; None if an earlier run had the same rollout."""
        if record.trajectory_id in self._seen:
            self.repeated += 1
            return None
        self._seen.add(record.trajectory_id)
        prompt = candidate.prompt if record.messages else None
        item_id = self._item(run, record, prompt)
        taken = self._taken.setdefault(item_id, set())
        index = record.rollout_index
        if index in taken:
            index = max(taken) + 1
            self.renumbered += 1
        taken.add(index)
        if item_id == record.item_id:
            return replace(record, rollout_index=index)
        group = item_id if record.group == record.item_id else f"{record.group}@{run}"
        return replace(record, item_id=item_id, group=group, rollout_index=index)

    def _item(self, run: str, record: Record, prompt: bytes | None) -> str:
        """Return the id for the record's item. A rollout that failed before it had a prompt fits any prompt."""
        known = self.renamed.get((run, record.environment, record.item_id, prompt or b""))
        if known is not None:
            return known
        item_id, number = record.item_id, 1
        while not self._is_same(item_id, record.environment, prompt):
            item_id = f"{record.item_id}@{run}" + (f"-{number}" if number > 1 else "")
            number += 1
        if item_id != record.item_id:
            self.renamed[run, record.environment, record.item_id, prompt or b""] = item_id
        return item_id

    def _is_same(self, item_id: str, environment: str, prompt: bytes | None) -> bool:
        """Return whether this is the item with this id. An id that no item has yet is assigned to this item."""
        its_environment, its_prompt = self._items.setdefault(item_id, (environment, prompt))
        if its_prompt is None and prompt is not None and its_environment == environment:
            self._items[item_id] = (environment, prompt)
            return True
        return its_environment == environment and prompt in (None, its_prompt)


def _about(readers: Sequence[RecordedRun], counts: Sequence[int]) -> dict[str, Any]:
    """Return the content of `run.json`: the values on which all runs agree, and each run's own values."""
    configurations = [reader.configuration for reader in readers]
    configuration = _common(configurations)
    first = readers[0].about
    parts = [
        {
            "name": reader.name,
            "environment": reader.configuration.get("environment"),
            "agent": reader.configuration.get("agent"),
            **{key: reader.about.get(key) for key in ("configuration_hash", "versions", "seed", "started")},
            "rollouts": count,
        }
        for reader, count in zip(readers, counts, strict=True)
    ]
    return {
        "configuration": configuration,
        "configuration_hash": configuration_hash({"merged": [part["configuration_hash"] for part in parts]}),
        "versions": _common([reader.about.get("versions", {}) for reader in readers]),
        "seed": first.get("seed") if len({repr(reader.about.get("seed")) for reader in readers}) == 1 else None,
        "started": min(filter(None, (reader.about.get("started") for reader in readers)), default=None),
        "merged": parts,
    }


def _common(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a mapping with the keys of the first mapping; the value of a key is None unless it is equal in all."""
    return {
        key: value if all(other.get(key) == value for other in values) else None for key, value in values[0].items()
    }
