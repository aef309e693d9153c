"""The plugins of one runtime: finds them by entry point, loads them one by one, and reports failures."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from importlib import metadata

from hermes_core.errors import PluginError, UsageError, describe, nearest_hint
from hermes_core.plugins import builtin
from hermes_core.plugins.calling import adapt, caller, make_events
from hermes_core.plugins.hookspecs import PROJECT
from hermes_core.plugins.registry import (
    PluginEntry,
    PluginInfo,
    PluginStatus,
    Registrar,
    Registry,
    ToolRegistrar,
    import_hint,
)
from hermes_core.version import PLUGIN_API, __version__

log = logging.getLogger(__name__)

CORE = PluginInfo("core", "hermes-rl", __version__, builtin=True)
"""The plugin that is always loaded."""

KINDS = ("backend", "agent", "parser", "environment", "sink", "observer", "command")
"""The kinds for which plugins register names, each with a factory, in the hook `hermes_register_KINDs`."""


class PluginManager:
    """Loads plugins and collects the names that they claim.

    pluggy's own loader stops at the first broken plugin. This one reports a broken plugin in `plugins`, with its name,
    distribution and reason. A broken plugin provides nothing, and the others work.

    Args:
        allow: entry-point names to load; None is all of them. Built-ins are always loaded.
        extra: more plugin objects, for tests and notebooks.
        load_entry_points: whether to look for installed plugins.

    Raises:
        PluginError: a plugin of `extra` is broken. This is an error because the caller can repair the plugin.
    """

    def __init__(
        self, *, allow: Collection[str] | None = None, extra: Sequence[object] = (), load_entry_points: bool = True
    ) -> None:
        self.plugins: list[PluginInfo] = []
        """Every plugin that was found, in the order of loading: the core, entry points by name, extras."""
        self.registered: list[tuple[str, object]] = []
        """The plugins that were loaded: the name for reports, and the plugin as `adapt` returns it."""
        self.claims: list[PluginEntry] = []
        """All claims of the loaded plugins, including clashes."""

        self._add(CORE, builtin)
        if load_entry_points:
            self._load_entry_points(allow)
        for plugin in extra:
            info = PluginInfo(getattr(plugin, "__name__", type(plugin).__name__))
            try:
                self._add(info, plugin)
            except PluginError as error:
                raise PluginError(f"{info.label}: {error.message}", hint=error.hint) from error
        self.events = make_events(self.registered)
        """Events for the plugins' observers."""

    def observe(self, entry: PluginEntry, observer: object) -> None:
        """Let an object that a plugin's factory made observe this runtime's events.

        Raises:
            PluginError: the object has no hook, or a hook that can't work.
        """
        adapted = adapt(observer)
        if not vars(adapted):
            raise PluginError(
                f"observer {entry.name!r} of {entry.plugin.label} implements no hook",
                hint="mark its methods with @hookimpl",
            )
        self.registered.append((entry.plugin.label, adapted))
        self.events = make_events(self.registered)

    def registry(self, kind: str) -> Registry:
        """Return the names of one kind: one of `KINDS`, `tool`, `toolset` or `distribution`."""
        absent = tuple(plugin for plugin in self.plugins if plugin.status is not PluginStatus.LOADED)
        return Registry(kind, tuple(entry for entry in self.claims if entry.kind == kind), absent)

    def problems(self) -> list[str]:
        """Return the problems, one line each: plugins that failed to load, and names that more than one plugin
        claims."""
        lines = [f"{plugin.label} {plugin.reason} ({plugin.hint})" for plugin in self.plugins if plugin.wrong]
        for kind in dict.fromkeys(entry.kind for entry in self.claims):
            lines.extend(str(error) for error in self.registry(kind).clashes().values())
        return lines

    def check_named(self) -> None:
        """Check that every plugin of the allow-list is installed.

        Raises:
            UsageError: a plugin is not installed.
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
                reason, hint = "is installed but left out by HERMES_PLUGINS", f"add {name!r} to HERMES_PLUGINS"
                self.plugins += [info.as_unused(PluginStatus.EXCLUDED, reason, hint) for info in infos]
            elif len(namesakes := [*infos, *([CORE] if name == CORE.name else [])]) > 1:
                for info in infos:
                    others = " and ".join(other.label for other in namesakes if other is not info)
                    self._add_failed(info, f"its name is also claimed by {others}", "uninstall one of them")
            else:
                self._load(infos[0], entry_points[0])
        for name in sorted(set(allow or ()) - set(found) - {CORE.name}):
            reason, hint = "is named in HERMES_PLUGINS but not installed", nearest_hint(name, found)
            self.plugins.append(PluginInfo(name).as_unused(PluginStatus.MISSING, reason, hint))

    def _load(self, info: PluginInfo, entry_point: metadata.EntryPoint) -> None:
        """Load an installed plugin. Errors are recorded in `plugins`, not raised."""
        try:
            self._add(info, entry_point.load())
        except PluginError as error:
            self._add_failed(info, error.message, error.hint)
            log.debug("loading %s", info.label, exc_info=True)
        except (Exception, SystemExit) as error:
            self._add_failed(info, describe(error), f"{import_hint(error, info)}; `hermes-rl -vv plugins` shows where")
            log.debug("loading %s", info.label, exc_info=True)

    def _add_failed(self, info: PluginInfo, reason: str, hint: str | None) -> None:
        self.plugins.append(info.as_unused(PluginStatus.FAILED, f"failed to load: {reason}", hint or ""))

    def _add(self, info: PluginInfo, plugin: object) -> None:
        """Check and register one plugin, completely or not at all.

        Raises:
            PluginError: the plugin was made for another plugin API, has a hook that can't work, or its registration
                failed.
        """
        _check_api(info, plugin)
        adapted = adapt(plugin)
        if not vars(adapted):
            raise PluginError("it implements no hook", hint="mark its functions with @hookimpl")
        info = replace(info, hooks=tuple(sorted(vars(adapted))))
        self.claims += [*_claims(info, adapted)]
        self.plugins.append(info)
        self.registered.append((info.label, adapted))


def _check_api(info: PluginInfo, plugin: object) -> None:
    api = getattr(plugin, "HERMES_PLUGIN_API", PLUGIN_API)
    if api != PLUGIN_API:
        old = CORE if isinstance(api, int) and api > PLUGIN_API else info
        raise PluginError(
            f"it was made for plugin API {api}, and {CORE.distribution} {__version__} has {PLUGIN_API}",
            hint=f"pip install --upgrade {old.distribution or old.name}",
        )


def _claims(info: PluginInfo, adapted: object) -> Iterator[PluginEntry]:
    """Yield the claims that the plugin makes in its registration hooks."""
    hooks = caller(adapted)
    for registrar in (*(Registrar(kind, info) for kind in KINDS), ToolRegistrar("tool", info)):
        hook = f"hermes_register_{registrar.kind}s"
        try:
            getattr(hooks, hook)(registry=registrar)
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"{hook}: {describe(error)}", hint=import_hint(error, info)) from error
        yield from registrar.entries


def _info(entry_point: metadata.EntryPoint) -> PluginInfo:
    distribution = entry_point.dist
    if distribution is None:
        return PluginInfo(entry_point.name)
    return PluginInfo(entry_point.name, distribution.name, distribution.version)
