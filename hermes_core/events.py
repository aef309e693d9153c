"""Events: code emits an event by name, and every listener for that name is called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Listener:
    call: Callable[..., object]
    owner: str
    failed: bool = False


class Events:
    """The listeners of each event. An event has the name of its observer hook without `hermes_`, and the hook's
    arguments.

    Listeners are called in the caller's thread, one after the other, and must be quick.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, list[_Listener]] = {}

    def listen(self, name: str, call: Callable[..., object], *, owner: str = "a listener") -> None:
        """Call `call(**event)` for each event of this name.

        Args:
            owner: the owner of the listener, for the log.
        """
        self._listeners.setdefault(name, []).append(_Listener(call, owner))

    def emit(self, name: str, /, **event: Any) -> None:
        """Call every listener for this name.

        If a listener raises, neither the other listeners nor the observed code is affected. Its first error is logged
        with a traceback; later ones are logged at level debug, so that they don't flood the log.
        """
        for listener in self._listeners.get(name, ()):
            try:
                listener.call(**event)
            except Exception:
                level = logging.DEBUG if listener.failed else logging.ERROR
                listener.failed = True
                log.log(level, "%s failed on the event %s", listener.owner, name, exc_info=True)
