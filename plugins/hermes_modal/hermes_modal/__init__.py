"""The Modal backend for hermes-rl: sandboxes in the cloud with many slots in each, reached over one exec of the SDK."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_modal.config import ModalSandboxConfig as ModalSandboxConfig
    from hermes_modal.config import load_profiles as load_profiles
    from hermes_modal.tool_backend import ModalToolBackend as ModalToolBackend

_PLACES = {
    "ModalSandboxConfig": "hermes_modal.config",
    "ModalToolBackend": "hermes_modal.tool_backend",
    "load_profiles": "hermes_modal.config",
}


def __getattr__(name: str) -> Any:
    """Load one of the names above at its first use, so that listing plugins, which imports this package, stays fast."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
