"""The versions of Tinker's packages that were tested, and what is said about others."""

from __future__ import annotations

import importlib.metadata
import logging

from hermes_core import ConfigError

log = logging.getLogger(__name__)

TESTED = {"tinker": "0.25.0", "tinker-cookbook": "0.5.4"}


def check_version(package: str) -> None:
    """Warn of a version with which this was not tested.

    Raises:
        ConfigError: the package is not installed.
    """
    tested = TESTED[package]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{package} is not installed", hint=f"pip install {package}=={tested}") from error
    if found.split(".")[:2] != tested.split(".")[:2]:
        log.warning("hermes-rl-tinker was tested with %s %s, and this is %s %s", package, tested, package, found)
