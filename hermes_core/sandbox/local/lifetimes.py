"""Signalling and awaiting processes by identity, from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from hermes_core.sandbox.local import processes

_POLL_S = 0.01


def send(process: tuple[int, int], number: signal.Signals) -> None:
    """Send a signal to that very process, or to nobody."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = _handle(process)
        if handle is None:
            os.kill(process[0], number)
            return
        try:
            signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _handle(process: tuple[int, int]) -> int | None:
    """A pidfd of that very process; None on a kernel without them. Raises ProcessLookupError if it has ended."""
    try:
        handle = os.pidfd_open(process[0])
    except ProcessLookupError:
        raise
    except OSError:
        if processes.alive(*process):
            return None
        raise ProcessLookupError(process[0]) from None
    if not processes.alive(*process):
        os.close(handle)
        raise ProcessLookupError(process[0])
    return handle


async def gone(process: tuple[int, int], limit_s: float) -> bool:
    """Wait for the process's end; whether it came in time."""
    try:
        handle = _handle(process)
    except ProcessLookupError:
        return True
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            if handle is None:
                while processes.alive(*process):  # noqa: ASYNC110 (nobody tells us)
                    await asyncio.sleep(_POLL_S)
            else:
                ended = asyncio.Event()
                loop.add_reader(handle, ended.set)
                await ended.wait()
    except TimeoutError:
        return False
    finally:
        if handle is not None:
            loop.remove_reader(handle)
            os.close(handle)
    return True


def reap(process: tuple[int, int]) -> None:
    """Take the exit status of that very process, if it is a child of ours that has ended.

    Its pid alone may be that of another child by now, whose status is somebody else's to take.
    """
    if processes.began(process[0]) == process[1]:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process[0], os.WNOHANG)
