"""Functions that commands share: a runtime from the environment, a log that hides secrets, and a clean end."""

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
"""Seconds to wait after Ctrl-C for sandboxes to end. Sandboxes that take longer end by themselves later."""

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`: a live display replaces it so that log lines appear above the display."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record), err=True)
        except Exception:
            self.handleError(record)


def new_runtime(verbose: int = 0, **given: Any) -> Runtime:
    """Return a runtime with the settings from the environment variables, and log to standard error.

    Args:
        verbose: 0 logs warnings, 1 also progress, 2 everything.
        given: settings that override those from the environment variables.

    Raises:
        ConfigError: an environment variable, or a file named by one, is wrong.
    """
    handler = _StandardError()
    logger = logging.getLogger("hermes_core")
    logger.setLevel(_LEVELS[min(verbose, 2)])
    # Replace the handlers, so that there is only one after several calls. By convention, plugins' loggers are below
    # this logger.
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
        known: names of other commands, for the error that lists the known names.

    Raises:
        UnknownNameError: there is no such command; names the distribution or the unused plugin that would add it.
        PluginError: two plugins claim the name, or the command can't be imported, or is no click command.
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
    """Return the number of columns of standard output; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def tell_problems(runtime: Runtime) -> None:
    """Print the problems of plugins on standard error."""
    for problem in runtime.plugin_manager.problems():
        say(f"problem: {problem}", err=True)


def tell_not_installed(runtime: Runtime, kind: str) -> None:
    """Say on standard error which entries of this kind could be installed: a line for each distribution of ours."""
    missing = runtime.plugin_manager.registry(kind).not_installed()
    for distribution in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, brings in missing.items() if brings == distribution)
        say(f"not installed: {names} (pip install {distribution})", err=True)


def finish(
    ctx: click.Context,
    main: Callable[[Runtime], Coroutine[Any, Any, T]],
    interrupted: Callable[[], str] = lambda: "interrupted",
) -> T:
    """Run `main` in a new runtime, and return the result of `main`. Ctrl-C ends the program.

    Args:
        interrupted: returns the message to print after Ctrl-C.
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
    """Run the work. The first Ctrl-C (or TERM) cancels it, with a time limit for cleaning up; the second ends the
    program at once."""
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
