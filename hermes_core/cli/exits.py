"""The exit codes of every command; docs/reference/configuration.md has the table."""

from __future__ import annotations

from hermes_core.errors import DatasetError, HermesError, InfraError, ModelError, OutputError, PolicyError, UsageError

EXIT_BROKEN = 1
"""A plugin, an environment or a backend does not work, or a check found a fault."""
EXIT_USAGE = 2
"""The caller asked for something impossible."""
EXIT_INCOMPLETE = 3
"""Not everything was done, or not everything turned out right."""
EXIT_INTERRUPTED = 130
"""Ctrl-C or TERM."""


def exit_code(error: HermesError) -> int:
    """Return the exit code of a command that ends with this error."""
    if isinstance(error, UsageError | DatasetError | PolicyError):
        return EXIT_USAGE
    if isinstance(error, InfraError | ModelError | OutputError):
        return EXIT_INCOMPLETE
    return EXIT_BROKEN
