"""The version of hermes-agent that this package was tested with."""

from __future__ import annotations

from hermes_core import AdaptedPackage

HERMES_AGENT = AdaptedPackage("hermes-rl-hermes-agent", "hermes-agent", "0.19.0", exact=True)
