"""hermes-rl for Atropos: every environment by its name, and the base environment to subclass.

atroposlib takes seconds and a hundred megabytes to import. So the names below are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hermes_core import Registrar, hookimpl

if TYPE_CHECKING:
    from hermes_atropos.cli import run_named
    from hermes_atropos.config import HermesAgentEnvConfig
    from hermes_atropos.env import HermesAgentBaseEnv
    from hermes_atropos.generated import load_environment
    from hermes_core import ToolContext

__all__ = ["HermesAgentBaseEnv", "HermesAgentEnvConfig", "ToolContext", "load_environment", "run_named"]

HERMES_PLUGIN_API = 1

_PLACES = {
    "HermesAgentBaseEnv": "hermes_atropos.env",
    "HermesAgentEnvConfig": "hermes_atropos.config",
    "ToolContext": "hermes_core",
    "load_environment": "hermes_atropos.generated",
    "run_named": "hermes_atropos.cli",
}
"""The module of each public name."""


@hookimpl
def hermes_register_commands(registry: Registrar) -> None:
    """Add the command `atropos`."""
    registry.add(
        "atropos",
        "hermes_atropos.cli:atropos",
        summary="Generate training data for Atropos' RL trainers",
        requires=("a model endpoint",),
    )


def __getattr__(name: str) -> Any:
    """Import a public name.

    Raises:
        ConfigError: a package that it needs is not installed.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("hermes_core", __name__):
            raise
        from hermes_core import ConfigError

        raise ConfigError(
            f"the Atropos adapter needs {package}, which is not installed",
            hint="pip install hermes-rl-atropos, or in a checkout make setup EXTRAS=atropos",
        ) from error
