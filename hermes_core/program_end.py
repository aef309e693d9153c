"""The end of a program that leaves an event loop of ours as it is: neither closed, nor run by `asyncio.run`."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - so that its executors are shut down after what is done here
import contextlib
import os
import threading

_LIMIT_S = 60.0
"""How long the tasks of a loop may take to end, in seconds."""

_loops: set[asyncio.AbstractEventLoop] = set()


def finish_at_end(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop's tasks cancelled when the main thread ends, if the loop is neither closed nor runs by then.

    That is what `asyncio.run` does. Without it Python destroys the tasks as they are, while it takes its modules apart:
    none of them could end its sandbox any more, and each would complain.
    """
    if loop not in _loops:
        _loops.difference_update([each for each in [*_loops] if each.is_closed()])
        _loops.add(loop)


def _finish() -> None:
    for loop in [*_loops]:
        if not (loop.is_closed() or loop.is_running()):
            _cancel_all(loop)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_LIMIT_S))
    loop.run_until_complete(loop.shutdown_asyncgens())


os.register_at_fork(after_in_child=_loops.clear)  # a child has its parent's loops, but may not run them
with contextlib.suppress(RuntimeError):  # imported while the program ends: nothing comes after that
    # Not `atexit`, whose functions are called when executors take no calls any more.
    threading._register_atexit(_finish)  # type: ignore[attr-defined]
