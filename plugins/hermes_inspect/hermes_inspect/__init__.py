"""The adapter for Inspect, both ways: Inspect's evals run in slots of any backend, and its tasks are environments.

This module is imported to list plugins, so it does not import Inspect.
"""

from __future__ import annotations

from typing import Any

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1

_PROVIDER = ("HermesSandbox", "HermesSandboxConfig")


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Add the environment `inspect`."""
    registry.add(
        "inspect",
        "hermes_inspect.environment:InspectEnvironment",
        summary="A task of Inspect: its samples, scored by its own scorer",
        requires=("inspect-ai",),
    )


def __getattr__(name: str) -> Any:
    if name not in _PROVIDER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hermes_inspect import provider

    return getattr(provider, name)
