"""A run as a job folder of Harbor, for `harbor view`: a folder for each rollout, with its trajectory and its result."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hermes_core.errors import FailureKind
from hermes_core.export.atif import trajectory
from hermes_core.export.selection import Selection
from hermes_core.records.jsonable import json_text
from hermes_core.records.plain_text import moment
from hermes_core.records.record import STAGES, Record

_EXCEPTIONS = {
    FailureKind.INFRA: "InfraError",
    FailureKind.IMAGE: "ImageError",
    FailureKind.SETUP: "SetupFailed",
    FailureKind.MODEL: "ModelError",
    FailureKind.VERIFIER: "VerifierError",
    FailureKind.CANCELLED: "CancelledError",
}
"""The name of the exception that represents a kind of failure."""

_LONGEST_NAME = 80


def write_job(selection: Selection, folder: Path) -> int:
    """Write the job's folder, and return the number of its trials."""
    trials, model = _Trials(selection.run.name), _model(selection.run.configuration)

    def write(recorded: Record) -> int:
        record = replace(recorded, model=recorded.model or model)
        name = trials.name(record)
        files = _trial(name, record)  # before anything is written, as this may raise
        for part in (folder / name, folder / name / "agent", folder / name / "verifier"):
            part.mkdir()
        for path, data in files.items():
            (folder / name / path).write_bytes(data)
        trials.add(name, record)
        return 1

    selection.write_each(write)
    (folder / "config.json").write_text(_json({"job_name": trials.job, "jobs_dir": "jobs", "agents": trials.agents()}))
    (folder / "result.json").write_text(_json(trials.result()))
    return trials.total


def _model(configuration: Mapping[str, Any]) -> str | None:
    """Return the model of the run, or None if there are several. It stands in for the missing model in the record of a
    rollout whose agent never began; otherwise this rollout would be in an evaluation of its own."""
    settings = configuration.get("agent_settings") or {}
    return None if settings.get("models") else settings.get("model")


class _Trials:
    """The trials of a job so far: their names, and the counts for the job's result."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.total = 0
        self._names: set[str] = set()
        self._evals: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._errors = 0
        self._started: float | None = None
        self._ended: float | None = None

    def name(self, record: Record) -> str:
        """Return a unique name for a rollout's folder: the item's id without unsafe characters, and a number."""
        plain = plain_name(record.item_id)
        name = f"{plain}__{record.rollout_index}"
        if name in self._names:
            digest = hashlib.sha256(f"{record.item_id}/{record.group}".encode()).hexdigest()
            name = f"{plain}-{digest[:8]}__{record.rollout_index}"
        self._names.add(name)
        return name

    def add(self, name: str, record: Record) -> None:
        """Count a trial."""
        self.total += 1
        self._errors += record.failure is not None
        self._started = min(filter(None, (self._started, record.started)), default=None)
        self._ended = max(filter(None, (self._ended, record.ended)), default=None)
        key = (record.agent, record.model or "", record.environment)
        found = self._evals.setdefault(key, {"rewards": {}, "errors": {}, "trials": 0, "failed": 0})
        found["trials"] += 1
        if record.reward is not None:
            found["rewards"].setdefault(record.reward, []).append(name)
        if record.failure is not None:
            found["failed"] += 1
            found["errors"].setdefault(_EXCEPTIONS[record.failure.kind], []).append(name)

    def agents(self) -> list[dict[str, Any]]:
        """Return the agents of the job's configuration."""
        named = Counter((agent, model) for agent, model, _ in self._evals)
        return [{"name": agent, "model_name": model or None} for agent, model in named]

    def result(self) -> dict[str, Any]:
        """Return the job's result."""
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, self.job)),
            "started_at": _time(self._started),
            "finished_at": _time(self._ended),
            "n_total_trials": self.total,
            "stats": {
                "n_completed_trials": self.total,
                "n_errored_trials": self._errors,
                "evals": {"__".join(filter(None, key)): _eval(found) for key, found in self._evals.items()},
            },
        }


def _eval(found: Mapping[str, Any]) -> dict[str, Any]:
    rewards: Mapping[float, list[str]] = found["rewards"]
    scored = sum(map(len, rewards.values()))
    mean = sum(reward * len(names) for reward, names in rewards.items()) / scored if scored else None
    return {
        "n_trials": found["trials"],
        "n_errors": found["failed"],
        "metrics": [] if mean is None else [{"mean": mean}],
        "reward_stats": {"reward": {str(reward): names for reward, names in rewards.items()}},
        "exception_stats": found["errors"],
    }


def plain_name(text: str) -> str:
    """Return a file name made from a text: no path, and not hidden. Different texts may get the same name."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip(".-")[:_LONGEST_NAME] or "item"


def _trial(name: str, record: Record) -> dict[str, bytes]:
    """Return the contents of a trial's files by path. Raise ValueError if the format can't hold the record."""
    configuration = {"task": {"path": f"tasks/{record.item_id}"}, "trial_name": name, "agent": {"name": record.agent}}
    texts = {
        "config.json": _json(configuration),
        "result.json": _json(_result(name, record, configuration)),
        "verifier/test-stdout.txt": _verifier_output(record),
    }
    if record.messages:
        texts["agent/trajectory.json"] = _json(trajectory(record))
    if record.reward is not None:
        texts["verifier/reward.json"] = _json({"reward": record.reward})
        texts["verifier/reward.txt"] = f"{record.reward}\n"
    if record.patch is not None:
        texts["agent/patch.diff"] = record.patch
    if record.failure is not None:
        texts["exception.txt"] = f"{record.failure.stage}: {record.failure.message}\n"
    return {path: text.encode() for path, text in texts.items()}


def _verifier_output(record: Record) -> str:
    """Return a text with the details of the reward, then the verification's commands and their output."""
    ran = [
        f"$ {command.command}\n{command.output}\n[exit code {command.exit_code}]\n"
        for command in record.sandbox_commands
        if command.stage == "verify"
    ]
    return "\n".join([_json(dict(record.details)), *ran])


def _result(name: str, record: Record, configuration: Mapping[str, Any]) -> dict[str, Any]:
    failure, usage, spans = record.failure, record.usage, _spans(record)
    return {
        "id": _uuid(record.trajectory_id),
        "task_name": record.item_id,
        "trial_name": name,
        "trial_uri": f"trajectory:{record.trajectory_id}",
        "task_id": {"path": f"tasks/{record.item_id}"},
        "source": record.environment,
        "task_checksum": hashlib.sha256(f"{record.environment}/{record.item_id}".encode()).hexdigest(),
        "config": configuration,
        "agent_info": {
            "name": record.agent,
            "version": record.versions.get("hermes-rl", "unknown"),
            "model_info": {"name": record.model, "provider": None} if record.model else None,
        },
        "agent_result": {
            "n_input_tokens": usage.prompt_tokens or None,
            "n_cache_tokens": usage.cached_tokens or None,
            "n_output_tokens": usage.completion_tokens or None,
            "cost_usd": usage.cost,
        },
        "verifier_result": None if record.reward is None else {"rewards": {"reward": record.reward}},
        "exception_info": failure
        and {
            "exception_type": _EXCEPTIONS[failure.kind],
            "exception_message": failure.message,
            "exception_traceback": "",
            "occurred_at": _time(record.ended) or _time(0.0),
        },
        "started_at": _time(record.started),
        "finished_at": _time(record.ended),
        "environment_setup": spans.get("acquire"),
        "agent_setup": spans.get("setup"),
        "agent_execution": spans.get("agent"),
        "verifier": spans.get("verify"),
    }


def _spans(record: Record) -> dict[str, dict[str, str | None]]:
    """Return the start and end of each stage, computed from the stages' durations, as stages follow each other."""
    if record.started is None:
        return {}
    spans, began = {}, record.started
    for stage in STAGES:
        seconds = record.timings.get(f"{stage}_s")
        if seconds is not None:
            spans[stage] = {"started_at": _time(began), "finished_at": _time(began + seconds)}
            began += seconds
    return spans


def _uuid(trajectory_id: str) -> str:
    try:
        return str(uuid.UUID(trajectory_id))
    except ValueError:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, trajectory_id))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else moment(seconds)


def _json(value: Any) -> str:
    return json_text(value, indent=2) + "\n"
