"""The parts that need no cluster: settings, lines of the queue, and what Slurm's words mean."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hermes_slurm import programs
from hermes_slurm.backend import SlurmBackend
from hermes_slurm.config import SlurmConfig
from hermes_slurm.jobs import _NEVER
from hermes_slurm.queue import JobLabel, _read_job, job_name

from hermes_core import Isolation, UsageError

LABEL = JobLabel("me | you", "a-creation", "namespace", "python3", None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"time_limit": 7200}, "write '02:00:00' for two hours"),
        ({"time_limit": "120"}, "write '02:00:00' for two hours"),
        ({"partition": "-x"}, "begins with `-`"),
        ({"account": "a b"}, "has blanks"),
        ({"cpu": 1.5}, "whole cores"),
        ({"options": ["-x"]}, "write --name or --name=value"),
        ({"options": ["--exclusive\n--x"]}, "write --name or --name=value"),
        ({"options": ["--job-name=mine"]}, "sets --job-name itself"),
        ({"options": ["--partition=cpu"]}, "by a setting of its own"),
        ({"directory": "here"}, "no absolute path"),
        ({"partitions": "cpu"}, "did you mean 'partition'"),
    ],
)
def test_a_setting_that_is_wrong_says_what_to_write(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        SlurmConfig.from_dict("mine", given)
    assert words in str(caught.value) and "mine" in str(caught.value)


def test_a_profile_becomes_options_of_sbatch() -> None:
    profile = {"partition": "cpu", "cpu": 4, "memory": 2000, "gres": "gpu:1", "time_limit": "1-00"}
    config = SlurmConfig.from_dict("mine", {**profile, "options": ["--exclusive"]})
    options = ["--partition=cpu", "--gres=gpu:1", "--time=1-00", "--cpus-per-task=4", "--mem=2000M", "--exclusive"]
    assert config.job_options() == options
    assert SlurmConfig().job_options() == []


def test_devices_are_seen_at_shared_only() -> None:
    assert SlurmBackend().levels(SlurmConfig(gres="gpu:1")) == {Isolation.SHARED}
    assert Isolation.NAMESPACE in SlurmBackend().levels(SlurmConfig())


def test_a_line_of_the_queue() -> None:
    name = job_name(LABEL.creation_id)
    job = _read_job(f"12|RUNNING|100|200|None|{name}|{LABEL.text}")
    assert job is not None and job.label == LABEL and job.runs and (job.submitted, job.ends) == (100.0, 200.0)
    assert job.sandbox_id.startswith("12/") and job.sandbox_id[-20:] == name[-20:]
    pending = _read_job(f"13|PENDING|100|N/A|Resources|{name}|{LABEL.text}")
    assert pending is not None and pending.waits and pending.ends is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "12|RUNNING",
        f"12|RUNNING|1|2|None|mine|{LABEL.text}",
        f"12_3|RUNNING|1|2|None|{job_name('a')}|{LABEL.text}",
        f"12|RUNNING|1|2|None|{job_name('a')}|(null)",
        f"12|RUNNING|1|2|None|{job_name('a')}|[1]",
        f"12|RUNNING|1|2|None|{job_name('a')}|" + LABEL.text.replace('"me | you"', "5"),
        f"12|RUNNING|1|2|None|{job_name('a')}|" + LABEL.text.replace("owner", "own"),
    ],
)
def test_a_line_that_is_none_of_ours(line: str) -> None:
    assert _read_job(line) is None


@pytest.mark.parametrize(
    ("words", "passes", "hint"),
    [
        ("Unable to contact slurm controller (connect failure)", True, "controller answers"),
        ("Socket timed out on send/recv operation", True, "controller answers"),
        ("Slurm temporarily unable to accept job, sleeping and retrying", True, "controller answers"),
        ("Job violates accounting/QOS policy (job submit limit, user's size)", True, "controller answers"),
        ("Batch job submission failed: Invalid partition name specified", False, "setting `partition`"),
        ("Memory specification can not be satisfied", False, "less `memory`"),
        ("Invalid account or account/partition combination specified", False, "setting `account`"),
        ("Something new", False, "by hand"),
    ],
)
def test_what_slurm_s_words_mean(words: str, passes: bool, hint: str) -> None:
    error = programs.explain("sbatch", words)
    assert error.retryable is passes and words in error.message and hint in (error.hint or "")


@pytest.mark.parametrize(
    ("reason", "final"),
    [
        *(
            (word, False)
            for word in ("None", "Resources", "Priority", "BeginTime", "ReqNodeNotAvail", "QOSMaxJobsPerUserLimit")
        ),
        *((word, True) for word in ("PartitionTimeLimit", "BadConstraints", "JobHeldAdmin", "QOSMaxCpuPerJobLimit")),
    ],
)
def test_reasons_that_never_pass(reason: str, final: bool) -> None:
    assert (_NEVER.fullmatch(reason) is not None) is final


async def test_slurm_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = await SlurmBackend().check()
    assert not found.usable and "sbatch" in found.summary and "login node" in found.advice[0]
    with pytest.raises(Exception, match="sbatch can't be started") as caught:
        await programs.run("sbatch")
    assert not caught.value.retryable  # type: ignore[attr-defined]


async def test_what_a_program_prints_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(Exception, match="more than we can take"):
        await programs.run("yes")
    monkeypatch.setattr(programs, "_LIMIT_S", 0.2)
    with pytest.raises(Exception, match="no answer within"):
        await programs.run("sleep", "100")
    assert (await programs.run("cat", script="a text")) == "a text"


def test_the_environment_of_slurm_s_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/conf")
    monkeypatch.setenv("SBATCH_PARTITION", "cpu")
    found = programs.environment(SLURM_TIME_FORMAT="%s")
    assert "SLURM_JOB_ID" not in found
    assert (found["SLURM_CONF"], found["SBATCH_PARTITION"], found["SLURM_TIME_FORMAT"]) == ("/conf", "cpu", "%s")


def test_the_entry_point_imports_little() -> None:
    code = "import sys, hermes_slurm; print([name for name in sys.modules if name.startswith('hermes_slurm.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
