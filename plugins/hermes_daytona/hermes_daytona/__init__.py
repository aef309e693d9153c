"""The Daytona backend for hermes-rl: sandboxes in the cloud with many slots in each, over one SSH connection each."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `daytona`."""
    registry.add(
        "daytona",
        "hermes_daytona.backend:DaytonaBackend",
        summary="Daytona sandboxes, with many slots in each",
        requires=("a Daytona API key (DAYTONA_API_KEY)",),
    )
