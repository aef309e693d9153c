"""The Modal backend for hermes-rl: sandboxes in the cloud with many slots in each, over one exec of the SDK's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hermes_core import hookimpl

if TYPE_CHECKING:
    from hermes_core import Registrar
    from hermes_modal.config import ModalSandboxConfig, load_profiles
    from hermes_modal.tool_backend import ModalToolBackend

__all__ = ["ModalSandboxConfig", "ModalToolBackend", "load_profiles"]

HERMES_PLUGIN_API = 1

_PLACES = {
    "ModalSandboxConfig": "hermes_modal.config",
    "ModalToolBackend": "hermes_modal.tool_backend",
    "load_profiles": "hermes_modal.config",
}


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `modal`."""
    registry.add(
        "modal",
        "hermes_modal.backend:ModalBackend",
        summary="Modal sandboxes, with many slots in each",
        requires=("a Modal token (`modal token new`)",),
    )


def __getattr__(name: str) -> Any:
    """The names above, imported when they are first used: the plugin itself has to load fast."""
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
