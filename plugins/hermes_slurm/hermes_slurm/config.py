"""The settings of a profile of the `slurm` backend."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from hermes_core import SandboxConfig

_TIME = re.compile(r"\d+-\d{1,2}(:\d{2}){0,2}|\d+:\d{2}(:\d{2})?")
_WORD = re.compile(r"[^\s-]\S*")
_OURS = frozenset(
    {
        *("array", "chdir", "comment", "dependency", "export", "export-file", "get-user-env", "job-name", "nodes"),
        *("ntasks", "parsable", "quiet", "requeue", "test-only", "wait", "wrap"),
        *("account", "constraint", "cpus-per-task", "exclude", "gres", "mem", "partition", "qos", "time"),
    }
)
"""Options of sbatch that come from us or from other settings."""


class SlurmConfig(SandboxConfig):
    """A profile of the `slurm` backend. A sandbox is a job of one node, and has the node's system."""

    unsupported = ("image",)

    partition: str | None = None
    """The partition; None is the cluster's default, or that of the variable SBATCH_PARTITION."""
    account: str | None = None
    """The account that is charged; None is the user's default."""
    qos: str | None = None
    """The quality of service."""
    constraint: str | None = None
    """The features that the node must have, as sbatch writes them."""
    exclude: str | None = None
    """The nodes that must not be used, as sbatch writes them: `n[1-3],n7`."""
    gres: str | None = None
    """Generic resources of the job, as sbatch writes them: `gpu:a100:1`. Slots see devices only at level `shared`."""
    time_limit: str | None = None
    """The job's time limit: `HH:MM:SS`, `MM:SS` or `D-HH`, in quotes in YAML. Then Slurm ends the sandbox. None is the
    partition's default."""
    options: tuple[str, ...] = ()
    """Further options of sbatch: `--reservation=course`."""
    queue_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a job may wait in the queue before the sandbox counts as not to be had."""
    directory: str | None = None
    """The directory of the sandboxes on a node, on a local disk and never on a network one. Variables of the job are
    replaced: `/scratch/$SLURM_JOB_ID`. None is `/tmp/hermes-rl-slurm-<uid>`."""
    python: str = "python3"
    """Python 3.7 or newer on the nodes. It runs our program there and the guest, and is the slots' `python3`."""

    @field_validator("partition", "account", "qos", "constraint", "exclude", "gres", "python")
    @classmethod
    def _is_a_word(cls, value: str | None) -> str | None:
        if value is not None and not _WORD.fullmatch(value):
            raise ValueError(f"{value!r} is empty, has blanks, or begins with `-`")
        return value

    @field_validator("cpu")
    @classmethod
    def _is_whole(cls, value: float | None) -> float | None:
        if value is not None and value != int(value):
            raise ValueError(f"Slurm gives whole cores, not {value}")
        return value

    @field_validator("time_limit", mode="before")
    @classmethod
    def _is_a_time(cls, value: object) -> object:
        # YAML reads 2:00:00 without quotes as the number 7200, which Slurm would take for minutes.
        if value is not None and not (isinstance(value, str) and _TIME.fullmatch(value)):
            raise ValueError(f"{value!r} is no time: write '02:00:00' for two hours, in quotes in YAML")
        return value

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = option.removeprefix("--").partition("=")[0]
            if not option.startswith("--") or not name or "\n" in option:
                raise ValueError(f"{option!r} is no option: write --name or --name=value, one in each entry")
            if name in _OURS:
                raise ValueError(f"{option!r}: the backend sets --{name} itself, some by a setting of its own")
        return options

    @model_validator(mode="after")
    def _has_a_place(self) -> SlurmConfig:
        if self.directory is not None and not self.directory.startswith(("/", "$", "~")):
            raise ValueError(f"directory: {self.directory!r} is no absolute path")
        return self

    @property
    def gpu_count(self) -> int | None:
        """Return 0 if the profile names no generic resources; otherwise None, as only the cluster can count these."""
        return 0 if self.gres is None else None

    def job_options(self) -> list[str]:
        """Return the options of sbatch that this profile sets."""
        settings = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "exclude": self.exclude,
            "gres": self.gres,
            "time": self.time_limit,
            "cpus-per-task": None if self.cpu is None else int(self.cpu),
            "mem": None if self.memory is None else f"{self.memory}M",
        }
        return [*(f"--{name}={value}" for name, value in settings.items() if value is not None), *self.options]
