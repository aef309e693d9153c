"""What the commands share: a runtime from the environment, with a log on standard error that gives no secret away."""

from __future__ import annotations

import logging
import shutil
import sys
from typing import Any

from hermes_core.runtime import Runtime
from hermes_core.screen import say
from hermes_core.settings import RedactingFormatter, Settings

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _StandardError(logging.Handler):
    """Writes to what standard error is at that moment: a live display puts itself there, to keep below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record), err=True)
        except Exception:
            self.handleError(record)


def new_runtime(verbose: int = 0, **given: Any) -> Runtime:
    """A runtime with the environment's settings, and our log on standard error.

    Args:
        verbose: 0 logs warnings, 1 what happens, 2 everything.
        given: settings that come before the environment's.

    Raises:
        ConfigError: the environment or a file that it names is wrong.
    """
    handler = _StandardError()
    logger = logging.getLogger("hermes_core")
    logger.setLevel(_LEVELS[min(verbose, 2)])
    # One handler however often this is called in one process; the loggers of plugins are below ours by convention.
    logger.handlers = [handler]
    settings = Settings.load(**given)
    form = "%(levelname)s %(name)s: %(message)s" if verbose else "%(levelname)s: %(message)s"
    handler.setFormatter(RedactingFormatter(settings.redactor(), form, tracebacks=verbose > 0))
    return Runtime(settings)


def terminal_width() -> int | None:
    """How many columns standard output has to show; None if it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def tell_problems(runtime: Runtime) -> None:
    """Say on standard error what is wrong with the plugins."""
    for problem in runtime.plugin_manager.problems():
        say(f"problem: {problem}", err=True)
