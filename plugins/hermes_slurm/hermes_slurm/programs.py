"""Runs Slurm's own programs, and says what their failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Sequence

from hermes_core import AsyncioStreamChannel, ProvisionError

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
"""The programs that we use."""

_LIMIT_S = 60.0
_OUTPUT_BYTES = 32 << 20
_KEPT = ("SLURM_CONF", "SLURM_JWT")
_MAY_PASS = re.compile(
    r"unable to contact|timed out|temporar|zero bytes|connect failure|connection refused|standby mode|try again"
    r"|submit limit|start-?up|communication",
    re.IGNORECASE,
)
"""Answers after which another attempt may succeed: the controller is restarted or busy, or a limit is reached."""
_HINTS = {
    "account": "`sacctmgr show associations user=$USER` lists the accounts; the setting `account` names one",
    "partition": "`sinfo` lists the partitions; the setting `partition` names one",
    "qos": "`sacctmgr show qos` lists them; the setting `qos` names one",
    "memory": "ask for less `memory`, or for another `partition`",
    "node configuration": "no node has so much `cpu`, `memory` or `gres`: `sinfo -o '%P %c %m %G'` lists them",
    "generic resource": "`sinfo -o '%P %G'` lists what the nodes have; the setting `gres` asks for it",
    "feature": "`sinfo -o '%P %f'` lists the nodes' features; the setting `constraint` asks for them",
    "node name": "`sinfo -N` lists the nodes; the setting `exclude` names some",
    "time limit": "`sinfo -o '%P %l'` lists the partitions' limits; the setting `time_limit` asks for a time",
}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of Slurm's programs: ours, without what says of a job that the driver itself runs in.

    None of it reaches the job: see the options `--export`.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in _KEPT}
    return {**ours, **more}


async def run(*argv: str, script: str | None = None) -> str:
    """Run one of Slurm's programs, and return its output.

    Args:
        script: a text whose file is the program's last argument.

    Raises:
        ProvisionError: the program is missing, or failed.
    """
    with _file(script) as descriptors:
        arguments = [*argv, *(f"/proc/self/fd/{descriptor}" for descriptor in descriptors)]
        channel = await _start(arguments, descriptors)
    try:
        async with asyncio.timeout(_LIMIT_S):
            output = b""
            while data := await channel.read(1 << 16):
                output += data
                if len(output) > _OUTPUT_BYTES:
                    raise ProvisionError(f"{argv[0]} prints more than we can take")
            status = await channel.wait()
    except TimeoutError as error:
        raise ProvisionError(f"{argv[0]} gave no answer within {_LIMIT_S:.0f} s", hint="does `sinfo` work?") from error
    finally:
        await channel.aclose()
    if status:
        raise explain(argv[0], channel.stderr_tail or f"exit status {status}")
    return output.decode("utf-8", "replace")


def explain(program: str, words: str) -> ProvisionError:
    """Return the error for a program that failed with these words."""
    if _MAY_PASS.search(words):
        return ProvisionError(f"{program}: {words[-1000:]}", hint="`sinfo` shows whether Slurm's controller answers")
    hint = next((hint for word, hint in _HINTS.items() if word in words.lower()), f"does `{program}` work by hand?")
    return ProvisionError(f"{program}: {words[-1000:]}", hint=hint, retryable=False)


async def _start(argv: Sequence[str], descriptors: Sequence[int]) -> AsyncioStreamChannel:
    try:
        return await AsyncioStreamChannel.spawn(argv, env=environment(SLURM_TIME_FORMAT="%s"), pass_fds=descriptors)
    except OSError as error:
        raise ProvisionError(
            f"{argv[0]} can't be started: {error.strerror}",
            hint="run the driver where Slurm's programs are, such as on a login node, or put them into PATH",
            retryable=False,
        ) from error


@contextlib.contextmanager
def _file(text: str | None) -> Iterator[list[int]]:
    """Yield the descriptor of a file in memory with this text; none if there is no text."""
    if text is None:
        yield []
        return
    descriptor = os.memfd_create("script", 0)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(text.encode("utf-8"))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield [descriptor]
    finally:
        os.close(descriptor)
