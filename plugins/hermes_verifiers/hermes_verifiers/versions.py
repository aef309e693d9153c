"""The versions of verifiers that the adapter was tested with, and what is said about others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

TESTED = "0.4.0"


@contextmanager
def tested() -> Iterator[None]:
    """Import the adapter in the block. Warn about a version of verifiers that was not tested.

    Raises:
        ImportError: verifiers is missing, or too different to be imported from; says which version was tested.
    """
    try:
        found = version("verifiers")
    except PackageNotFoundError as error:
        raise ImportError(f"verifiers is not installed: pip install 'verifiers=={TESTED}'") from error
    said = f"hermes-rl-verifiers was tested with verifiers {TESTED}, and this is {found}"
    if found != TESTED:
        warnings.warn(said, RuntimeWarning, stacklevel=4)
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        if found == TESTED:
            raise
        raise ImportError(f"{said}: {error}. Try pip install 'verifiers=={TESTED}'") from error
