"""`python -m hermes_modal_emulator`: the emulator in the foreground, or for the rest of a shell's life."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path

from hermes_modal_emulator.server import MODES, EmulatorServer, choose_mode, serve, serve_owner


def main() -> None:
    """Parse the command line, and serve."""
    parser = argparse.ArgumentParser(prog="python -m hermes_modal_emulator", description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="auto", help="where commands run [namespaces if possible]")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1 [any]")
    parser.add_argument("--print-env", action="store_true", help="start it beside the calling shell, and print exports")
    parser.add_argument("--pid", type=int, help="with --print-env: the process that it ends with [the calling shell]")
    parser.add_argument("--follow", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--owned", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.print_env:
        _beside_the_shell(args.mode, args.port, args.pid or _shell(os.getppid()))
        return
    mode = choose_mode(args.mode)
    if args.owned:
        asyncio.run(serve_owner(mode, args.port))
        return
    say = _exports if args.follow else _explain
    asyncio.run(serve(mode, args.port, lambda server: say(server, mode), follow=args.follow))


def _beside_the_shell(mode: str, port: int, pid: int) -> None:
    """Start the emulator as a process of its own, and print its first lines."""
    argv = [sys.executable, "-m", "hermes_modal_emulator", "--mode", mode, "--port", str(port), "--follow", str(pid)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(argv, stdin=quiet, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while lines[-1].startswith(b"export "):
        lines.append(process.stdout.readline())
    if not lines[-1].strip():
        raise SystemExit("the emulator did not start")
    sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.flush()
    process.returncode = 0  # avoids Python's warning that nobody waited for the process, which lives on


def _shell(pid: int) -> int:
    """Return the shell from which a subshell was forked; the process itself if it is no subshell.

    `$(… 2>/dev/null)`, a function, `… || true` and a pipe run in subshells, which end with the command line.
    """
    while (parent := _parent_of_copy(pid)) is not None:
        pid = parent
    return pid


def _parent_of_copy(pid: int) -> int | None:
    """Return a process's parent if the process is a forked copy of the parent: both have the same program, and their
    stacks at the same address. Otherwise return None."""
    try:
        parent, stack = _parent_and_stack(pid)
        same = stack == _parent_and_stack(parent)[1]
        same = same and Path(f"/proc/{pid}/exe").readlink() == Path(f"/proc/{parent}/exe").readlink()
    except (OSError, ValueError, IndexError):
        return None
    return parent if same and stack else None


def _parent_and_stack(pid: int) -> tuple[int, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[25])


def _exports(server: EmulatorServer, mode: str) -> None:
    for name, value in server.environment().items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    sys.stdout.write(f"MODAL_EMULATOR_PID={os.getpid()}\n")
    sys.stdout.flush()
    quiet = os.open(os.devnull, os.O_WRONLY)  # `eval $(…)` waits until our standard output is closed
    for descriptor in (1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)


def _explain(server: EmulatorServer, mode: str) -> None:
    lines = [
        f"# Modal emulator, process {os.getpid()}, mode {mode}; end it with Ctrl-C. In the shell that is to use it:"
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in server.environment().items()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
