"""The version of hermes-rl and of its plugin interface, and what adapters say about versions that were not tested."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from hermes_core.errors import ConfigError

log = logging.getLogger(__name__)

__version__ = "0.1.0"

PLUGIN_API = 1
"""A plugin may declare `HERMES_PLUGIN_API`; another number is refused at load."""


def check_tested(adapter: str, package: str, tested: str) -> None:
    """Warn of another version of a package than its adapter was tested with, unless only its last number differs.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{package} is not installed", hint=f"pip install {package}=={tested}") from error
    if found.split(".")[:2] != tested.split(".")[:2]:
        log.warning(_told(adapter, package, tested, found))


@contextmanager
def tested_import(adapter: str, package: str, tested: str) -> Iterator[None]:
    """Import what an adapter needs of its package in the block, and warn of any version but the tested one.

    Raises:
        ImportError: the package is missing, or too different to be imported from; says which version was tested.
    """
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{package} is not installed: pip install '{package}=={tested}'") from error
    told = _told(adapter, package, tested, found)
    if found != tested:
        log.warning(told)
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        if found == tested:
            raise
        raise ImportError(f"{told}: {error}. Try pip install '{package}=={tested}'") from error


def _told(adapter: str, package: str, tested: str, found: str) -> str:
    return f"{adapter} was tested with {package} {tested}, and this is {package} {found}"
