"""Toolsets (named groups of tools), distributions (weighted choices of them), and what a configuration resolves to."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hermes_core.errors import ConfigError

if TYPE_CHECKING:
    from hermes_core.tools.registry import ToolRegistry

logger = logging.getLogger(__name__)

ALL = ("all", "*")
"""Names that stand for every registered tool."""


@dataclass(frozen=True)
class Toolset:
    """A named group: its own tools, the tools that name it in `Tool.toolsets`, and those of the groups it includes."""

    name: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        if self.name in ALL:
            raise ConfigError(f"toolset name {self.name!r} is reserved", hint="it stands for every tool; use another")


@dataclass(frozen=True)
class Distribution:
    """A weighted choice: each toolset is drawn by itself, with its probability in percent."""

    name: str
    percent: Mapping[str, float]
    summary: str = ""

    def __post_init__(self) -> None:
        for toolset, percent in self.percent.items():
            if not 0 <= percent <= 100:
                message = f"distribution {self.name!r} gives toolset {toolset!r} {percent} percent"
                raise ConfigError(message, hint="a probability is within 0 to 100")
        if not any(self.percent.values()):
            raise ConfigError(f"distribution {self.name!r} can't draw any toolset", hint="give one more than 0 percent")

    def sample(self, seed: int | str) -> list[str]:
        """The toolsets that this seed draws; the most probable one if it draws none.

        A pure function of the distribution and the seed, in this process and any other. Each toolset has a draw of its
        own, so that adding one to the distribution changes nothing for the others.
        """
        drawn = [
            toolset
            for toolset, percent in self.percent.items()
            if random.Random(f"{self.name}\n{toolset}\n{seed}").random() * 100 < percent
        ]
        return drawn or [max(self.percent, key=lambda toolset: self.percent[toolset])]


def expand_toolset(registry: ToolRegistry, name: str) -> list[str]:
    """The tools of a toolset, those of its `includes` first, each once.

    Raises:
        UnknownNameError: it, or something that it names, does not exist.
        ConfigError: toolsets include each other in a circle; the message shows it.
    """
    found: dict[str, None] = {}
    _expand(registry, name, (), found)
    return list(found)


def _expand(registry: ToolRegistry, name: str, path: tuple[str, ...], found: dict[str, None]) -> None:
    if name in ALL:
        found.update(dict.fromkeys(registry.names()))
        return
    if name in path:
        circle = " -> ".join((*path[path.index(name) :], name))
        raise ConfigError(f"toolsets include each other in a circle: {circle}", hint="remove one of these `includes`")
    toolsets = registry.toolsets
    if name not in toolsets:
        where = f"(included by {path[-1]!r})" if path else ""
        raise registry.missing("toolset", name, [*toolsets, ALL[0]], where=where)
    for included in toolsets[name].includes:
        _expand(registry, included, (*path, name), found)
    for tool in toolsets[name].tools:
        if tool not in registry:
            raise registry.missing("tool", tool, registry.names(), where=f"(of toolset {name!r})")
        found[tool] = None
    found.update(dict.fromkeys(tool for tool in registry.names() if name in registry.get(tool).toolsets))


def resolve_tools(
    registry: ToolRegistry,
    enabled_toolsets: Sequence[str] | None = None,
    disabled_toolsets: Sequence[str] | None = None,
    distribution: str | None = None,
    seed: int | str = 0,
) -> list[str]:
    """The names of the tools that a rollout's model may call, in the registry's order.

    Args:
        enabled_toolsets: the toolsets to load. Naming none, and no distribution, loads all tools and logs a warning.
        disabled_toolsets: toolsets whose tools are left out, whatever else contains them.
        distribution: draw the toolsets from this distribution instead of naming them.
        seed: what the draw depends on; one per rollout gives each its own choice.

    Raises:
        ConfigError: both toolsets and a distribution were named, or toolsets form a circle.
        UnknownNameError: there is no toolset or distribution of that name.
    """
    if enabled_toolsets and distribution:
        message = f"both toolsets ({', '.join(enabled_toolsets)}) and the distribution {distribution!r} were named"
        raise ConfigError(message, hint="name toolsets or a distribution, not both")
    left_out = _tools_of(registry, disabled_toolsets or ())
    if distribution:
        if distribution not in registry.distributions:
            raise registry.missing("distribution", distribution, registry.distributions)
        chosen: Iterable[str] = registry.distributions[distribution].sample(seed)
    elif enabled_toolsets:
        chosen = enabled_toolsets
    else:
        chosen = ("all",)
        logger.warning("no toolsets and no distribution were named: all %d tools are loaded", len(registry.names()))
    enabled = _tools_of(registry, chosen)
    return [tool for tool in registry.names() if tool in enabled and tool not in left_out]


def _tools_of(registry: ToolRegistry, toolsets: Iterable[str]) -> set[str]:
    return {tool for toolset in toolsets for tool in expand_toolset(registry, toolset)}
