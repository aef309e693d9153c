"""The list of checks: each a plain async function, registered by the decorator `check`, in a module for its group."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hermes_core import Isolation, UnknownNameError
from hermes_testing.conformance.kit import Kit

if TYPE_CHECKING:
    Function = Callable[[Kit], Awaitable[None]]

GROUPS = {
    "contract": ("contract",),
    "commands": ("commands",),
    "processes": ("processes",),
    "files": ("files",),
    "slots": ("slots", "apart"),
    "forwards": ("forwards",),
    "pools": ("pools",),
    "failure": ("failure", "transport"),
    "leaks": ("leaks",),
    "speed": ("speed",),
}
"""The groups in the order in which they run, each with its modules of this package."""

LIMIT_S = 90.0
"""Time limit in seconds of a check that does not set one."""


@dataclass(frozen=True)
class Check:
    """One promise, and the function that checks whether it is kept."""

    group: str
    name: str
    function: Function
    level: Isolation | None
    """The isolation level that is checked; None is the run's own."""
    needs: tuple[str, ...]
    """Words from `DirectClient.missing`. If one of these is missing, the check is not applicable."""
    least: Isolation
    """The weakest level of a run that makes the promise."""
    documented: str
    """Why the promise is not made at this level, by design; empty if it is made."""
    limit_s: float

    @property
    def promise(self) -> str:
        """Return the promise in one line."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


_CHECKS: dict[str, Check] = {}


def check(
    group: str,
    *,
    needs: str | Iterable[str] = (),
    least: Isolation = Isolation.SHARED,
    levels: bool = False,
    documented: Mapping[Isolation, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Callable[[Function], Function]:
    """Register a check under its function's name.

    Args:
        group: one of `GROUPS`.
        needs: what it requires, in words of `DirectClient.missing`.
        least: the weakest level of a run at which it applies.
        levels: whether it runs once for every isolation level, as `name[level]`, independent of the run's level.
        documented: with `levels`, the levels that don't make the promise by design, and why (see the threat model).
        limit_s: time limit in seconds, after which it has failed.
    """
    words = (needs,) if isinstance(needs, str) else tuple(needs)

    def register(function: Function) -> Function:
        name: str = function.__name__
        for level in Isolation if levels else [None]:
            full = name if level is None else f"{name}[{level.label}]"
            if full in _CHECKS:
                raise ValueError(f"two checks are called {full!r}")
            open_there = "" if level is None else (documented or {}).get(level, "")
            _CHECKS[full] = Check(group, full, function, level, words, least, open_there, limit_s)
        return function

    return register


def all_checks() -> list[Check]:
    """Return every check, in the order in which they run."""
    for modules in GROUPS.values():
        for module in modules:
            importlib.import_module(f"hermes_testing.conformance.{module}")
    order = list(GROUPS)
    return sorted(_CHECKS.values(), key=lambda each: order.index(each.group))


def chosen(groups: Iterable[str] = (), names: Iterable[str] = ()) -> list[Check]:
    """Return the checks of these groups or names; all if neither is given. A name without a level means all its levels.

    Raises:
        UnknownNameError: there is no such group or check.
    """
    groups, names = tuple(groups), tuple(names)
    every = all_checks()
    known = {each.name for each in every} | {each.name.partition("[")[0] for each in every}
    for name in names:
        if name not in known:
            raise UnknownNameError("check", name, known)
    for group in groups:
        if group not in GROUPS:
            raise UnknownNameError("group of checks", group, GROUPS)
    if not groups and not names:
        return every
    return [each for each in every if each.group in groups or {each.name, each.name.partition("[")[0]} & set(names)]
