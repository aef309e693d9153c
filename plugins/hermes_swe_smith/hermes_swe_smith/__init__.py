"""The SWE-smith environment for hermes-rl: real repositories with a bug each, scored by their own test suites."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Add the environment `swe-smith`."""
    registry.add(
        "swe-smith",
        "hermes_swe_smith.environment:SweSmithEnvironment",
        aliases=("swe_smith",),
        summary="SWE-smith tasks: fix a bug in a real repository, scored by its own tests",
        requires=("git and python3 in the sandbox", "a package index, once per set of pinned requirements"),
    )
