"""The version of Inspect that this package was tested with."""

from __future__ import annotations

from hermes_core import AdaptedPackage

INSPECT = AdaptedPackage("hermes-rl-inspect", "inspect-ai", "0.3.285", exact=True)
