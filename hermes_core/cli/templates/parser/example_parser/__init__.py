"""The parser `example-parser` for hermes-rl. This module is imported to list plugins, so it stays light."""

from hermes_core import Registrar, hookimpl


@hookimpl
def hermes_register_parsers(registry: Registrar) -> None:
    """Register the parser; its module is imported when it is first used."""
    registry.add("example-parser", "example_parser.parser:ExampleParser", summary="A line `@call NAME {JSON}`")
