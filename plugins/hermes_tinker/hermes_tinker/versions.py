"""The versions of Tinker's packages that were tested."""

from __future__ import annotations

from hermes_core import check_tested

TESTED = {"tinker": "0.25.0", "tinker-cookbook": "0.5.4"}


def check_version(package: str) -> None:
    """Warn of a version with which this was not tested.

    Raises:
        ConfigError: the package is not installed.
    """
    check_tested("hermes-rl-tinker", package, TESTED[package])
