"""Asks a subclass for items and remembers the result, to distinguish an error, or no item at all, from the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hermes_core import DatasetError, HermesError, Item, PluginError
from hermes_core.errors import describe


class ItemSource:
    """Replaces `get_next_item` of an environment.

    Args:
        name: the environment's name.
        ask: its own `get_next_item`.
    """

    def __init__(self, name: str, ask: Callable[[], Awaitable[Item | None]]) -> None:
        self._name = name
        self._ask = ask
        self.given = 0
        """Items until now."""
        self.failure: HermesError | None = None
        """Why there are no more, if it is not that all have been given."""

    async def __call__(self) -> Item | None:
        """Return the next item, None after the last.

        Raises:
            HermesError: as the environment did; or a `PluginError` for anything else that it raised.
        """
        try:
            item = await self._ask()
        except HermesError as error:
            self.failure = error
            raise
        except Exception as error:
            self.failure = PluginError(
                f"get_next_item of environment {self._name!r} failed: {describe(error)}",
                hint="return the next item, or None after the last; `--traceback` shows where it failed",
            )
            raise self.failure from error
        if item is None and not self.given:
            self.failure = DatasetError(
                f"environment {self._name!r} has no items: the first get_next_item() gave None",
                hint="check what setup() loads, and the settings that choose among it",
            )
            raise self.failure
        self.given += item is not None
        return item
