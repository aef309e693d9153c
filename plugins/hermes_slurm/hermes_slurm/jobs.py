"""The jobs: submits one for each sandbox, waits until it runs, and opens channels through steps of it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from hermes_core import Channel, ChannelLost, HermesError, ProvisionError, SandboxSpec, complete
from hermes_core.sandbox.remote.host import RemoteHost, creation_request, sandbox_id_of
from hermes_core.sandbox.remote.relay import RelayChannel, keeper_script, relay_command
from hermes_slurm import programs
from hermes_slurm.config import SlurmConfig
from hermes_slurm.queue import JobLabel, JobQueue, SlurmJob, job_name

log = logging.getLogger(__name__)

_PLACE = "/tmp/hermes-rl-slurm"
_SOCKET = "job-$SLURM_JOB_ID.socket"
_PATIENCE_S = 60.0
"""Seconds for which a job waits for its first request, and the first request for the job's keeper."""
_CANCEL_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
"""Seconds between two looks at the queue for a job that waits."""
_ASK_PAUSES_S = (0.2, 1.0, 4.0)
"""Seconds before the second, the third and the fourth attempt to make the sandbox in a job."""
_NEVER = re.compile(
    r"PartitionDown|PartitionInactive|PartitionNodeLimit|PartitionTimeLimit|BadConstraints|JobHeld\w*|Invalid\w+"
    r"|AccountNotAllowed|QOSNotAllowed|DependencyNeverSatisfied|ReservationDeleted|(Assoc|QOS)Max\w*PerJob\w*"
    r"|Assoc\w*Wall\w*|QOSUsageThreshold|launch_failed_requeued_held"
)
"""Reasons of a waiting job that do not pass by themselves."""
_ENDS = {
    "5:0": "the Python there is older than 3.7: name another one by `python`",
    "6:0": "the directory for sandboxes can't be used there: name another one by `directory`",
    "126:0": "Python can't be run there: name another one by `python`",
    "127:0": "there is no Python: name one by `python`",
}
"""Maps exit codes of a job without a sandbox to what is wrong on the node."""


class JobHost(RemoteHost):
    """The node of a job, as the place of its sandbox. Each request is a step of the job, through which the job's keeper
    gets it.

    Args:
        wait_s: time limit in seconds for the keeper to start.
    """

    kind: ClassVar[str] = "job"

    def __init__(self, job: SlurmJob, *, wait_s: float = 0) -> None:
        self.name = job.job_id
        self._relay = relay_command(job.label.python, _keeper_request(job.label), wait_s)

    async def open(self, request: Mapping[str, Any]) -> Channel:
        """Start a step that passes a request to the keeper, and return the channel to it.

        Raises:
            ChannelLost: `srun` can't be started.
        """
        options = ["--unbuffered", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--gres=none"]
        options += ["--mpi=none", "--export=NONE", "--chdir=/", f"--jobid={self.name}"]
        argv = ["srun", *options, "/bin/sh", "-c", 'exec "$0" "$@"', *self._relay]
        return await RelayChannel.start(argv, request, env=programs.environment())

    def explain_silence(self, status: int, words: str) -> HermesError:
        """Return the error for a step without an answer. The job's state says more."""
        return ChannelLost(f"job {self.name} gives no answer: status {status}: {words[-1000:]}")


async def make_sandbox(queue: JobQueue, config: SlurmConfig, spec: SandboxSpec) -> tuple[SlurmJob, dict[str, Any]]:
    """Make the sandbox of this spec, or find it. Return its job, and the keeper's description of the sandbox.

    If this fails or is cancelled, the job that it has submitted is ended.

    Raises:
        ProvisionError: Slurm refuses the job or does not answer, or the job waits for too long, or it has ended.
        PolicyError, ConfigError: the node can't have such a sandbox.
        ChannelLost: the job can't be reached.
    """
    name = job_name(spec.creation_id)
    found = await queue.find(name)
    submitted = None
    try:
        if found is None:
            submitted = await complete(_submit(config, spec, name))
        job = await _wait_to_run(queue, name, submitted, config.queue_timeout_s)
        answer = await _ask_for_sandbox(queue, job, spec)
        if submitted not in (None, job.job_id):  # another driver was faster
            await queue.cancel(name, job_id=submitted)
        return job, answer
    except BaseException:
        if found is None:
            await complete(_give_up(queue, name, submitted))
        raise


async def _submit(config: SlurmConfig, spec: SandboxSpec, name: str) -> str:
    """Submit the job of a sandbox, and return its id."""
    label = JobLabel(spec.owner, spec.creation_id, spec.isolation.label, config.python, config.directory)
    request = {**_keeper_request(label), "sandbox_id": sandbox_id_of(spec.creation_id), "patience_s": _PATIENCE_S}
    ours = ["--parsable", "--nodes=1", "--ntasks=1", "--no-requeue", "--export=NIL", "--chdir=/", "--output=/dev/null"]
    ours += [f"--job-name={name}", f"--comment={label.text}"]
    answer = await programs.run("sbatch", *ours, *config.job_options(), script=keeper_script(config.python, request))
    job_id = answer.strip().rpartition("\n")[2].partition(";")[0]
    if not job_id.isdigit():
        raise ProvisionError(f"sbatch answers with {answer[:200]!r}, which is no job id")
    return job_id


def _keeper_request(label: JobLabel) -> dict[str, Any]:
    return {"directory": label.directory, "usual": _PLACE, "socket": _SOCKET}


async def _wait_to_run(queue: JobQueue, name: str, submitted: str | None, limit_s: float) -> SlurmJob:
    """Return the job of this name when it runs."""
    deadline, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while True:
        is_late = time.monotonic() > deadline
        try:
            job = await queue.find(name)
        except ProvisionError as error:
            if not error.retryable or is_late:
                raise
            log.info("the queue can't be seen now: %s", error)
        else:
            if job is None:
                raise await _explain_end(submitted or name)
            if job.runs:
                return job
            final = _NEVER.fullmatch(job.reason) is not None
            if final or is_late:
                raise ProvisionError(
                    f"job {job.job_id} does not run: it {'can never run' if final else f'waited {limit_s:.0f} s'}, "
                    f"because of {job.reason}",
                    hint="JOB REASON CODES of `man squeue` says what that means; the profile's settings ask for less, "
                    "or for another partition, and `queue_timeout_s` lets it wait longer",
                    retryable=not final,
                )
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


async def _ask_for_sandbox(queue: JobQueue, job: SlurmJob, spec: SandboxSpec) -> dict[str, Any]:
    """Make the sandbox in its running job, or find it there."""
    pauses = iter(_ASK_PAUSES_S)
    while True:
        try:
            return await JobHost(job, wait_s=_PATIENCE_S).ask(creation_request(spec))
        except ChannelLost as error:
            now = (await queue.look()).get(job.job_id)
            if now is None or not now.runs:
                raise await _explain_end(job.job_id) from error
            pause_s = next(pauses, None)
            if pause_s is None:
                raise
            log.info("asking again: %s", error)
        await asyncio.sleep(pause_s)


async def _explain_end(job_id: str) -> ProvisionError:
    """Return the error for a job that has ended too early."""
    try:
        text = await programs.run("scontrol", "show", "job", "--oneliner", job_id)
    except ProvisionError as error:
        return ProvisionError(f"job {job_id} has ended, and Slurm does not say why: {error.message}")
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    code = fields.get("ExitCode", "")
    state = f"{fields.get('JobState')} on {fields.get('NodeList')}, reason {fields.get('Reason')}, exit code {code}"
    return ProvisionError(f"job {job_id} has ended: {state}", hint=_ENDS.get(code), retryable=code not in _ENDS)


async def _give_up(queue: JobQueue, name: str, submitted: str | None) -> None:
    """End the job that was submitted, or all jobs of this name if its id is not known."""
    try:
        async with asyncio.timeout(_CANCEL_S):
            await queue.cancel(name, job_id=submitted)
    except (ProvisionError, TimeoutError) as error:
        log.warning("job %s can't be cancelled; once it runs, it ends as nobody asks it for anything: %s", name, error)
