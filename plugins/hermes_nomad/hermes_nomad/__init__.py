"""The Nomad backend for hermes-rl: each sandbox is a job of one allocation, reached over the exec of Nomad's API."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `nomad`."""
    registry.add(
        "nomad",
        "hermes_nomad.backend:NomadBackend",
        summary="Containers of a Nomad cluster, with many slots in each",
        requires=("aiohttp", "the address of a Nomad cluster (NOMAD_ADDR)"),
    )
