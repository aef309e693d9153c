"""The adapter for verifiers, both ways: verifiers loads environments of hermes-rl under the name `hermes_rl`, and the
environment `verifiers` takes tasksets of verifiers.

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
