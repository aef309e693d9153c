"""Starts the launcher: its command line, its request, a supervisor's report, and what it finds out about the host."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_core.aio import complete
from hermes_core.errors import ProvisionError
from hermes_core.sandbox.local import directories, view
from hermes_core.sandbox.local.host import Probe

LAUNCHER = Path(__file__).with_name("launcher.py")

_PROBE_S, _REPORT_S = 30.0, 60.0
_DYING_S, _PAUSE_S = 5.0, 0.005


def launcher_argv(mode: str, descriptor: int) -> list[str]:
    """Return the command line of a launcher: the bare interpreter, without its site packages or the caller's
    settings."""
    return [view.interpreter(), "-I", "-S", str(LAUNCHER), mode, str(descriptor)]


@contextlib.contextmanager
def request_file(request: Mapping[str, object]) -> Iterator[int]:
    """Yield a descriptor to read the request from. All users of a host could read it on the command line."""
    descriptor = os.memfd_create("request")
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            marshal.dump(dict(request), stream)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


_isolating: dict[tuple[int, int], Probe] = {}
"""What was found out by a process and its user. A forked child may have fewer rights, and finds out by itself."""


def probe_host() -> Probe:
    """Find out what this host allows. Blocks for about 30 ms, the first time in a process.

    A host that allows no namespaces is asked again each time, because the reason may be gone.
    """
    process = os.getpid(), os.geteuid()
    probe = _isolating.get(process) or _try_host()
    if probe.isolates:
        _isolating[process] = probe
    return probe


def _try_host() -> Probe:
    """Try it out in a separate process, because that forks."""
    try:
        done = subprocess.run(
            launcher_argv("probe", 0),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={},
            timeout=_PROBE_S,
            check=True,
        )
        return Probe(**marshal.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, EOFError, TypeError) as error:
        detail = getattr(error, "stderr", b"") or b""
        reason = f"the launcher fails: {error} {detail.decode('utf-8', 'replace').strip()[-500:]}".strip()
        return Probe(root=False, namespaces=False, user_namespaces=False, network=False, reason=reason)


async def create(request: Mapping[str, Any]) -> dict[str, Any]:
    """Start a supervisor and return its report. If cancelled, or without a report, nothing is left behind.

    Raises:
        ProvisionError: it could not be started, or returned no report.
    """
    directory = Path(request["state_root"], request["sandbox_id"])
    try:
        pid, reader = _spawn(request)
        try:
            async with asyncio.timeout(_REPORT_S):
                report: dict[str, Any] = marshal.loads(await _read_all(reader))
        except BaseException:
            await complete(asyncio.to_thread(_abandon, pid, directory))
            raise
        finally:
            os.close(reader)
    except OSError as error:
        hint = None if not isinstance(error, TimeoutError) else "is this host overloaded?"
        raise ProvisionError(f"the launcher can't be started: {error or 'it gives no report'}", hint=hint) from error
    except (EOFError, ValueError) as error:
        raise ProvisionError(
            "the launcher ended without a report", hint="check whether this host is out of memory"
        ) from error
    if "record" not in report or report["record"]["supervisor"][0] != pid:
        await asyncio.to_thread(os.waitpid, pid, 0)  # it has nothing more to do
    return report


def _spawn(request: Mapping[str, Any]) -> tuple[int, int]:
    """Return a supervisor's pid, and a descriptor for its report. It may outlive us; whoever ends the sandbox reaps
    it."""
    reader, writer = os.pipe()
    try:
        with request_file(request) as descriptor:
            supervisor = subprocess.Popen(
                launcher_argv("create", descriptor),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=(descriptor,),
                cwd="/",
                start_new_session=True,  # Ctrl-C at our terminal is not for it
            )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    supervisor.returncode = 0  # so that this object does not complain that the process lives on
    return supervisor.pid, reader


def _abandon(pid: int, directory: Path) -> None:
    """Undo a start at any stage. The first process dies with its supervisor, but holds the directory for as long as it
    takes to die."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    directories.discard_unnamed(str(directory.parent), pid)
    deadline = time.monotonic() + _DYING_S
    while not directories.discard_dead(str(directory)) and os.path.lexists(directory) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


async def _read_all(descriptor: int) -> bytes:
    """Return everything up to the end of a pipe."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    os.set_blocking(descriptor, False)
    loop.add_reader(descriptor, ready.set)
    parts = []
    try:
        while True:
            await ready.wait()
            ready.clear()
            with contextlib.suppress(BlockingIOError):
                while data := os.read(descriptor, 1 << 16):
                    parts.append(data)
                return b"".join(parts)
    finally:
        loop.remove_reader(descriptor)
