"""A stand-in for a provider's SDK, to be replaced by it: machines that are a directory and processes of this host.

A provider has to offer what this module has: machines with labels that are set when a machine is created; a main
process, whose end is the end of the machine; programs in the machine that outlive the connection; and a list.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MACHINES = Path(tempfile.gettempdir()) / f"example-backend-{os.getuid()}"
MARK = "HERMES_SANDBOX_ID"
"""The environment variable by which a machine's processes are found; hermes-rl passes it on to commands of slots."""
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}


def starter(machine: str, labels: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return the program that creates a machine, with this main process, and prints `created` or `exists`.

    The program's environment has to be `environment(machine)`, by which `destroy` finds a creation under way.
    """
    return ["setsid", "--fork", sys.executable, "-I", __file__, machine, json.dumps(labels), *command]


def program(machine: str, argv: Sequence[str]) -> list[str]:
    """Return a program that runs `argv` in a machine. The program's environment has to be `environment(machine)`."""
    return ["sh", "-c", 'cd "$0" && exec "$@"', str(workspace(machine)), *argv]


def environment(machine: str) -> dict[str, str]:
    """Return the environment of programs in a machine."""
    return {**ENVIRONMENT, MARK: machine}


def workspace(machine: str) -> Path:
    """Return the directory in which the machine's main process runs."""
    return MACHINES / machine / "data"


def machines() -> dict[str, dict[str, str]]:
    """Return the labels of every machine."""
    found = {}
    for path in MACHINES.glob("*/labels.json"):
        try:
            found[path.parent.name] = json.loads(path.read_text())
        except FileNotFoundError:  # the machine has ended meanwhile
            continue
    return found


def destroy(machine: str) -> None:
    """Kill the machine's processes, and remove its directory. Does nothing if there is no such machine.

    The guest has to die before its commands. Otherwise it reports to hermes-rl that a command was killed.
    """
    clean = 0
    while clean < 2:  # one look may miss processes that fork meanwhile
        running = _processes(machine)
        clean = 0 if running else clean + 1
        for process in running:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    for directory in (MACHINES / machine, *MACHINES.glob(f".{machine}-*")):
        shutil.rmtree(directory, ignore_errors=True)


def _processes(machine: str) -> list[int]:
    """Return the ids of the machine's processes, oldest first, so that parents come before their children."""
    wanted = f"{MARK}={machine}".encode()
    found = []
    for process in set(Path("/proc").glob("[0-9]*")) - {Path(f"/proc/{os.getpid()}")}:
        try:
            state, *fields = process.joinpath("stat").read_text().rpartition(")")[2].split()
            if state not in "ZX" and wanted in process.joinpath("environ").read_bytes().split(b"\0"):
                found.append((int(fields[18]), int(process.name)))  # start time
        except OSError:  # the process has ended, or belongs to another user
            continue
    return [process for _, process in sorted(found)]


def _create(machine: str, labels: str, command: Sequence[str]) -> None:
    """Create a machine, stay until its main process has ended, and remove it."""
    MACHINES.mkdir(mode=0o700, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=MACHINES, prefix=f".{machine}-"))
    (made / "data").mkdir()
    (made / "labels.json").write_text(labels)
    try:
        made.rename(MACHINES / machine)  # fails for a second machine with the name
    except OSError:
        shutil.rmtree(made)
        os.write(1, b"exists\n")
        return
    null = subprocess.DEVNULL
    main = subprocess.Popen(
        command, cwd=workspace(machine), env=environment(machine), stdin=null, stdout=null, stderr=null
    )
    os.write(1, b"created\n")
    main.wait()
    destroy(machine)


if __name__ == "__main__":
    _create(sys.argv[1], sys.argv[2], sys.argv[3:])
