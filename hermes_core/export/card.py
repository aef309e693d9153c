"""The dataset card of an export: a README.md with counts, statistics by tool, versions, seeds and hashes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hermes_core.export.selection import ExportFilters, Selection
from hermes_core.export.tables import Columns, features
from hermes_core.printing import printable
from hermes_core.records.statistics import by_tool, totals
from hermes_core.records.summary import SOLVED
from hermes_core.version import __version__

CARD = "README.md"

_FILES_LISTED = 20
"""Maximum number of files that a card lists; a larger export has no list."""


@dataclass(frozen=True)
class ToolStatistics:
    """Statistics of one tool's calls in the exported rollouts."""

    calls: int
    rollouts: int
    """Number of rollouts that called it."""
    errors: Mapping[str, int]
    """Number of failed calls by the kind of error."""
    mean_s: float
    """Mean duration of a call in seconds."""


@dataclass(frozen=True)
class ExportedFile:
    """A file of an export."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Export:
    """The contents of an export, as its card describes them."""

    format: str
    out_dir: str
    run: Mapping[str, Any]
    """The exported run: its name, configuration hash, versions, seeds, and the hash of its records."""
    filters: Mapping[str, Any]
    rollouts: int
    """Number of chosen rollouts."""
    rows: int
    """Number of rows or documents that were written. A rollout can have several, and a pair has two rollouts."""
    items: int
    left_out: Mapping[str, int]
    """Number of rollouts that were left out, by reason."""
    left_out_rewards: Mapping[str, Mapping[str, float]]
    """The rewards of the rollouts left out, by reason: the numbers with a reward (`scored`) and `solved`, and the
    `mean`."""
    superseded: int
    """Number of records that a later record of the same rollout replaces. No other number counts these records."""
    mean_reward: float | None
    models: Mapping[str, int]
    """Number of rollouts by model."""
    turns: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    """US dollars; None if no rollout has a cost."""
    tools: Mapping[str, ToolStatistics] = field(default_factory=dict)
    files: Sequence[ExportedFile] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the export as JSON values."""
        return asdict(self)


def describe_export(
    selection: Selection, filters: ExportFilters, name: str, out: Path, *, rows: int, files: Sequence[ExportedFile]
) -> Export:
    """Return the description of an export with this selection and these files."""
    figures = totals(candidate.row for candidate in selection.chosen)
    return Export(
        format=name,
        out_dir=str(out),
        run=_run(selection),
        filters=filters.model_dump(exclude_defaults=True),
        rollouts=figures.rollouts,
        rows=rows,
        items=len(selection.items),
        left_out=dict(selection.left_out.most_common()),
        left_out_rewards={reason: _rewards(rewards) for reason, rewards in selection.lost.items()},
        superseded=selection.run.superseded,
        mean_reward=figures.mean_reward,
        models=dict(Counter(model for candidate in selection.chosen for model in candidate.models).most_common()),
        turns=figures.turns,
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        cost=figures.cost,
        tools=_tools(selection),
        files=files,
    )


def _rewards(rewards: Sequence[float]) -> dict[str, float]:
    solved = sum(reward >= SOLVED for reward in rewards)
    return {"scored": len(rewards), "solved": solved, "mean": sum(rewards) / len(rewards)}


def _run(selection: Selection) -> dict[str, Any]:
    run = selection.run
    about, configuration = run.about, run.configuration
    return {
        "name": run.name,
        "environment": configuration.get("environment"),
        "agent": configuration.get("agent"),
        "configuration_hash": about.get("configuration_hash"),
        "versions": about.get("versions", {}),
        "seed": about.get("seed"),
        "started": about.get("started"),
        "merged": about.get("merged", []),
        "records_sha256": run.sha256(),
    }


def _tools(selection: Selection) -> dict[str, ToolStatistics]:
    used = by_tool(candidate.row for candidate in selection.chosen)
    return {
        each.tool: ToolStatistics(each.calls, each.rollouts, dict(each.failed), round(each.seconds / each.calls, 6))
        for each in sorted(used, key=lambda each: (-each.calls, each.tool))
    }


def files_of(folder: Path) -> list[ExportedFile]:
    """Return the files of an export with their hashes; an empty list if there are very many files."""
    paths = list(islice((path for path in folder.rglob("*") if path.is_file()), _FILES_LISTED + 1))
    if len(paths) > _FILES_LISTED:
        return []
    return [ExportedFile(str(path.relative_to(folder)), path.stat().st_size, _sha256(path)) for path in sorted(paths)]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def card(export: Export, licence: str | None, columns: Columns | None) -> str:
    """Return the text of the card. Hugging Face reads the metadata between the two lines of dashes.

    Args:
        columns: the columns, if the format is a table.
    """
    run = export.run
    sections = [_front_matter(export, licence, columns), f"# {_cell(run['name'])}, exported as {export.format}"]
    about = f"Made by hermes-rl {__version__} from the run `{_cell(run['name'])}`."
    if export.filters:
        about += f" Conditions: `{json.dumps(export.filters)}`."
    sections.append(about)
    sections.append(_table(("", "number"), _counts(export)))
    if export.left_out:
        rows = [(_cell(reason), count, rewards_text(export, reason)) for reason, count in export.left_out.items()]
        sections += ["## Left out", _table(("reason", "rollouts", "their rewards"), rows)]
    if export.tools:
        sections += ["## Tools", _tool_table(export)]
    sections += ["## Origin", _origin(run)]
    if export.files:
        listed = [(f"`{file.name}`", f"{file.bytes:,}", f"`{file.sha256}`") for file in export.files]
        sections += ["## Files", _table(("file", "bytes", "SHA-256"), listed)]
    return printable("\n\n".join(sections)) + "\n"


def rewards_text(export: Export, reason: str) -> str:
    """Return a text on the rewards of the rollouts that were left out for a reason; empty if none has a reward."""
    rewards = export.left_out_rewards.get(reason)
    return f"{rewards['solved']} solved, mean reward {rewards['mean']:.3f}" if rewards else ""


def _front_matter(export: Export, licence: str | None, columns: Columns | None) -> str:
    lines = [f"license: {json.dumps(licence)}"] if licence else []
    tables = [file.name for file in export.files if file.name.startswith("train.")]
    if tables:
        lines += ["configs:", "- config_name: default", f"  data_files: {tables[0]}"]
    if columns and tables == ["train.jsonl"]:
        # Without this, `datasets` would infer types from the first rows, which may have no calls. JSON is also YAML.
        lines.append(f"dataset_info: {json.dumps({'features': features(columns)})}")
    return "\n".join(["---", *lines, "tags: [agent, tool-use, hermes-rl]", "---"])


def _counts(export: Export) -> list[tuple[str, str]]:
    counts = [
        ("rows", f"{export.rows:,}"),
        ("rollouts", f"{export.rollouts:,}"),
        ("items", f"{export.items:,}"),
        ("answers of the model", f"{export.turns:,}"),
        ("prompt tokens", f"{export.prompt_tokens:,}"),
        ("completion tokens", f"{export.completion_tokens:,}"),
    ]
    if export.mean_reward is not None:
        counts.append(("mean reward", f"{export.mean_reward:.4f}"))
    if export.cost is not None:
        counts.append(("cost in US dollars", f"{export.cost:.4f}"))
    return [*counts, *((f"rollouts of model `{_cell(model)}`", f"{count:,}") for model, count in export.models.items())]


def _tool_table(export: Export) -> str:
    rows = [
        (
            f"`{_cell(name)}`",
            f"{tool.calls:,}",
            f"{tool.rollouts:,}",
            ", ".join(f"{count} {kind}" for kind, count in tool.errors.items()) or "0",
            f"{tool.mean_s:.3f}",
        )
        for name, tool in export.tools.items()
    ]
    return _table(("tool", "calls", "rollouts", "errors", "mean seconds"), rows)


def _origin(run: Mapping[str, Any]) -> str:
    parts = [run, *run["merged"]] if run["merged"] else [run]
    columns = ("name", "environment", "agent", "seed", "started", "configuration_hash")
    rows = [[_cell(part.get(column)) for column in columns] + [_versions(part.get("versions") or {})] for part in parts]
    heading = ("run", "environment", "agent", "seed", "started", "configuration", "versions")
    return f"{_table(heading, rows)}\n\nSHA-256 of the run's records: `{run['records_sha256']}`"


def _versions(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{_cell(name)} {_cell(version)}" for name, version in versions.items())


def _table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _cell(value: object) -> str:
    """Return a value as the text of a table's cell, escaped so that a name from a run neither ends the cell nor
    begins markup."""
    return (
        "" if value is None else " ".join(str(value).split()).translate({ord("|"): "¦", ord("`"): "'", ord("<"): "‹"})
    )
