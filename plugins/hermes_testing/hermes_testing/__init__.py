"""For authors of plugins: a conformance kit for backends, a model server that answers from a script, a tiny real model.

This module is imported to list plugins, so it imports none of these parts.
"""

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_commands(registry: Registrar) -> None:
    """Add the command `conformance`."""
    registry.add(
        "conformance",
        "hermes_testing.conformance.cli:conformance",
        summary="Test a backend against the backend contract",
    )
