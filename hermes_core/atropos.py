"""The old import path of the package `hermes_atropos`, which the distribution `hermes-rl-atropos` installs."""

from __future__ import annotations

import importlib
from typing import Any

from hermes_core.errors import ConfigError


def __getattr__(name: str) -> Any:
    """Return a public name of `hermes_atropos`.

    Raises:
        ConfigError: the distribution is not installed.
    """
    if name.startswith("__"):  # Python itself asks for `__path__`, which only a package has
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("hermes_atropos"), name)
    except ModuleNotFoundError as error:
        if error.name != "hermes_atropos":
            raise
        raise ConfigError(
            f"hermes_core.atropos.{name} is in a distribution that is not installed",
            hint="pip install hermes-rl-atropos",
        ) from error
