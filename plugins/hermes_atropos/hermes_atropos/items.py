"""`ItemSource`: gets items from a subclass, and keeps its error if it fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from hermes_core import DatasetError, HermesError, Item, PluginError, describe


class ItemSource:
    """Replaces `get_next_item` of an environment, and distinguishes an error from the end of the items.

    Args:
        name: the environment's name.
        ask: the environment's own `get_next_item`.
    """

    def __init__(self, name: str, ask: Callable[[], Awaitable[Item | None]]) -> None:
        self._name = name
        self._ask = ask
        self.given = 0
        """Number of items returned so far."""
        self.failure: HermesError | None = None
        """The error after which there are no more items; None if there was no error."""

    async def __call__(self) -> Item | None:
        """Return the next item; None after the last.

        Raises:
            HermesError: the environment raised it.
            PluginError: the environment raised another error.
            DatasetError: the environment has no items at all.
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
