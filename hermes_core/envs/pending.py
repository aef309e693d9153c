"""What a hook has called and not awaited, or not entered: it has not run, and is told instead of scored."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from hermes_core.errors import VerifierError

P = ParamSpec("P")
T = TypeVar("T")


class Pending(Coroutine[Any, Any, T]):
    """What a call gives until it is awaited: a coroutine that says so to whoever takes it for the result."""

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
        """As a coroutine's: tasks call it."""
        self._begin()
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """As a coroutine's."""
        return self._work.throw(*error)

    def close(self) -> None:
        """As a coroutine's."""
        self._work.close()

    def refuse(self, *_: Any) -> NoReturn:
        """Refuse whatever a result could be asked.

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
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        self.refuse()


class Opening(AbstractAsyncContextManager[T]):
    """A context manager that says how it is used to whoever takes it for what it gives."""

    def __init__(self, call: str, manager: AbstractAsyncContextManager[T]) -> None:
        self._call = call
        self._manager = manager

    async def __aenter__(self) -> T:
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._manager.__aexit__(*error)

    def refuse(self, *_: Any) -> NoReturn:
        """Refuse every other use.

        Raises:
            VerifierError: always.
        """
        raise VerifierError(f"{self._call} was not entered", hint=f"write `async with {self._call} as …:`")

    __await__ = __enter__ = __exit__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        self.refuse()


class Calls:
    """Those of one hook, or of one slot's hooks."""

    def __init__(self) -> None:
        self.waiting: dict[int, Pending[Any]] = {}
        """Those that nobody has awaited."""

    async def all_awaited(self, hook: Awaitable[T]) -> T:
        """What a hook gives, if it has awaited every call that it made.

        Raises:
            VerifierError: it has not, so what it gives is worth nothing. What it raises itself is passed on.
        """
        try:
            outcome = await hook
            for pending in self.waiting.values():
                pending.refuse()
            return outcome
        finally:
            for pending in self.waiting.values():
                pending.close()  # without Python's warning about each
            self.waiting.clear()


class _HasCalls(Protocol):
    calls: Calls


S = TypeVar("S", bound=_HasCalls)


Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
"""One whose calls are to be awaited."""


def awaited(prefix: str = "") -> Callable[[Method[S, P, T]], Callable[Concatenate[S, P], Pending[T]]]:
    """A method whose call is remembered, in the object's `calls`, until it is awaited.

    Args:
        prefix: what users write before its name.
    """

    def decorate(method: Method[S, P, T]) -> Callable[Concatenate[S, P], Pending[T]]:
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
            return Pending(f"{prefix}{method.__name__}(…)", method(self, *args, **kwargs), self.calls)

        functools.update_wrapper(call, method)
        return call

    return decorate
