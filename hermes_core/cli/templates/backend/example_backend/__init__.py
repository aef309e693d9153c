"""The backend `example-backend` for hermes-rl. This module is imported to list plugins, so it stays light."""

from hermes_core import Registrar, hookimpl


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Register the backend; its module, and with it the provider's SDK, is imported when it is first used."""
    registry.add(
        "example-backend",
        "example_backend.backend:ExampleBackend",
        summary="Processes of this host, in a directory for each sandbox",
        requires=("Linux",),
    )
