"""The version of Inspect that this package was tested with."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hermes_core import tested_import

TESTED = "0.3.285"
"""The version of Inspect that this package was tested with."""


def tested() -> AbstractContextManager[None]:
    """Import the package's modules in the block; see `tested_import`."""
    return tested_import("hermes-rl-inspect", "inspect-ai", TESTED)
