"""The list of checks: every public coroutine function of the modules in `GROUPS` whose one parameter is a kit."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pytest

from hermes_core import Isolation, UnknownNameError
from hermes_testing.conformance import GROUPS
from hermes_testing.conformance.kit import Kit

LIMIT_S = 90.0
"""Time limit in seconds of a check without the mark `limit`."""


@dataclass(frozen=True)
class Check:
    """One promise, and the function that checks whether it is kept. `plugin` describes the marks of the function."""

    group: str
    function: Callable[[Kit], Awaitable[None]]
    level: Isolation | None = None
    """The isolation level that is checked; None is the run's own."""

    @property
    def name(self) -> str:
        """Return the function's name, and the level if there is one: `reset_leaves_no_file[user]`."""
        name: str = self.function.__name__
        return name if self.level is None else f"{name}[{self.level.label}]"

    @property
    def promise(self) -> str:
        """Return the promise in one line."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @property
    def limit_s(self) -> float:
        """Return the check's time limit in seconds."""
        return float(self._argument("limit", LIMIT_S))

    @property
    def least(self) -> Isolation:
        """Return the weakest level of a run that makes the promise."""
        return Isolation(self._argument("least", Isolation.SHARED))

    @property
    def needs(self) -> str:
        """Return the feature that the check needs, in words of `DirectClient.missing`; empty if a sandbox without a
        guest will do."""
        return str(self._argument("needs", ""))

    def as_param(self) -> Any:
        """Return the check as an argument of `parametrize`. At a level that by design does not make the promise, the
        check is skipped."""
        levels = _marks(self.function).get("levels")
        why = "" if levels is None else levels.kwargs.get("documented", {}).get(self.level, "")
        marks = [pytest.mark.skip(reason=f"documented as open: {why}")] if why else []
        return pytest.param(self, id=f"{self.group}-{self.name}", marks=marks)

    def own_frames(self, trace: TracebackType | None) -> TracebackType | None:
        """Return a traceback from the check's own first frame on; or the whole traceback if there is no such frame."""
        here = trace
        while here is not None and here.tb_frame.f_code is not self.function.__code__:
            here = here.tb_next
        return here or trace

    def _argument(self, name: str, otherwise: object) -> Any:
        mark = _marks(self.function).get(name)
        return otherwise if mark is None else mark.args[0]


def _marks(function: Callable[..., object]) -> dict[str, pytest.Mark]:
    return {mark.name: mark for mark in getattr(function, "pytestmark", ())}


def all_checks() -> list[Check]:
    """Return every check, in the order in which they run."""
    return [check for group, modules in GROUPS.items() for module in modules for check in _checks_of(group, module)]


def _checks_of(group: str, name: str) -> Iterator[Check]:
    module = importlib.import_module(f"hermes_testing.conformance.{name}")
    for function in vars(module).values():
        own = inspect.iscoroutinefunction(function) and function.__module__ == module.__name__
        if own and not function.__name__.startswith("_") and [*inspect.signature(function).parameters] == ["kit"]:
            levels = Isolation if "levels" in _marks(function) else [None]
            yield from (Check(group, function, level) for level in levels)


def choose_checks(groups: Iterable[str] = (), names: Iterable[str] = ()) -> list[Check]:
    """Return the checks of these groups or names; all if neither is given. A name without a level means all its levels.

    Raises:
        UnknownNameError: there is no such group or check.
    """
    groups, names = tuple(groups), tuple(names)
    every = all_checks()
    known = {each.name for each in every} | {each.function.__name__ for each in every}
    for name in names:
        if name not in known:
            raise UnknownNameError("check", name, known)
    for group in groups:
        if group not in GROUPS:
            raise UnknownNameError("group of checks", group, GROUPS)
    if not groups and not names:
        return every
    return [each for each in every if each.group in groups or {each.name, each.name.partition("[")[0]} & set(names)]
