"""hermes-rl: tool-using agents in sandboxes, scored by what really happened there, recorded for RL trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_core.terminal import cleanup_vm, terminal_tool

__all__ = ["cleanup_vm", "terminal_tool"]

__version__ = "0.1.0"

PLUGIN_API = 1
"""The plugin interface's version. A plugin may declare `HERMES_PLUGIN_API`; another number is refused at load."""


def __getattr__(name: str) -> Any:
    """The terminal tool, imported when it is first used: `import hermes_core` is to be quick."""
    if name in __all__:
        from hermes_core import terminal

        return getattr(terminal, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
