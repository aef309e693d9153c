"""The sink `example-sink` for hermes-rl. This module is imported to list plugins, so it stays light."""

from hermes_core import Registrar, hookimpl


@hookimpl
def hermes_register_sinks(registry: Registrar) -> None:
    """Register the sink; its module is imported when it is first used."""
    registry.add(
        "example-sink", "example_sink.sink:ExampleSink", summary="Rewards as CSV: --sink example-sink=FILE.csv"
    )
