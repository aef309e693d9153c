"""Starts the launcher to probe the host or to start a supervisor, passes it a request, and reads its report."""

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
    """Return the command line of the launcher. It runs without site packages, and ignores Python's variables."""
    return [view.interpreter(), "-I", "-S", str(LAUNCHER), mode, str(descriptor)]


@contextlib.contextmanager
def request_file(request: Mapping[str, object]) -> Iterator[int]:
    """Yield a descriptor to read the request from. On the command line, all users of the host could read it."""
    descriptor = os.memfd_create("request")
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            marshal.dump(dict(request), stream)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


_isolating: dict[tuple[int, int], Probe] = {}
"""The results by process id and user id, because a forked child may have fewer rights than we have."""


def probe_host() -> Probe:
    """Find out which namespaces this host allows. The first call in a process blocks for about 30 ms.

    If the host allows no namespaces, each call tries again, because the reason may be gone.
    """
    process = os.getpid(), os.geteuid()
    probe = _isolating.get(process) or _try_host()
    if probe.isolates:
        _isolating[process] = probe
    return probe


def _try_host() -> Probe:
    """Probe the host in a separate process, because a probe forks, and this process may have threads."""
    try:
        result = subprocess.run(
            launcher_argv("probe", 0),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={},
            timeout=_PROBE_S,
            check=True,
        )
        return Probe(**marshal.loads(result.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, EOFError, TypeError) as error:
        detail = getattr(error, "stderr", b"") or b""
        reason = f"the launcher fails: {error} {detail.decode('utf-8', 'replace').strip()[-500:]}".strip()
        return Probe(root=False, namespaces=False, user_namespaces=False, network=False, reason=reason)


async def create(request: Mapping[str, Any], mode: str = "create") -> dict[str, Any]:
    """Start a supervisor and return its report. If this is cancelled or fails, nothing is left behind.

    Args:
        mode: the launcher's mode, `create` or `container`.

    Raises:
        ProvisionError: the supervisor could not be started, or gave no report.
    """
    directory = Path(request["state_root"], request["sandbox_id"])
    try:
        pid, reader = _spawn(mode, request)
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
        await asyncio.to_thread(os.waitpid, pid, 0)  # the supervisor failed, or found a running sandbox, so it ends now
    return report


def _spawn(mode: str, request: Mapping[str, Any]) -> tuple[int, int]:
    """Start a supervisor. Return its pid, and a descriptor to read its report from.

    The supervisor may outlive us. Otherwise, `host.end` reaps it.
    """
    reader, writer = os.pipe()
    try:
        with request_file(request) as descriptor:
            supervisor = subprocess.Popen(
                launcher_argv(mode, descriptor),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=(descriptor,),
                cwd="/",
                start_new_session=True,  # so that Ctrl-C at our terminal does not reach it
            )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    supervisor.returncode = 0  # otherwise this object warns that its process still runs
    return supervisor.pid, reader


def _abandon(pid: int, directory: Path) -> None:
    """Undo a start at any stage: kill the supervisor, and remove the directory. The sandbox's first process dies with
    the supervisor, but holds the directory's lock until it is dead, so wait for the lock."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    directories.discard_unnamed(str(directory.parent), pid)
    deadline = time.monotonic() + _DYING_S
    while not directories.discard_dead(str(directory)) and os.path.lexists(directory) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


async def _read_all(descriptor: int) -> bytes:
    """Read a pipe to its end."""
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
