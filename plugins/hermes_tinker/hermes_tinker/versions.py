"""The versions of Tinker's packages that were tested."""

from __future__ import annotations

from hermes_core import AdaptedPackage

TINKER = AdaptedPackage("hermes-rl-tinker", "tinker", "0.25.0")
COOKBOOK = AdaptedPackage("hermes-rl-tinker", "tinker-cookbook", "0.5.4")
