"""Toolsets (named groups of tools) and distributions (weighted choices of toolsets)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from hermes_core.errors import ConfigError

ALL = ("all", "*")
"""Names that stand for every registered tool."""


@dataclass(frozen=True)
class Toolset:
    """A named group: its own tools, tools that name the group in `Tool.toolsets`, and the tools of included groups."""

    name: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        if self.name in ALL:
            raise ConfigError(
                f"toolset name {self.name!r} is reserved", hint="it means every tool; choose another name"
            )


@dataclass(frozen=True)
class Distribution:
    """A weighted choice: each toolset is drawn independently, with its probability in percent."""

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
        """Return the toolsets that this seed draws; if it draws none, the most probable toolset.

        The result depends only on the distribution and the seed, in any process. Each toolset is drawn independently,
        so adding a toolset to the distribution does not change the draws of the others.
        """
        drawn = [
            toolset
            for toolset, percent in self.percent.items()
            if random.Random(f"{self.name}\n{toolset}\n{seed}").random() * 100 < percent
        ]
        return drawn or [max(self.percent, key=lambda toolset: self.percent[toolset])]
