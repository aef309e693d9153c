"""The command `hermes-rl atropos`, and the same for the environment of a plugin."""

from __future__ import annotations

from hermes_atropos.commands import Modes, commands, run_alone
from hermes_core import Runtime


def _by_name(runtime: Runtime, name: str | None) -> type[Modes]:
    assert name is not None  # click asks for it
    runtime.environment_class(name)  # a mistyped name is told at once: importing Atropos takes seconds
    from hermes_atropos import load_environment

    return load_environment(name, runtime)


atropos = commands(_by_name, takes_name=True)
"""`hermes-rl atropos`."""


def run_named(name: str) -> None:
    """The commands for one environment plugin; what its `__main__` calls. Exits."""
    run_alone(lambda runtime, _: _by_name(runtime, name))
