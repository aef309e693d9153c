"""The version of Inspect that this package was tested with, and a warning when it meets another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

TESTED = "0.3.285"
"""The version of Inspect that this package was tested with."""


@contextmanager
def tested() -> Iterator[None]:
    """Warn if Inspect is not of the tested version.

    Raises:
        ImportError: what the block imports is not there; names both versions.
    """
    found = version("inspect-ai")
    said = f"hermes-rl-inspect was tested with inspect-ai {TESTED}, and this is inspect-ai {found}"
    if found != TESTED:
        logging.getLogger(__name__).warning(said)
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{said}: {error}") from error
