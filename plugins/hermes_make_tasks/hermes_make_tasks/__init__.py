"""`hermes-rl make-tasks` makes SWE-smith tasks of any Python repository with pytest tests."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_commands(registry: Registrar) -> None:
    """Add the command `make-tasks`."""
    registry.add(
        "make-tasks",
        "hermes_make_tasks.cli:make_tasks",
        summary="Make SWE-smith tasks of a Python repository with pytest tests",
        requires=("git and python3 in the sandbox", "a package index, for what the tests need"),
    )
