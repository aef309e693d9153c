"""Detects calls that a hook made but did not await (or enter with `async with`). Such calls have not run, so the
mistake is reported, and nothing is scored."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from hermes_core.errors import VerifierError

P = ParamSpec("P")
T = TypeVar("T")


class Pending(Coroutine[Any, Any, T]):
    """The value of a call that was not awaited: a coroutine that explains the mistake if it is used like the result."""

    def __init__(self, call: str, work: Coroutine[Any, Any, T], calls: Calls) -> None:
        self._call = call
        self._work = work
        self._calls = calls
        calls.waiting[id(self)] = self

    def _begin(self) -> None:
        self._calls.waiting.pop(id(self), None)

    def __await__(self) -> Generator[Any, Any, T]:
        self._begin()
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Implement a coroutine's `send`, which tasks call."""
        self._begin()
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Implement a coroutine's `throw`."""
        return self._work.throw(*error)

    def close(self) -> None:
        """Implement a coroutine's `close`."""
        self._work.close()

    def refuse(self, *_: Any) -> NoReturn:
        """Refuse any use that only the call's result allows.

        Raises:
            VerifierError: always.
        """
        raise VerifierError(
            f"{self._call} was not awaited, and has not run", hint=f"write `await {self._call}`, in an `async def`"
        )

    __getitem__ = __bool__ = __iter__ = __len__ = __contains__ = refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        self.refuse()


class Opening(AbstractAsyncContextManager[T]):
    """A context manager that explains the mistake if it is used like the value that it yields."""

    def __init__(self, call: str, manager: AbstractAsyncContextManager[T]) -> None:
        self._call = call
        self._manager = manager

    async def __aenter__(self) -> T:
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._manager.__aexit__(*error)

    def refuse(self, *_: Any) -> NoReturn:
        """Refuse any use except in `async with`.

        Raises:
            VerifierError: always.
        """
        raise VerifierError(f"{self._call} was not entered", hint=f"write `async with {self._call} as …:`")

    __await__ = __enter__ = __exit__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself looks for these
            raise AttributeError(name)
        self.refuse()


class Calls:
    """The calls of one hook, or of the hooks of one slot."""

    def __init__(self) -> None:
        self.waiting: dict[int, Pending[Any]] = {}
        """The calls that were not awaited yet."""

    async def all_awaited(self, hook: Awaitable[T]) -> T:
        """Return a hook's result, after checking that the hook awaited all its calls.

        Raises:
            VerifierError: a call was not awaited, so the result is worthless. Exceptions of the hook are passed on.
        """
        try:
            outcome = await hook
            for pending in self.waiting.values():
                pending.refuse()
            return outcome
        finally:
            for pending in self.waiting.values():
                pending.close()  # avoids Python's own warning
            self.waiting.clear()


class _HasCalls(Protocol):
    calls: Calls


S = TypeVar("S", bound=_HasCalls)


Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
"""A method whose calls must be awaited."""


def must_await(prefix: str = "") -> Callable[[Method[S, P, T]], Callable[Concatenate[S, P], Pending[T]]]:
    """Decorate a method so that each call is in the object's `calls` until the call is awaited.

    Args:
        prefix: the text that users write before the method's name.
    """

    def decorate(method: Method[S, P, T]) -> Callable[Concatenate[S, P], Pending[T]]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
            return Pending(f"{prefix}{method.__name__}(…)", method(self, *args, **kwargs), self.calls)

        functools.update_wrapper(call, method)
        return call

    return decorate
