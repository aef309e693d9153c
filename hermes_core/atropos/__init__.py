"""The Atropos adapter (extra `atropos`): environments by name for Atropos, and the base environment to subclass.

Nothing of it is loaded before it is asked for: atroposlib takes seconds and a hundred megabytes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_core.atropos.config import HermesAgentEnvConfig
    from hermes_core.atropos.env import HermesAgentBaseEnv
    from hermes_core.atropos.generated import load_environment
    from hermes_core.rollout.tool_context import ToolContext

__all__ = ["HermesAgentBaseEnv", "HermesAgentEnvConfig", "ToolContext", "load_environment"]

_PLACES = {
    "HermesAgentBaseEnv": "hermes_core.atropos.env",
    "HermesAgentEnvConfig": "hermes_core.atropos.config",
    "ToolContext": "hermes_core.rollout.tool_context",
    "load_environment": "hermes_core.atropos.generated",
}


def __getattr__(name: str) -> Any:
    """Return what is asked for, imported now.

    Raises:
        ConfigError: the extra is not installed.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "hermes_core":
            raise
        from hermes_core.errors import ConfigError

        raise ConfigError(
            f"the Atropos adapter needs {package}, which is not installed",
            hint="pip install 'hermes-rl[atropos]', or in a checkout make setup EXTRAS=atropos",
        ) from error
