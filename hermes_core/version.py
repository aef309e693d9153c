"""The versions of hermes-rl and of its plugin interface, and warnings about untested versions of adapted packages."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hermes_core.errors import ConfigError

log = logging.getLogger(__name__)

__version__ = "0.1.0"

PLUGIN_API = 1
"""The version of the plugin interface. A plugin that declares another number as `HERMES_PLUGIN_API` is not loaded."""


class NotInstalledError(ConfigError, ImportError):
    """A package that an adapter needs is not installed."""


@dataclass(frozen=True)
class AdaptedPackage:
    """A package for which an adapter was made, and the version with which the adapter was tested. Any other version
    leads to a warning."""

    adapter: str
    """The adapter's distribution."""
    name: str
    tested: str
    exact: bool = False
    """Whether a version that differs only in its last number counts as another version."""

    def check(self) -> None:
        """Warn if another version is installed.

        Raises:
            NotInstalledError: the package is not installed.
        """
        found = self._find()
        numbers = None if self.exact else 2
        if found.split(".")[:numbers] != self.tested.split(".")[:numbers]:
            log.warning(self._comparison(found))

    @contextmanager
    def imports(self) -> Iterator[None]:
        """Warn if another version is installed. In the block, the adapter imports the names that it needs.

        Raises:
            NotInstalledError: the package is not installed.
            ImportError: the installed version lacks a name. The error says which version was tested.
        """
        self.check()
        try:
            yield
        except (ImportError, AttributeError, TypeError) as error:
            found = self._find()
            if found == self.tested:
                raise
            raise ImportError(f"{self._comparison(found)}: {error}. Try {self._install}") from error

    def _find(self) -> str:
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise NotInstalledError(f"{self.name} is not installed", hint=self._install) from error

    def _comparison(self, found: str) -> str:
        return f"{self.adapter} was tested with {self.name} {self.tested}, and this is {self.name} {found}"

    @property
    def _install(self) -> str:
        return f"pip install '{self.name}=={self.tested}'"
