"""The version of verifiers that the adapter was tested with."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hermes_core import tested_import

TESTED = "0.4.0"


def tested() -> AbstractContextManager[None]:
    """Import the adapter in the block; see `tested_import`."""
    return tested_import("hermes-rl-verifiers", "verifiers", TESTED)
