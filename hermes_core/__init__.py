"""hermes-rl: tool-using agents in sandboxes, scored by what really happened there, recorded for RL trainers."""

__version__ = "0.1.0"

PLUGIN_API = 1
"""The plugin interface's version. A plugin may declare `HERMES_PLUGIN_API`; another number is refused at load."""
