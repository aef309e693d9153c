"""Registers the backend: the entry point `modal`."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `modal`."""
    registry.add(
        "modal",
        "hermes_modal.backend:ModalBackend",
        summary="Modal sandboxes, with many slots in each",
        requires=("a Modal token (`modal token new`)",),
    )
