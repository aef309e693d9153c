"""What this host allows, for `hermes-rl doctor`, and what Apptainer's messages mean."""

from __future__ import annotations

import asyncio
import os
import shutil

from hermes_core import Diagnosis, HermesError, ProvisionError
from hermes_core.sandbox.local import container, host, launch
from hermes_singularity import runtime

_LIMIT_S = 20.0

_ADVICE = {
    "no space left on device": "make room on the disk of `state_dir`, or name another one",
    "mount source": "the source of each volume must exist on this host",
    "/bin/sh": "the image needs /bin/sh",
    "permission denied": "the image and the sources of volumes must be readable; of root's driver, by every user",
    "overlay": "set `state_dir` to a directory on a local disk, such as ext4 or xfs",
    "unknown flag": "check `arguments`, and whether the program is Apptainer 1.2 or later",
}
"""Hints by a part of Apptainer's message, the first match counts. None of these problems is temporary."""


def not_started(said: str) -> ProvisionError:
    """Return the error for a container that did not start, by Apptainer's message."""
    message, text = f"the container could not be started: {said}", said.lower()
    for sign, advice in _ADVICE.items():
        if sign in text:
            return ProvisionError(message, hint=advice, retryable=False)
    return ProvisionError(message, hint="`hermes-rl doctor singularity` says what this host allows")


async def diagnose() -> Diagnosis:
    """Look for the program and for user namespaces. Never raises."""
    probe = await asyncio.to_thread(launch.probe_host)
    try:
        program = runtime.find_program()
        version = await _version(program)
    except HermesError as error:
        return Diagnosis(False, error.message, advice=(error.hint,) if error.hint else ())
    if not probe.isolates:
        reason = f"containers need user namespaces: {probe.reason}"
        return Diagnosis(False, reason, (version,), tuple(host.remedies(probe)))
    details = [f"{version} at {program}", "levels: shared, user, namespace, dedicated"]
    if container.owner_outside() != os.geteuid():
        details.append(f"root of a container is the user {container.CONTAINER_UID} outside")
    details.append("the processors and the memory of containers are not limited")
    advice = []
    if shutil.which("unsquashfs") is None:
        details.append("unsquashfs is missing, which unpacks SIF files")
        advice.append("install squashfs-tools, if you use SIF files")
    return Diagnosis(True, version, tuple(details), tuple(advice))


async def _version(program: str) -> str:
    """Return the program's name and version. Raises HermesError if it does not run."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            process = await asyncio.create_subprocess_exec(
                program,
                "--version",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
    except (OSError, TimeoutError) as error:
        raise HermesError(f"{program} does not run: {error or 'no answer'}", hint=runtime.INSTALL) from error
    if process.returncode != 0:
        said = errors.decode("utf-8", "replace").strip()[-500:]
        raise HermesError(f"{program} does not run: {said}", hint=runtime.INSTALL)
    return output.decode("utf-8", "replace").strip()[:100]
