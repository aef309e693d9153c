"""The queue: which of our jobs exist, and in which state. All callers share one look at it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from dataclasses import asdict, dataclass

from hermes_core import ProvisionError, SingleFlight, TaskSet
from hermes_core.sandbox.remote.host import sandbox_id_of
from hermes_slurm import programs

log = logging.getLogger(__name__)

_NAME = re.compile(r"hermes-rl-[0-9a-f]{20}")
_FIELDS = "%i|%T|%V|%e|%r|%j|%k"  # the comment is last: it may hold the separator
_PAUSE_S = 0.5
"""Minimum time in seconds between the end of one look and the beginning of the next one at the queue."""

END_S = 45.0
"""Seconds for which the job of a sandbox may end by itself before it is cancelled."""


@dataclass(frozen=True)
class JobLabel:
    """The comment of a job, by which any driver knows and reaches its sandbox."""

    owner: str
    creation_id: str
    isolation: str
    python: str
    directory: str | None

    @property
    def text(self) -> str:
        """Return the label as Slurm keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> JobLabel:
        """Return the label in a comment. Raises ValueError if it is none."""
        values = json.loads(text)
        try:
            label = cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error
        if not all(isinstance(each, str) or (name == "directory" and each is None) for name, each in values.items()):
            raise ValueError("a value is no text")
        return label


@dataclass(frozen=True)
class SlurmJob:
    """A job of ours in the queue."""

    job_id: str
    state: str
    """Slurm's word: PENDING, RUNNING, COMPLETING, …"""
    submitted: float
    """Seconds since the epoch."""
    ends: float | None
    """When the time limit is reached, in seconds since the epoch; None if it has not begun."""
    reason: str
    """Why it waits, as one of Slurm's words: Resources, Priority, …"""
    name: str
    label: JobLabel

    @property
    def sandbox_id(self) -> str:
        """Return the id of the job's sandbox."""
        return f"{self.job_id}/{sandbox_id_of(self.label.creation_id)}"

    @property
    def waits(self) -> bool:
        """Return whether the job has not begun yet."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")

    @property
    def runs(self) -> bool:
        """Return whether the job has begun and not ended."""
        return self.state in ("RUNNING", "SUSPENDED", "RESIZING", "SIGNALING")


def job_name(creation_id: str) -> str:
    """Return the name of the job for a creation id, the same one on each call."""
    return "hermes-rl-" + sandbox_id_of(creation_id).rpartition("-")[2]


class JobQueue:
    """The jobs of this account that carry our name."""

    def __init__(self) -> None:
        self._work = TaskSet()
        self._looks: SingleFlight[dict[str, SlurmJob]] = SingleFlight("the look at Slurm's queue")
        self._number = 0
        self._last = -_PAUSE_S

    async def look(self) -> dict[str, SlurmJob]:
        """Return our jobs by id, as they are after this call. Ended ones are not in the queue.

        Raises:
            ProvisionError: Slurm does not answer.
        """
        return await self._looks.get(self._work, self._look, self._number)

    async def find(self, name: str) -> SlurmJob | None:
        """Return the job of this name that runs or waits. If drivers raced, the first of theirs counts."""
        jobs = [job for job in (await self.look()).values() if job.name == name and (job.runs or job.waits)]
        return min(jobs, key=lambda job: int(job.job_id), default=None)

    async def cancel(self, name: str, *, job_id: str | None = None, patience_s: float = 0) -> None:
        """End all jobs of this name, or only one of them. Return when they have left the queue.

        Args:
            patience_s: seconds for which a running job may end by itself, when it is asked to. Slurm kills a cancelled
                job after KillWait (often 30 s), and its keeper may need longer to remove the sandbox's files.

        Raises:
            ProvisionError: Slurm does not answer.
        """
        pause_s, asked = _PAUSE_S, patience_s == 0
        patient_until = time.monotonic() + patience_s
        while True:
            jobs = [job for job in (await self.look()).values() if job.name == name and job_id in (None, job.job_id)]
            if not jobs:
                return
            running = [job.job_id for job in jobs if job.runs]
            if running and not asked:
                asked = True
                try:
                    await programs.run("scancel", "--batch", "--signal=TERM", *running)
                except ProvisionError as error:  # its batch step has not begun
                    if error.retryable:
                        raise
                    patient_until = 0.0
            is_patient = time.monotonic() < patient_until
            if living := [job.job_id for job in jobs if job.waits or (job.runs and not is_patient)]:
                await programs.run("scancel", *living)
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 5.0)

    async def aclose(self) -> None:
        """Cancel the looks in progress."""
        await self._work.aclose()

    async def _look(self) -> dict[str, SlurmJob]:
        await asyncio.sleep(self._last + _PAUSE_S - time.monotonic())
        self._number += 1  # who asks from now on needs another look
        try:
            output = await programs.run("squeue", "--me", "--noheader", f"--format={_FIELDS}")
        finally:
            self._last = time.monotonic()
        jobs = [job for line in output.splitlines() if (job := _read_job(line)) is not None]
        return {job.job_id: job for job in jobs}


def _read_job(line: str) -> SlurmJob | None:
    """Return the job of a line of squeue; None if it is none of ours."""
    fields = line.split("|", 6)
    if len(fields) != 7 or not fields[0].isdigit() or not _NAME.fullmatch(fields[5]):
        return None
    job_id, state, submitted, ends, reason, name, comment = fields
    try:
        label = JobLabel.read(comment)
    except ValueError as error:
        log.warning("job %s has our name, but not our comment: %s", job_id, error)
        return None
    return SlurmJob(job_id, state, _seconds(submitted) or 0.0, _seconds(ends), reason, name, label)


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None
