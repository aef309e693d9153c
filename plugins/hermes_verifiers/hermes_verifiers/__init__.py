"""verifiers, both ways: it loads our environments as `hermes_rl`, and its tasksets are the environment `verifiers`.

This module is imported to list plugins, so it does not import verifiers.
"""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Add the environment `verifiers`."""
    registry.add(
        "verifiers",
        "hermes_verifiers.environment:VerifiersEnvironment",
        summary="A taskset of verifiers: its tasks, scored by their own rewards",
        requires=("verifiers",),
    )
