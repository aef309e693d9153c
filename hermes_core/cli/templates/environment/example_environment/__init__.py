"""The environment `example-environment` for hermes-rl. This module is imported to list plugins, so it stays light."""

from hermes_core import Registrar, hookimpl


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Register the environment; its module is imported when it is first used."""
    registry.add(
        "example-environment",
        "example_environment.environment:ExampleEnvironment",
        summary="Count the lines of a file",
    )
