"""The plugins of one runtime: found by entry point, each loaded in its own `try`, and reported when they fail."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import pluggy

from hermes_core.errors import PluginError, UsageError, nearest_hint
from hermes_core.plugins.calling import adapt_plugin, events_for, new_manager
from hermes_core.plugins.hookspecs import PROJECT
from hermes_core.plugins.registry import (
    Claims,
    Entry,
    PluginInfo,
    PluginStatus,
    Registrar,
    Registry,
    ToolRegistrar,
    describe,
    import_hint,
)
from hermes_core.version import PLUGIN_API, __version__

log = logging.getLogger(__name__)

CORE = "hermes-rl"
"""The distribution of the core."""

BUILTINS = {"core": "hermes_core.plugins.builtin", "tools": "hermes_core.plugins.builtin_tools"}
"""The plugins that are always on, by name."""

REGISTRATION = {
    "backend": "hermes_register_backends",
    "agent": "hermes_register_agents",
    "parser": "hermes_register_parsers",
    "environment": "hermes_register_environments",
    "sink": "hermes_register_sinks",
}
"""The kinds of names with a factory behind each, and the hook that registers them."""


class PluginManager:
    """Loads plugins and knows what they claim.

    pluggy's own loader stops at the first plugin that is broken. Here a broken one is reported in `plugins`, by name,
    distribution and reason, provides nothing, and the others work.

    Args:
        allow: entry-point names to load; None is all of them. The built-ins are always on.
        extra: further plugin objects, for tests and notebooks.
        load_entry_points: whether installed plugins are looked for at all.

    Raises:
        PluginError: one of `extra` is broken: whoever handed it over can mend it.
    """

    def __init__(
        self,
        *,
        allow: Collection[str] | None = None,
        extra: Sequence[object] = (),
        load_entry_points: bool = True,
    ) -> None:
        self.hooks: pluggy.PluginManager = new_manager()
        """pluggy's manager, holding every plugin that loaded."""
        self.plugins: list[PluginInfo] = []
        """Every plugin that was found, in the order of loading: built-ins, entry points by name, extras."""
        self.claims: list[Entry] = []
        """What they claim, clashes included."""

        for name, module in BUILTINS.items():
            self._try(PluginInfo(name, CORE, __version__, builtin=True), partial(importlib.import_module, module))
        if load_entry_points:
            self._load_entry_points(allow)
        for plugin in extra:
            info = PluginInfo(getattr(plugin, "__name__", type(plugin).__name__))
            try:
                self._load(info, partial(_given, plugin))
            except PluginError as error:
                raise PluginError(f"{info.label}: {error.message}", hint=error.hint) from error
        self.events = events_for(self.hooks)
        """Tells the plugins' observers what happens to sandboxes and trajectories."""

    def registry(self, kind: str) -> Registry:
        """The names of one kind: a key of `REGISTRATION`, `tool`, `toolset` or `distribution`."""
        absent = tuple(plugin for plugin in self.plugins if plugin.status is not PluginStatus.LOADED)
        return Registry(kind, tuple(entry for entry in self.claims if entry.kind == kind), absent)

    def problems(self) -> list[str]:
        """What is wrong, one line each: plugins that failed to load, and names that more than one plugin claims."""
        lines = [f"{p.label} {p.reason} ({p.hint})" for p in self.plugins if p.wrong]
        for kind in dict.fromkeys(entry.kind for entry in self.claims):
            lines.extend(str(error) for error in self.registry(kind).clashes().values())
        return lines

    def check_named(self) -> None:
        """Make sure that every plugin of the allow-list is installed.

        Raises:
            UsageError: one is not.
        """
        for plugin in self.plugins:
            if plugin.status is PluginStatus.MISSING:
                raise UsageError(f"{plugin.label} {plugin.reason}", hint=plugin.hint)

    def _load_entry_points(self, allow: Collection[str] | None) -> None:
        found: dict[str, list[metadata.EntryPoint]] = {}
        for entry_point in metadata.entry_points(group=PROJECT):
            found.setdefault(entry_point.name, []).append(entry_point)
        for name, entry_points in sorted(found.items()):
            infos = [_info(entry_point) for entry_point in entry_points]
            if allow is not None and name not in allow:
                self.plugins.extend(_excluded(info) for info in infos)
            elif name in BUILTINS or len(infos) > 1:
                self.plugins.extend(_failed(info, *_name_taken(info, infos)) for info in infos)
            else:
                self._try(infos[0], entry_points[0].load)
        for name in sorted(set(allow or ()) - set(found) - set(BUILTINS)):
            reason, hint = "is named in HERMES_PLUGINS but not installed", nearest_hint(name, found)
            self.plugins.append(PluginInfo(name, status=PluginStatus.MISSING, reason=reason, hint=hint))

    def _try(self, info: PluginInfo, load: Callable[[], object]) -> None:
        """Load one plugin; what goes wrong is kept in `plugins` instead of raised."""
        try:
            self._load(info, load)
        except PluginError as error:
            log.debug("loading %s", info.label, exc_info=True)
            self.plugins.append(_failed(info, f"failed to load: {error.message}", error.hint or ""))

    def _load(self, info: PluginInfo, load: Callable[[], object]) -> None:
        """Load, check and register one plugin, all or nothing.

        Raises:
            PluginError: it cannot be imported, was made for another plugin API, has a hook that cannot work, or its
                registration failed.
        """
        try:
            plugin = load()
        except (Exception, SystemExit) as error:
            raise PluginError(describe(error), hint=import_hint(error, info)) from error
        _check_api(info, plugin)
        hooks = adapt_plugin(plugin)
        if not vars(hooks):
            raise PluginError("it implements no hook", hint="mark its functions with @hookimpl")
        info = replace(info, hooks=tuple(sorted(vars(hooks))))
        claims = list(_claims(info, hooks))
        self.hooks.register(hooks, self._free_name(info.name))
        self.plugins.append(info)
        self.claims.extend(claims)

    def _free_name(self, name: str) -> str:
        """`name`, or with a number after it when pluggy has a plugin of that name (two extras of one class)."""
        names = [name, *(f"{name}-{n}" for n in range(2, len(self.plugins) + 3))]
        return next(candidate for candidate in names if not self.hooks.has_plugin(candidate))


def _given(plugin: object) -> object:
    return plugin


def _check_api(info: PluginInfo, plugin: object) -> None:
    api = getattr(plugin, "HERMES_PLUGIN_API", PLUGIN_API)
    if api != PLUGIN_API:
        older_core = isinstance(api, int) and api > PLUGIN_API
        raise PluginError(
            f"it was made for plugin API {api}, and {CORE} {__version__} has {PLUGIN_API}",
            hint=f"pip install --upgrade {CORE if older_core else info.distribution or info.name}",
        )


def _claims(info: PluginInfo, hooks: SimpleNamespace) -> Iterator[Entry]:
    """What the plugin claims through its registration hooks."""
    registrars: dict[str, Claims] = {hook: Registrar(kind, info) for kind, hook in REGISTRATION.items()}
    registrars["hermes_register_tools"] = ToolRegistrar(info)
    for name, function in vars(hooks).items():
        hook = getattr(function, f"{PROJECT}_impl")["specname"] or name
        if hook not in registrars:
            continue
        try:
            function(registrars[hook])
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"{name}: {describe(error)}", hint=import_hint(error, info)) from error
    for registrar in registrars.values():
        yield from registrar.entries


def _info(entry_point: metadata.EntryPoint) -> PluginInfo:
    distribution = entry_point.dist
    if distribution is None:
        return PluginInfo(entry_point.name)
    return PluginInfo(entry_point.name, distribution.name, distribution.version)


def _failed(info: PluginInfo, reason: str, hint: str) -> PluginInfo:
    return replace(info, status=PluginStatus.FAILED, reason=reason, hint=hint)


def _excluded(info: PluginInfo) -> PluginInfo:
    return replace(
        info,
        status=PluginStatus.EXCLUDED,
        reason="is installed but left out by HERMES_PLUGINS",
        hint=f"add {info.name!r} to HERMES_PLUGINS",
    )


def _name_taken(info: PluginInfo, infos: Sequence[PluginInfo]) -> tuple[str, str]:
    """Reason and hint for a plugin whose name is also another's."""
    others = [other.label for other in infos if other is not info] or [f"the built-in {info.name!r} of {CORE}"]
    return f"failed to load: its name is also claimed by {' and '.join(others)}", "uninstall one of them"
