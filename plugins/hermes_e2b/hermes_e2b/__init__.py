"""The E2B backend for hermes-rl: micro-VMs of E2B, or of a server that speaks its API, with many slots in each."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `e2b`."""
    registry.add(
        "e2b",
        "hermes_e2b.backend:E2bBackend",
        summary="Micro-VMs of E2B, or of a server that speaks its API, with many slots in each",
        requires=("E2B_API_KEY",),
    )
