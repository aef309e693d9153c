"""Says for `hermes-rl doctor` whether jobs can be submitted here."""

from __future__ import annotations

import asyncio
import shutil

from hermes_core import Diagnosis, ProvisionError
from hermes_slurm import programs

_LIMIT_S = 10.0


async def diagnose() -> Diagnosis:
    """Look for Slurm's programs, and ask the controller for its partitions."""
    missing = [name for name in (*programs.PROGRAMS, "sinfo") if shutil.which(name) is None]
    if missing:
        return Diagnosis(
            False,
            f"Slurm's programs are not here: {', '.join(missing)}",
            advice=("run the driver on a login node of a cluster, or put Slurm's programs into PATH",),
        )
    try:
        async with asyncio.timeout(_LIMIT_S):
            version = (await programs.run("sinfo", "--version")).strip()
            lines = (await programs.run("sinfo", "--noheader", "--format=%P|%a|%l|%D|%T|%c|%m|%G")).splitlines()
    except (ProvisionError, TimeoutError) as error:
        reason = str(error) or f"no answer within {_LIMIT_S:.0f} s"
        return Diagnosis(
            False, f"Slurm's controller can't be asked: {reason}", advice=("`scontrol ping` shows whether it answers",)
        )
    rows = [fields for line in lines if len(fields := line.split("|")) == 8]
    usable = any(fields[1] == "up" for fields in rows)
    return Diagnosis(
        usable,
        f"{version}, {len({fields[0] for fields in rows})} partitions",
        tuple(map(_describe, rows)),
        () if usable else ("no partition is up: ask who runs the cluster",),
    )


def _describe(fields: list[str]) -> str:
    """Return one line about the nodes of a partition that are in one state."""
    name, up, limit, nodes, state, cores, memory, gres = fields
    more = "" if gres in ("", "(null)") else f", {gres}"
    default = " (default)" if name.endswith("*") else ""
    return (
        f"partition {name.rstrip('*')}{default}: {up}, time limit {limit}, {nodes} nodes {state}, "
        f"each {cores} cores and {memory} MiB{more}"
    )
