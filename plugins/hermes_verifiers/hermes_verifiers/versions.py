"""The version of verifiers that the adapter was tested with."""

from __future__ import annotations

from hermes_core import AdaptedPackage

VERIFIERS = AdaptedPackage("hermes-rl-verifiers", "verifiers", "0.4.0", exact=True)
