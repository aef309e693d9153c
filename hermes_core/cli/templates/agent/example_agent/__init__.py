"""The agent `example-agent` for hermes-rl. This module is imported to list plugins, so it stays light."""

from hermes_core import Registrar, hookimpl


@hookimpl
def hermes_register_agents(registry: Registrar) -> None:
    """Register the agent; its module is imported when it is first used."""
    registry.add("example-agent", "example_agent.agent:ExampleAgent", summary="Runs the same commands on every item")
