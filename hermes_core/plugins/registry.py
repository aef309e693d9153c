"""The names that plugins claim, clashes between claims, and errors that say which plugin would provide a name."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic.errors import PydanticUserError

from hermes_core.errors import HermesError, PluginError, UnknownNameError, describe
from hermes_core.tools.base import Tool
from hermes_core.tools.schema import function_schema
from hermes_core.validation import words

BROUGHT_BY: dict[str, Mapping[str, str]] = {
    "agent": dict.fromkeys(
        (
            *("acp", "aider", "claude", "claude-code", "codex", "gemini", "gemini-cli", "hermes", "hermes-agent"),
            *("kimi-code", "mini", "mini-swe-agent", "opencode", "pi", "program", "qwen-code", "qwen-coder"),
            "terminus-2",
        ),
        "hermes-rl-agents",
    ),
    "backend": {
        "apptainer": "hermes-rl-singularity",
        "daytona": "hermes-rl-daytona",
        "docker": "hermes-rl-docker",
        "e2b": "hermes-rl-e2b",
        "k8s": "hermes-rl-kubernetes",
        "kubernetes": "hermes-rl-kubernetes",
        "modal": "hermes-rl-modal",
        "nomad": "hermes-rl-nomad",
        "singularity": "hermes-rl-singularity",
        "slurm": "hermes-rl-slurm",
        "ssh": "hermes-rl-ssh",
    },
    "command": {
        "atropos": "hermes-rl-atropos",
        "batch-runs": "hermes-rl-hermes-agent",
        "conformance": "hermes-rl-testing",
        "make-tasks": "hermes-rl-make-tasks",
    },
    "environment": {
        **dict.fromkeys(("endless-terminals", "harbor", "terminal-bench-2"), "hermes-rl-harbor"),
        "inspect": "hermes-rl-inspect",
        "swe-smith": "hermes-rl-swe-smith",
        "verifiers": "hermes-rl-verifiers",
    },
}
"""The distribution of ours that brings each name, by kind, so that errors and listings can say what to install."""


class PluginStatus(StrEnum):
    """Whether a plugin is in use: loaded, failed to load, excluded by the allow-list, or listed there but missing."""

    LOADED = "loaded"
    FAILED = "failed"
    EXCLUDED = "excluded"
    MISSING = "missing"


@dataclass(frozen=True)
class PluginInfo:
    """One plugin: its name, where it comes from, and the outcome of loading it."""

    name: str
    """The entry point's name."""
    distribution: str = ""
    """The installed distribution; empty for an object that was passed to the runtime."""
    version: str = ""
    builtin: bool = False
    status: PluginStatus = PluginStatus.LOADED
    reason: str = ""
    """Why the plugin is not in use."""
    hint: str = ""
    """What to do about this reason."""
    hooks: tuple[str, ...] = ()
    """The hooks that the plugin implements."""

    @property
    def wrong(self) -> bool:
        """Return whether the plugin should be in use, but is not."""
        return self.status in (PluginStatus.FAILED, PluginStatus.MISSING)

    @property
    def label(self) -> str:
        """Return the plugin's name for error messages: `plugin 'docker' (hermes-rl-docker 0.1.0)`."""
        if self.status is PluginStatus.MISSING:
            return f"plugin {self.name!r}"
        origin = f"{self.distribution} {self.version}".strip() or "given to the runtime"
        return f"plugin {self.name!r} ({origin})"

    def as_unused(self, status: PluginStatus, reason: str, hint: str) -> PluginInfo:
        """Return the same plugin as one that is not in use, with the reason."""
        return replace(self, status=status, reason=reason, hint=hint)


@dataclass(frozen=True)
class PluginEntry:
    """One claim of one plugin on a name of one kind (`backend`, `environment`, `tool`, …)."""

    kind: str
    name: str
    value: Any
    """The registered value; a string is `package.module:attribute`, imported on first use."""
    plugin: PluginInfo
    aliases: tuple[str, ...] = ()
    summary: str = ""
    requires: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return a description for error messages that distinguishes this claim from others on the same name."""
        return repr(self.summary or self.value)

    def load(self) -> Any:
        """Return the registered value, imported if it was given as a string.

        Raises:
            PluginError: the value can't be imported. The error names the plugin, its distribution and the reason.
        """
        if not isinstance(self.value, str):
            return self.value
        module, _, attribute = self.value.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.kind} {self.name!r} of {self.plugin.label} cannot be loaded: {describe(error)}",
                hint=import_hint(error, self.plugin),
            ) from error


class Claims:
    """The claims of one plugin, collected while its registration hooks run."""

    def __init__(self, kind: str, plugin: PluginInfo) -> None:
        self.kind = kind
        self.entries: list[PluginEntry] = []
        self._plugin = plugin

    def _claim(
        self,
        kind: str,
        name: str,
        value: Any,
        *,
        aliases: str | Iterable[str] = (),
        summary: str = "",
        requires: str | Iterable[str] = (),
    ) -> None:
        entry = PluginEntry(kind, name, value, self._plugin, words(aliases), summary, words(requires))
        for word in (name, *entry.aliases):
            if not isinstance(word, str) or not re.fullmatch(r"[^\s-]\S*", word):
                raise PluginError(f"{word!r} cannot be the name of a {kind}", hint="use letters, digits, '-' and '_'")
        self._check_new(entry)
        self.entries.append(entry)

    def _check_new(self, entry: PluginEntry) -> None:
        names = {entry.name, *entry.aliases}
        for earlier in self.entries:
            if earlier.kind == entry.kind and (taken := names & {earlier.name, *earlier.aliases}):
                raise PluginError(
                    f"{entry.kind} {min(taken)!r} is registered twice: as {earlier.label} and as {entry.label}",
                    hint="give one of them another name",
                )


class Registrar(Claims):
    """The argument of a plugin's `hermes_register_…` hooks. `add` claims a name for that plugin."""

    def add(
        self,
        name: str,
        factory: str | Callable[..., Any],
        *,
        aliases: str | Iterable[str] = (),
        summary: str = "",
        requires: str | Iterable[str] = (),
    ) -> None:
        """Claim `name` (and `aliases`) for `factory`.

        Args:
            factory: a callable, or `package.module:attribute`, which is imported on first use.
            summary: one line for `hermes-rl backends`, `envs` and similar lists.
            requires: the needs of `factory`, in words: `docker daemon`, `MODAL_TOKEN_ID`.

        Raises:
            PluginError: the name or the factory is malformed, or the plugin has used the name before.
        """
        if not (callable(factory) or (isinstance(factory, str) and re.fullmatch(r"[\w.]+:\w+", factory))):
            raise PluginError(
                f"{self.kind} {name!r}: {factory!r} is not a factory",
                hint="give a callable, or its place as 'package.module:attribute'",
            )
        self._claim(self.kind, name, factory, aliases=aliases, summary=summary, requires=requires)


class ToolRegistrar(Claims):
    """The argument of `hermes_register_tools`, which adds tools, toolsets and distributions."""

    def add(self, tool: Tool) -> None:
        """Add a tool, and claim its name.

        Raises:
            PluginError: `tool` is not a tool, its parameters can't be described to a model, or the plugin has used its
                name before.
        """
        if not isinstance(tool, Tool):
            raise PluginError(f"{tool!r} is no tool", hint="make one: function_tool(function), or Tool(…)")
        try:
            function_schema(tool)
        except (PydanticUserError, TypeError, ValueError) as error:
            raise PluginError(
                f"the parameters of tool {tool.name!r} can't be described by JSON: {describe(error)}",
                hint="use JSON's types, or pydantic models of them",
            ) from error
        self._claim("tool", tool.name, tool, summary=tool.description, requires=tool.requires)

    def add_toolset(
        self, name: str, *, tools: str | Iterable[str] = (), includes: str | Iterable[str] = (), summary: str = ""
    ) -> None:
        """Add a named group: these tools, and the tools of the included toolsets."""
        self._claim("toolset", name, {"tools": words(tools), "includes": words(includes)}, summary=summary)

    def add_distribution(self, name: str, percent: Mapping[str, float], *, summary: str = "") -> None:
        """Add a weighted choice of toolsets, with the chance of each in percent."""
        self._claim("distribution", name, {"percent": dict(percent)}, summary=summary)


@dataclass(frozen=True)
class Registry:
    """The names of one kind. A name that more than one plugin claims is refused when it is used; other names still
    work."""

    kind: str
    claims: tuple[PluginEntry, ...] = ()
    absent: tuple[PluginInfo, ...] = ()
    """Plugins that failed to load or were left out. Errors name them as possible providers of a missing name."""
    beside: tuple[str, ...] = ()
    """Names of this kind that no plugin provides. Errors list them, too."""

    @cached_property
    def _by_name(self) -> dict[str, list[PluginEntry]]:
        """Return the claims on each name and alias."""
        by_name: dict[str, list[PluginEntry]] = {}
        for entry in self.claims:
            for name in dict.fromkeys((entry.name, *entry.aliases)):
                by_name.setdefault(name, []).append(entry)
        return by_name

    def names(self) -> list[str]:
        """Return every name that can be used, without aliases, sorted."""
        return sorted(entry.name for entry in self.entries())

    def in_order(self) -> list[str]:
        """Return every name that can be used, without aliases, in the order of registration."""
        return [entry.name for entry in self.claims if len(self._by_name[entry.name]) == 1]

    def entries(self) -> list[PluginEntry]:
        """Return the claims on names that no other plugin claims, sorted by name."""
        return sorted((e for e in self.claims if len(self._by_name[e.name]) == 1), key=lambda e: e.name)

    def clashes(self) -> dict[str, PluginError]:
        """Return the names that are claimed more than once, each with its error."""
        return {name: self._clash(name, entries) for name, entries in self._by_name.items() if len(entries) > 1}

    def entry(self, name: str) -> PluginEntry:
        """Return the claim on this name or alias.

        Raises:
            UnknownNameError: no plugin claims the name. If a plugin that failed to load, was left out or is not
                installed would claim it, the error says so.
            PluginError: more than one plugin claims the name. The error names these plugins.
        """
        if (error := self.explain(name)) is not None:
            raise error
        if name not in self._by_name:
            raise self._unknown(name)
        return self._by_name[name][0]

    def explain(self, name: str) -> HermesError | None:
        """Return the error that says why this name can't be used: a clash, a plugin that is not in use, or a
        distribution of ours that is not installed. None if no plugin is known to claim the name."""
        entries = self._by_name.get(name, [])
        if len(entries) > 1:
            return self._clash(name, entries)
        if entries:
            return None
        folded, distribution = _fold(name), BROUGHT_BY.get(self.kind, {}).get(_fold(name))
        for plugin in self.absent:
            if _fold(plugin.name) == folded or (distribution and plugin.distribution == distribution):
                return self._absent(name, f"{plugin.label} {plugin.reason}", plugin.hint)
        if distribution:
            return self._absent(name, f"{distribution} is not installed", f"pip install {distribution}")
        return None

    def not_installed(self) -> dict[str, str]:
        """Return the names that are missing here because a distribution of ours is not installed, each with that
        distribution."""
        here = {plugin.distribution for plugin in (*self.absent, *(entry.plugin for entry in self.claims))}
        brought = BROUGHT_BY.get(self.kind, {}).items()
        return {name: brings for name, brings in brought if brings not in here and name not in self._by_name}

    def _absent(self, name: str, reason: str, hint: str) -> UnknownNameError:
        error = UnknownNameError(self.kind, name, self.names(), hint=hint)
        error.message = f"{error.message}: {reason}"
        return error

    def load(self, name: str) -> Any:
        """Return the value that is registered under this name, imported if necessary. Raise as `entry` and
        `PluginEntry.load` do."""
        return self.entry(name).load()

    def _clash(self, name: str, entries: Sequence[PluginEntry]) -> PluginError:
        who = " and ".join(dict.fromkeys(entry.plugin.label for entry in entries))
        return PluginError(
            f"{self.kind} {name!r} is claimed by {who}",
            hint="uninstall one of them, or leave one out (HERMES_PLUGINS; Runtime(load_entry_points=False) for all)",
        )

    def _unknown(self, name: str) -> UnknownNameError:
        known = [*self.names(), *self.beside]
        error = UnknownNameError(self.kind, name, known)
        missing = self.not_installed()
        nearest = difflib.get_close_matches(_fold(name), [*known, *missing], n=1, cutoff=0.75)
        if nearest and nearest[0] in missing:
            error.hint = f"did you mean {nearest[0]!r}? pip install {missing[nearest[0]]}"
        failed = [plugin.label for plugin in self.absent if plugin.wrong]
        if failed:
            error.hint = f"{error.hint}; not loaded: {', '.join(failed)}, see `hermes-rl plugins`"
        return error


def import_hint(error: BaseException, plugin: PluginInfo) -> str:
    """Return what to do about a plugin that can't be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name and plugin.distribution:
        return f"module {error.name!r} is missing: install {plugin.distribution} anew with its dependencies"
    return f"repair or uninstall {plugin.distribution or plugin.name}"


def _fold(name: str) -> str:
    return name.lower().replace("_", "-")
