"""A plugin of hermes-agent, with environments whose commands run in slots, and the command `batch-runs` of hermes-rl.

This module is imported to list plugins, so it does not import hermes-agent.
"""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_commands(registry: Registrar) -> None:
    """Add the command `batch-runs`."""
    registry.add(
        "batch-runs",
        "hermes_agent.command:batch_runs",
        summary="Make a run of the conversations of hermes-agent's batch runner",
    )
