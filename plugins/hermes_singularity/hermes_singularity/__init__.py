"""The Apptainer backend for hermes-rl: containers with many slots, started without root and without a daemon."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `singularity`, which is also found as `apptainer`."""
    registry.add(
        "singularity",
        "hermes_singularity.backend:SingularityBackend",
        aliases=("apptainer",),
        summary="Apptainer's containers on this host, with many slots in each; no root, no daemon",
        requires=("the program apptainer or singularity", "user namespaces"),
    )
