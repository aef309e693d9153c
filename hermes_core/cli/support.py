"""What the commands share: a runtime from the environment, a log that hides secrets, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click

from hermes_core.cli.exits import EXIT_INTERRUPTED
from hermes_core.errors import PluginError
from hermes_core.plugins.manager import PluginManager
from hermes_core.printing import say
from hermes_core.runtime import Runtime
from hermes_core.settings import RedactingFormatter, Settings

T = TypeVar("T")

CLEANUP_S = 20.0
"""How many seconds after Ctrl-C we wait for sandboxes to end. Those that take longer end themselves later."""

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, which a live display replaces, so that it stays below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record), err=True)
        except Exception:
            self.handleError(record)


def new_runtime(verbose: int = 0, **given: Any) -> Runtime:
    """Return a runtime with the environment's settings, and log to standard error.

    Args:
        verbose: 0 logs warnings, 1 progress, 2 everything.
        given: settings that override the environment's.

    Raises:
        ConfigError: the environment or a file that it names is wrong.
    """
    handler = _StandardError()
    logger = logging.getLogger("hermes_core")
    logger.setLevel(_LEVELS[min(verbose, 2)])
    # Add only one handler, even if this is called often in a process. By convention plugins' loggers are below ours.
    logger.handlers = [handler]
    settings = Settings.load(**given)
    form = "%(levelname)s %(name)s: %(message)s" if verbose else "%(levelname)s: %(message)s"
    ctx = click.get_current_context(silent=True)
    tracebacks = verbose > 0 or (ctx is not None and bool(ctx.find_root().params.get("traceback")))
    handler.setFormatter(RedactingFormatter(settings.redactor(), form, tracebacks=tracebacks))
    return Runtime(settings)


def plugin_command(name: str, known: Sequence[str]) -> click.Command:
    """Return the command that a plugin adds under this name.

    Args:
        known: other commands, which the error for an unknown name lists, too.

    Raises:
        UnknownNameError: there is none; it names the distribution or the plugin not in use that would add it.
        PluginError: two plugins claim it, or it can't be imported, or is no command.
    """
    plugins = PluginManager(allow=Settings.load().plugins)
    entry = replace(plugins.registry("command"), beside=tuple(known)).entry(name)
    command = entry.load()
    if not isinstance(command, click.Command):
        raise PluginError(
            f"command {name!r} of {entry.plugin.label} is {command!r}, which is not a click.Command",
            hint="decorate a function with @click.command()",
        )
    return command


def terminal_width() -> int | None:
    """Return how many columns standard output has; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def tell_problems(runtime: Runtime) -> None:
    """Say on standard error what is wrong with the plugins."""
    for problem in runtime.plugin_manager.problems():
        say(f"problem: {problem}", err=True)


def finish(
    ctx: click.Context,
    main: Callable[[Runtime], Coroutine[Any, Any, T]],
    interrupted: Callable[[], str] = lambda: "interrupted",
) -> T:
    """Run `main` in a runtime of its own, and return its result. Ctrl-C ends the program.

    Args:
        interrupted: what is said after Ctrl-C.
    """
    try:
        return asyncio.run(_interruptible(_within_runtime(ctx.obj or 0, main)))
    except asyncio.CancelledError:
        say(interrupted(), err=True)
        ctx.exit(EXIT_INTERRUPTED)


async def _within_runtime(verbose: int, main: Callable[[Runtime], Coroutine[Any, Any, T]]) -> T:
    async with new_runtime(verbose) as runtime:
        runtime.plugin_manager.check_named()
        tell_problems(runtime)
        return await main(runtime)


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Cancel on the first Ctrl-C (or TERM), with a time limit for cleaning up, and exit at once on the second."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            _leave()
        interrupted = True
        say("stopping: ending the sandboxes (Ctrl-C again leaves at once)", err=True)
        task.cancel()
        loop.call_later(CLEANUP_S, _leave)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    return await work


def _leave() -> NoReturn:
    say("left without cleaning up: what is left ends itself when it misses us", err=True)
    leave(EXIT_INTERRUPTED)


def leave(code: int) -> NoReturn:
    """End the program now, without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
