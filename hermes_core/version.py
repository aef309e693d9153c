"""The version of hermes-rl, and of its plugin interface."""

__version__ = "0.1.0"

PLUGIN_API = 1
"""A plugin may declare `HERMES_PLUGIN_API`; another number is refused at load."""
