"""Reads a dataset: rows or folders that can't be used are collected, and reported together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from hermes_core.environment import EnvironmentConfig
from hermes_core.errors import DatasetError

log = logging.getLogger(__name__)

T = TypeVar("T")

SHOWN = 10
"""Maximum number of bad rows or folders that one message names; the others are only counted."""
SAID = 500
"""Maximum number of characters of the report on one bad row or folder."""


class DatasetConfig(EnvironmentConfig):
    """Settings of environments that take in a dataset."""

    skip_refused: bool = False
    """Leave out rows or tasks that are wrong or can't run here, instead of refusing the dataset. The log says which and
    why."""


class Intake:
    """Counts the usable rows or folders of one dataset and collects the errors of the others.

    Args:
        dataset: the dataset's name, for messages.
        skip: leave out unusable rows or folders, instead of refusing the dataset.
    """

    def __init__(self, dataset: str, *, skip: bool) -> None:
        self._dataset = dataset
        self._skip = skip
        self._names: set[str] = set()
        self._bad = 0
        self._first: list[DatasetError] = []

    def read_all(self, readers: Iterable[tuple[str, Callable[[], T | None]]], name: Callable[[T], str]) -> dict[str, T]:
        """Read all rows or folders, and return their values by name. Blocking.

        Args:
            readers: for each row or folder, its place and a function. The function returns the value, or None if a row
                or folder is left out on purpose; it raises `DatasetError` if the row or folder can't be used.

        Raises:
            DatasetError: as `end` does.
        """
        found: dict[str, T] = {}
        for where, read in readers:
            try:
                if (each := read()) is not None:
                    self.once(name(each))
                    found[name(each)] = each
            except DatasetError as error:
                self.leave_out(error, where)
        self.end(len(found))
        return found

    def leave_out(self, error: DatasetError, where: str) -> None:
        """Note that a row or folder can't be used because of this error.

        Args:
            where: the place, for an error whose message does not name it.
        """
        self._bad += 1
        if len(self._first) < SHOWN:
            place, said = (text.removeprefix(self._dataset).lstrip("/, ") for text in (where, error.message))
            said = said if place in said else f"{place}: {said}"
            self._first.append(DatasetError(said[:SAID], hint=error.hint))

    def once(self, name: str) -> None:
        """Check that no earlier row or folder had this name.

        Raises:
            DatasetError: an earlier row or folder had the name.
        """
        if name in self._names:
            raise DatasetError(f"{name!r} is there twice", hint="keep one of them, or rename it")
        self._names.add(name)

    def end(self, taken: int, hint: str = "look into it") -> None:
        """Report the unusable rows or folders. Call this after the last one.

        Args:
            taken: number of usable rows or folders.
            hint: advice for a dataset without any rows or folders.

        Raises:
            DatasetError: a row or folder could not be used and `skip` is not set, or no usable one is left.
        """
        more = f"; and {self._bad - SHOWN} more" if self._bad > SHOWN else ""
        first = "; ".join(error.message for error in self._first)
        summary = f"{self._bad} of {self._bad + taken} can't be used: {first}{more}"
        if self._bad and not self._skip:
            hint = f"{self._first[0].hint}; or leave out what can't be used with --env.skip_refused=true"
            raise DatasetError(f"dataset {self._dataset!r}: {summary}", hint=hint)
        if not taken:
            reason = summary if self._bad else "it has no rows to work with"
            raise DatasetError(f"nothing to do in dataset {self._dataset!r}: {reason}", hint=hint)
        if self._bad:
            log.warning("%s: left out (skip_refused): %s", self._dataset, summary)
