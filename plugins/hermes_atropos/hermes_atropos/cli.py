"""The command `hermes-rl atropos`, and `run_named`, the same command for one environment."""

from __future__ import annotations

from hermes_atropos.commands import Modes, make_group, run_as_program
from hermes_core import Runtime


def _find_class(runtime: Runtime, name: str | None) -> type[Modes]:
    assert name is not None  # the argument is required
    runtime.environment_class(name)  # reports a mistyped name at once: importing Atropos takes seconds
    from hermes_atropos import load_environment

    return load_environment(name, runtime)


atropos = make_group(_find_class, takes_name=True)
"""`hermes-rl atropos`."""


def run_named(name: str) -> None:
    """Run the command line of one environment plugin, as its `__main__`. Exits."""
    run_as_program(lambda runtime, _: _find_class(runtime, name))
