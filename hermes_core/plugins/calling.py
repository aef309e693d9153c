"""Calls hooks: checks and adapts the functions that plugins mark, an environment's hooks, and the observers of
events."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pluggy

from hermes_core.agents.base import AgentResult
from hermes_core.cheats import Cheat
from hermes_core.environment import Item, Score
from hermes_core.errors import (
    PluginError,
    SetupFailed,
    UnknownNameError,
    UsageError,
    VerifierError,
    describe,
    nearest_hint,
)
from hermes_core.events import Events
from hermes_core.handles import ExecTool, RolloutHandle
from hermes_core.plugins import hookspecs
from hermes_core.plugins.hookspecs import PROJECT, hookimpl

SPECS: Mapping[str, Callable[..., Any]] = {
    name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, f"{PROJECT}_spec")
}
"""Every hook's specification, by name."""

ENVIRONMENT_HOOKS = [hook for hook in SPECS if not hook.startswith("hermes_")]
"""The hooks that an environment implements and plugins can wrap."""

CHEAT_HOOK = "cheat_trajectory"
"""The hook that core implements, with the environment's cheats."""

_CHEAT_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")

OBSERVERS = [hook for hook in SPECS if hook.startswith("hermes_") and not hook.startswith("hermes_register_")]
"""The hooks that observe an event. The event's name is the hook's without `hermes_`."""


def adapt(plugin: object) -> SimpleNamespace:
    """Return the plugin's hook implementations, checked, as pluggy can call them.

    Raises:
        PluginError: the plugin implements a hook that does not exist, takes an argument that the hook does not have, or
            implements a hook in a way that can't work.
    """
    adapted = SimpleNamespace()
    for name, hook, function, options in _find_hooks(plugin):
        if hook not in SPECS:
            raise PluginError(f"{name} implements no hook of hermes-rl", hint=nearest_hint(hook, SPECS))
        _check_kind(hook, function, options)
        call = _wrapper(hook, function) if options["wrapper"] else _with_arguments_of(hook, function)
        setattr(adapted, name, hookimpl(**options)(call))
    return adapted


def caller(*adapted: object) -> Any:
    """Return the caller of a pluggy manager that has only these plugins. It calls their hooks by name."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for each in adapted:
        manager.register(each)
    return manager.hook


def make_events(registered: Iterable[tuple[str, object]]) -> Events:
    """Return the events for the observers among these plugins. A failing observer does not affect the others."""
    events = Events()
    for label, adapted in registered:
        hooks = caller(adapted)
        for observer in OBSERVERS:
            if getattr(hooks, observer).get_hookimpls():
                events.listen(observer.removeprefix("hermes_"), getattr(hooks, observer), owner=label)
    return events


def _find_hooks(plugin: object) -> Iterator[tuple[str, str, Callable[..., Any], dict[str, Any]]]:
    """Yield the functions that are marked by `hookimpl` in a module or object: name, hook, function, and the marker's
    options."""
    for name in dir(plugin):
        try:
            function = inspect.getattr_static(plugin, name)
        except AttributeError:
            continue
        options = getattr(getattr(function, "__func__", function), f"{PROJECT}_impl", None)
        if isinstance(options, dict):
            yield name, options["specname"] or name, getattr(plugin, name), options


def _check_kind(hook: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    if options["hookwrapper"]:
        raise PluginError(f"{hook}: old-style wrappers are not supported", hint="use @hookimpl(wrapper=True)")
    if hook in ENVIRONMENT_HOOKS:
        if not options["wrapper"]:
            raise PluginError(
                f"{hook} is implemented by the environment; a plugin can only wrap it",
                hint="make it a method of an Environment, or use @hookimpl(wrapper=True)",
            )
        if not inspect.isgeneratorfunction(function):
            raise PluginError(
                f"the wrapper {hook} is not a plain generator function",
                hint="yield once to get the awaitable, and return an awaitable: see hermes_core/plugins/hookspecs.py",
            )
    elif options["wrapper"]:
        raise PluginError(f"{hook} can't be wrapped", hint=f"only {', '.join(ENVIRONMENT_HOOKS)} can")
    elif inspect.iscoroutinefunction(function):
        raise PluginError(f"{hook} must be a plain function, not async", hint="core calls it without await")


def _with_arguments_of(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes all arguments of the hook, and calls `function` with those that `function` names.

    pluggy itself does not pass keyword-only arguments and, in some versions, arguments with defaults.

    Raises:
        PluginError: `function` asks for an argument that the hook does not have.
    """
    known = tuple(inspect.signature(SPECS[hook]).parameters)
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names = [*known]
        elif parameter.name in known and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise PluginError(
                f"{hook} has no argument {parameter.name!r} by that name", hint=nearest_hint(parameter.name, known)
            )

    @functools.wraps(SPECS[hook])  # pluggy reads the argument names from the wrapped function
    def call(*arguments: Any) -> Any:
        by_name = dict(zip(known, arguments, strict=True))
        return function(**{name: by_name[name] for name in names})

    return call


def _wrapper(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that raises an error if `function` does not return an awaitable, because the next wrapper
    receives the result."""
    start = _with_arguments_of(hook, function)

    @functools.wraps(start)
    def call(*arguments: Any) -> Generator[None, Any, Any]:
        outcome = yield from start(*arguments)
        if not inspect.isawaitable(outcome):
            raise PluginError(
                f"the wrapper {function.__module__}.{function.__qualname__} returned {outcome!r}, not an awaitable",
                hint="return the awaitable that yield gave, or another",
            )
        return outcome

    return call


@dataclass(frozen=True)
class _AwaitableHook(Awaitable[Any]):
    """An environment hook that has not run yet. Each `await` runs the hook, so a wrapper may also skip or repeat it."""

    run: Callable[[], Coroutine[Any, Any, Any]]

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.run().__await__()


@dataclass(frozen=True)
class HookArguments:
    """The arguments that the hooks of one rollout can take."""

    item: Item
    rollout: RolloutHandle
    exec_tool: ExecTool
    workspace_meta: Mapping[str, Any] = field(default_factory=dict)
    """The result of the setup hook."""

    @property
    def by_name(self) -> dict[str, Any]:
        """Return the arguments of the setup hook, by name."""
        return {
            "item": self.item,
            "trajectory_id": self.rollout.trajectory_id,
            "exec_tool": self.exec_tool,
            "rollout": self.rollout,
        }

    @property
    def after_setup(self) -> dict[str, Any]:
        """Return the arguments of the other hooks, by name."""
        return {**self.by_name, "workspace_meta": self.workspace_meta}


class EnvironmentHooks:
    """The hooks of one environment instance, with every plugin's wrappers around them, called by keyword.

    pluggy's `firstresult` would use the last of several registered environments. So each instance has a manager of its
    own that holds it and the plugins, with one implementation of each environment hook.

    Args:
        registered: the plugins as `adapt` returns them, each with its name for reports.

    Raises:
        PluginError: the environment implements a hook twice, takes an argument that the hook does not have, or has no
            `verify_and_score_trajectory` although it is `scored`.
    """

    def __init__(self, environment: object, registered: Sequence[tuple[str, object]] = ()) -> None:
        self.name = str(getattr(environment, "name", type(environment).__name__))
        own = self._own(environment)
        if not hasattr(own, "verify_and_score_trajectory") and getattr(environment, "scored", True):
            raise PluginError(
                f"environment {self.name!r} does not implement verify_and_score_trajectory",
                hint="implement it: it returns the reward; or set `scored = False` if there is none",
            )
        self.can_solve = hasattr(own, "solve_trajectory")
        """Whether the environment has a reference solution."""
        self._environment = environment
        own.cheat_trajectory = hookimpl(self._adapt(CHEAT_HOOK, self._cheat))
        self.events = make_events([*registered, (f"environment {self.name!r}", own)])
        """Events for the observers of plugins and of the environment itself."""
        self._call = caller(*(adapted for _, adapted in registered), own)

    async def setup(self, arguments: HookArguments) -> dict[str, Any]:
        """Run `setup_trajectory_workspace` with these arguments. Return `{}` if the environment has none.

        Raises:
            SetupFailed: the hook returned something that is not a mapping. The hook's own exceptions are passed on.
        """
        outcome = self._call.setup_trajectory_workspace(**arguments.by_name)
        meta = None if outcome is None else await outcome
        if meta is not None and not isinstance(meta, Mapping):
            raise SetupFailed(
                f"setup_trajectory_workspace of {self.name!r} gave {meta!r}, not a mapping",
                hint="return a dict; it comes back as workspace_meta",
                trajectory_id=arguments.rollout.trajectory_id,
            )
        return dict(meta or {})

    async def verify(self, arguments: HookArguments, result: AgentResult) -> Score:
        """Run `verify_and_score_trajectory` with these arguments. Return the reward and the details.

        Raises:
            VerifierError: the hook returned neither a finite number nor `(number, mapping)`. The hook's own exceptions
                are passed on.
        """
        return self._score(await self._call.verify_and_score_trajectory(**arguments.after_setup, result=result))

    async def follow_up(self, arguments: HookArguments, result: AgentResult) -> Any:
        """Run `continue_trajectory` with these arguments, and return its result; None if the environment does not have
        this hook."""
        outcome = self._call.continue_trajectory(**arguments.after_setup, result=result)
        return None if outcome is None else await outcome

    async def solve(self, arguments: HookArguments) -> None:
        """Run `solve_trajectory` with these arguments.

        Raises:
            UsageError: the environment has no reference solution. The hook's own exceptions are passed on.
        """
        self.check_solve()
        await self._call.solve_trajectory(**arguments.after_setup)

    async def cheat(self, name: str, arguments: HookArguments) -> None:
        """Do the environment's cheat of this name, with these arguments.

        Raises:
            UnknownNameError: there is no such cheat. The cheat's own exceptions are passed on.
        """
        self.check_cheat(name)
        await self._call.cheat_trajectory(cheat=name, **arguments.after_setup)

    def check_cheat(self, name: str) -> None:
        """Check that there is a cheat of this name.

        Raises:
            UnknownNameError: there is no such cheat.
        """
        if name not in self.cheats:
            raise UnknownNameError("cheat", name, self.cheats, where=f"of environment {self.name!r}")

    def check_solve(self) -> None:
        """Check that there is a reference solution.

        Raises:
            UsageError: there is no reference solution.
        """
        if not self.can_solve:
            raise UsageError(
                f"environment {self.name!r} has no reference solution",
                hint="implement solve_trajectory, or use another agent than `oracle`",
            )

    def _own(self, environment: object) -> SimpleNamespace:
        """Return the environment's implementations by hook: its methods that have a hook's name or that `hookimpl`
        marks."""
        own: dict[str, dict[str, Callable[..., Any]]] = {}
        for hook in ENVIRONMENT_HOOKS:
            if callable(method := getattr(environment, hook, None)):
                own[hook] = {hook: method}
        for name, hook, function, options in _find_hooks(environment):
            if hook not in (*ENVIRONMENT_HOOKS, *OBSERVERS):
                hint = nearest_hint(hook, [*ENVIRONMENT_HOOKS, *OBSERVERS])
                raise PluginError(f"{name} is not a hook that an environment can implement", hint=hint)
            if options["wrapper"] or options["hookwrapper"]:
                raise PluginError(
                    f"environment {self.name!r} marks {name} as a wrapper",
                    hint="an environment implements its hooks; use @hookimpl alone",
                )
            if hook in OBSERVERS:
                _check_kind(hook, function, options)
            own.setdefault(hook, {})[name] = function
        if CHEAT_HOOK in own:
            raise PluginError(
                f"environment {self.name!r} implements {CHEAT_HOOK}", hint="return its cheats from cheats(), by name"
            )
        for hook, named in own.items():
            if len(named) > 1:
                raise PluginError(
                    f"environment {self.name!r} implements {hook} more than once: {', '.join(sorted(named))}",
                    hint="keep one of them",
                )
        return SimpleNamespace(
            **{hook: hookimpl(self._adapt(hook, *named.values())) for hook, named in own.items()},
        )

    @functools.cached_property
    def cheats(self) -> dict[str, Callable[..., Any]]:
        """Return the environment's cheats by name, each as a function of all arguments of the hook.

        Raises:
            PluginError: `Environment.cheats` failed, or a cheat has a wrong name or takes an argument that the hook
                does not have.
        """
        named: Callable[[], Mapping[str, Cheat]] = getattr(self._environment, "cheats", dict)
        try:
            cheats = dict(named())
        except Exception as error:
            raise PluginError(
                f"environment {self.name!r} failed in cheats(): {describe(error)}", hint="report this to its author"
            ) from error
        for name in cheats:
            if not isinstance(name, str) or not _CHEAT_NAME.fullmatch(name):
                raise PluginError(
                    f"environment {self.name!r} has a cheat named {name!r}",
                    hint="name cheats in lower-case letters, digits and hyphens",
                )
        return {name: _with_arguments_of(CHEAT_HOOK, cheat) for name, cheat in cheats.items()}

    def _cheat(self, cheat: str, **arguments: Any) -> Any:
        return self.cheats[cheat](cheat, *arguments.values())

    def _adapt(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an observer unchanged. For any other hook, sync or async, return a function that returns an
        awaitable."""
        start = _with_arguments_of(hook, function)
        if hook in OBSERVERS:
            return start

        @functools.wraps(start)
        def call(*arguments: Any) -> _AwaitableHook:
            async def run() -> Any:
                value = start(*arguments)
                if inspect.isawaitable(value):
                    value = await value
                return self._score(value) if hook == "verify_and_score_trajectory" else value

            return _AwaitableHook(run)

        return call

    def _score(self, value: Any) -> Score:
        """Return a score of an environment or a wrapper as the reward and the details."""
        reward, details = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if not isinstance(reward, int | float) or not math.isfinite(reward) or not isinstance(details, Mapping):
            raise VerifierError(
                f"verify_and_score_trajectory of {self.name!r} gave {value!r}",
                hint="return a finite reward, or (reward, details)",
            )
        return float(reward), dict(details)
