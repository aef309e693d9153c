"""The version of hermes-agent that this package was tested with."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hermes_core import tested_import

TESTED = "0.19.0"
"""The version of hermes-agent that this package was tested with."""


def tested() -> AbstractContextManager[None]:
    """Import the package's modules in the block; see `tested_import`."""
    return tested_import("hermes-rl-hermes-agent", "hermes-agent", TESTED)
