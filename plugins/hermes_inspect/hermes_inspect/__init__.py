"""The sandbox provider `hermes` for Inspect: its evals run in slots on any backend of hermes-rl."""

from __future__ import annotations

import logging
from importlib.metadata import version

TESTED = "0.3.285"
"""The version of Inspect that this package was tested with."""

_found = version("inspect-ai")
_said = f"hermes-rl-inspect was tested with inspect-ai {TESTED}, and this is inspect-ai {_found}"
if _found != TESTED:
    logging.getLogger(__name__).warning(_said)
try:
    from hermes_inspect.config import HermesSandboxConfig
    from hermes_inspect.sandbox import HermesSandbox
except ImportError as error:
    raise ImportError(f"{_said}: {error}") from error

__all__ = ["TESTED", "HermesSandbox", "HermesSandboxConfig"]
