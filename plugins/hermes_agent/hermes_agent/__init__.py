"""hermes-agent at home on our sandboxes: a plugin of its own with environments whose commands run in slots.

This module is imported to list plugins, so it does not import hermes-agent.
"""

from __future__ import annotations

HERMES_PLUGIN_API = 1
