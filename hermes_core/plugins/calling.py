"""Calling hooks: plugins' functions checked and adapted, one environment's hooks, and observers."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pluggy

from hermes_core.errors import PluginError, SetupFailed, UsageError, VerifierError, nearest_hint
from hermes_core.events import Events
from hermes_core.plugins import hookspecs

ENVIRONMENT_HOOKS = ("setup_trajectory_workspace", "verify_and_score_trajectory", "solve_trajectory")

SPECS: Mapping[str, Callable[..., Any]] = {
    name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, f"{hookspecs.PROJECT}_spec")
}
"""Every hook's specification, by name."""

OBSERVERS = [hook for hook in SPECS if hook not in ENVIRONMENT_HOOKS and not hook.startswith("hermes_register_")]
"""The hooks that are told of an event, which is called the same without `hermes_`."""


def new_manager() -> pluggy.PluginManager:
    """An empty pluggy manager that knows our specifications."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def adapt_plugin(plugin: object) -> SimpleNamespace:
    """The plugin's hook implementations, checked, each with exactly the arguments of its specification.

    pluggy passes no keyword-only arguments, and by version no defaulted ones either; so it is given functions with
    the specification's own signature, which pass on what the plugin's function wants.

    Raises:
        PluginError: a hook or an argument that does not exist, or an implementation of a kind that can't work.
    """
    adapted = SimpleNamespace()
    for name, function, options in _marked(plugin):
        hook = options["specname"] or name
        if hook not in SPECS:
            raise PluginError(f"{name} implements no hook of hermes-rl", hint=nearest_hint(hook, SPECS))
        _check_kind(hook, function, options)
        call = _wrapper(hook, function) if options["wrapper"] else _plain(hook, function)
        setattr(adapted, name, hookspecs.hookimpl(**options)(call))
    return adapted


def _marked(plugin: object) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The functions of a module or object that carry `hookimpl`, with the marker's options."""
    for name in dir(plugin):
        try:
            function = inspect.getattr_static(plugin, name)
        except AttributeError:
            continue
        function = getattr(function, "__func__", function)
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if isinstance(options, dict):
            yield name, getattr(plugin, name), options


def _check_kind(hook: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    if options["hookwrapper"]:
        raise PluginError(f"{hook}: old-style wrappers are not supported", hint="use @hookimpl(wrapper=True)")
    if hook in ENVIRONMENT_HOOKS:
        if not options["wrapper"]:
            raise PluginError(
                f"{hook} is the environment's own to implement; a plugin can only wrap it",
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
        raise PluginError(f"{hook} must be a plain function, not async", hint="it is called without await")


def wanted_arguments(hook: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The specification's arguments that this implementation takes.

    Raises:
        PluginError: it asks for an argument that the hook does not have.
    """
    known = tuple(inspect.signature(SPECS[hook]).parameters)
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return known
        if parameter.name in known and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise PluginError(
                f"{hook} has no argument {parameter.name!r} by that name", hint=nearest_hint(parameter.name, known)
            )
    return tuple(wanted)


def _plain(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, taking the specification's arguments by position."""
    spec = SPECS[hook]
    known = tuple(inspect.signature(spec).parameters)
    wanted = wanted_arguments(hook, function)

    # pluggy looks through `__wrapped__` for the names, so it sees the specification's.
    @functools.wraps(spec)
    def call(*arguments: Any, **named: Any) -> Any:
        given = named or dict(zip(known, arguments, strict=True))
        return function(**{name: given[name] for name in wanted})

    return call


def _wrapper(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper, which has to return an awaitable: whatever wraps it receives one too."""
    start = _plain(hook, function)

    @functools.wraps(start)
    def call(*arguments: Any) -> Generator[None, Any, Any]:
        outcome = yield from start(*arguments)
        if not inspect.isawaitable(outcome):
            place = f"{function.__module__}.{function.__qualname__}"
            raise PluginError(
                f"the wrapper {place} returned {outcome!r}, not an awaitable",
                hint="return the awaitable that yield gave, or another",
            )
        return outcome

    return call


@dataclass(frozen=True)
class Outcome(Awaitable[Any]):
    """An environment hook about to run: awaiting it runs the hook, so a wrapper may also skip it, or try it again."""

    run: Callable[[], Coroutine[Any, Any, Any]]

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.run().__await__()


class EnvironmentHooks:
    """The three hooks of one environment instance, with every plugin's wrappers around them, called by keyword.

    pluggy's `firstresult` would take the last of several environments registered; so each instance has a manager of
    its own that holds it and the plugins, with one implementation of each environment hook.

    Args:
        plugins: those that are registered, with their names.

    Raises:
        PluginError: the environment implements a hook twice, asks for an argument that it does not have, or has no
            `verify_and_score_trajectory`.
    """

    def __init__(self, environment: object, plugins: Iterable[tuple[str, object]]) -> None:
        self.name = str(getattr(environment, "name", type(environment).__name__))
        manager = new_manager()
        for name, plugin in plugins:
            manager.register(plugin, name)
        implementations = {hook: self._own(environment, hook) for hook in ENVIRONMENT_HOOKS}
        if implementations["verify_and_score_trajectory"] is None:
            raise PluginError(
                f"environment {self.name!r} does not implement verify_and_score_trajectory",
                hint="an environment needs it: it gives the reward",
            )
        own = SimpleNamespace()
        for hook, function in implementations.items():
            if function is not None:
                setattr(own, hook, hookspecs.hookimpl(self._awaitable(hook, function)))
        for name, function in _observers_of(environment).items():
            setattr(own, name, function)
        manager.register(own, f"environment {self.name}")
        self.can_solve = implementations["solve_trajectory"] is not None
        """Whether there is a reference solution to apply."""
        self.events = events_for(manager)
        """Told to the plugins' observers and the environment's own."""
        self._hook = manager.hook

    async def setup(
        self, *, item: Mapping[str, Any], trajectory_id: str, exec_tool: Any, rollout: Any
    ) -> dict[str, Any]:
        """Run `setup_trajectory_workspace`; `{}` if the environment has none.

        Raises:
            SetupFailed: it gave something that is not a mapping. What it raises itself is passed on.
        """
        outcome = self._hook.setup_trajectory_workspace(
            item=item, trajectory_id=trajectory_id, exec_tool=exec_tool, rollout=rollout
        )
        meta = None if outcome is None else await outcome
        if meta is not None and not isinstance(meta, Mapping):
            raise SetupFailed(
                f"setup_trajectory_workspace of {self.name!r} gave {meta!r}, not a mapping",
                hint="return a dict; it comes back as workspace_meta",
                trajectory_id=trajectory_id,
            )
        return dict(meta or {})

    async def verify(
        self,
        *,
        item: Mapping[str, Any],
        result: Any,
        trajectory_id: str,
        exec_tool: Any,
        workspace_meta: Mapping[str, Any],
        rollout: Any,
    ) -> tuple[float, dict[str, Any]]:
        """Run `verify_and_score_trajectory`: the reward and the details.

        Raises:
            VerifierError: it gave neither a finite number nor `(number, mapping)`. What it raises itself is passed on.
        """
        outcome = self._hook.verify_and_score_trajectory(
            item=item,
            result=result,
            trajectory_id=trajectory_id,
            exec_tool=exec_tool,
            workspace_meta=workspace_meta,
            rollout=rollout,
        )
        return self._score(await outcome)

    async def solve(
        self,
        *,
        item: Mapping[str, Any],
        trajectory_id: str,
        exec_tool: Any,
        workspace_meta: Mapping[str, Any],
        rollout: Any,
    ) -> None:
        """Run `solve_trajectory`.

        Raises:
            UsageError: the environment has no reference solution. What the hook raises itself is passed on.
        """
        self.check_solve()
        await self._hook.solve_trajectory(
            item=item,
            trajectory_id=trajectory_id,
            exec_tool=exec_tool,
            workspace_meta=workspace_meta,
            rollout=rollout,
        )

    def check_solve(self) -> None:
        """Make sure that there is a reference solution.

        Raises:
            UsageError: there is none.
        """
        if not self.can_solve:
            raise UsageError(
                f"environment {self.name!r} has no reference solution",
                hint="implement solve_trajectory, or use another agent than `oracle`",
            )

    def _own(self, environment: object, hook: str) -> Callable[..., Any] | None:
        """The environment's implementation: the method of the hook's name, marked or not, or one with that specname."""
        found = {hook} if callable(getattr(environment, hook, None)) else set()
        for name, _, options in _marked(environment):
            if (options["specname"] or name) == hook:
                found.add(name)
                if options["wrapper"] or options["hookwrapper"]:
                    raise PluginError(
                        f"environment {self.name!r} marks {name} as a wrapper",
                        hint="an environment implements its hooks; use @hookimpl alone",
                    )
        if len(found) > 1:
            raise PluginError(
                f"environment {self.name!r} implements {hook} more than once: {', '.join(sorted(found))}",
                hint="keep one of them",
            )
        function: Callable[..., Any] | None = getattr(environment, found.pop()) if found else None
        return function

    def _awaitable(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The implementation, sync or async, as one that gives an awaitable; a score in its full form."""
        start = _plain(hook, function)

        @functools.wraps(start)
        def call(*arguments: Any) -> Outcome:
            async def run() -> Any:
                value = start(*arguments)
                if inspect.isawaitable(value):
                    value = await value
                return self._score(value) if hook == "verify_and_score_trajectory" else value

            return Outcome(run)

        return call

    def _score(self, value: Any) -> tuple[float, dict[str, Any]]:
        reward, details = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if not isinstance(reward, int | float) or not math.isfinite(reward) or not isinstance(details, Mapping):
            raise VerifierError(
                f"verify_and_score_trajectory of {self.name!r} gave {value!r}",
                hint="return a finite reward, or (reward, details)",
            )
        return float(reward), dict(details)


def _observers_of(environment: object) -> dict[str, Callable[..., Any]]:
    """The observers that an environment implements itself, adapted.

    Raises:
        PluginError: it marks a method that is neither an environment hook nor an observer.
    """
    known = (*ENVIRONMENT_HOOKS, *OBSERVERS)
    observers = {}
    for name, function, options in _marked(environment):
        hook = options["specname"] or name
        if hook not in known:
            raise PluginError(f"{name} is not a hook that an environment can implement", hint=nearest_hint(hook, known))
        if hook not in ENVIRONMENT_HOOKS:
            _check_kind(hook, function, options)
            observers[name] = hookspecs.hookimpl(**options)(_plain(hook, function))
    return observers


def events_for(manager: pluggy.PluginManager) -> Events:
    """The events that the observers among these plugins listen to."""
    events = Events()
    for hook in OBSERVERS:
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            events.listen(
                hook.removeprefix("hermes_"), implementation.function, owner=f"plugin {implementation.plugin_name!r}"
            )
    return events
