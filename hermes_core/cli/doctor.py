"""The checks of `hermes-rl doctor`: whether each backend can be used here, and what to do if not."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hermes_core.errors import HermesError, describe
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Diagnosis
from hermes_core.settings import Settings
from hermes_core.terminal.settings import explain

CHECK_TIMEOUT_S = 30.0
"""Seconds that a backend has for its check."""


@dataclass(frozen=True)
class Findings:
    """The findings for each backend, and the problems of plugins."""

    backends: dict[str, Diagnosis]
    problems: tuple[str, ...]
    terminal: tuple[str, ...] = ()
    """The terminal tool's settings, and where each is from."""
    profiles: tuple[str, ...] = ()
    """The profiles of runs, and the file that they are from."""

    @property
    def healthy(self) -> bool:
        """Return whether every checked backend can be used, and no plugin is broken."""
        return not self.problems and all(found.usable for found in self.backends.values())

    def as_json(self) -> str:
        """Return the report for programs."""
        backends = {name: asdict(found) for name, found in self.backends.items()}
        found = {
            "healthy": self.healthy,
            "backends": backends,
            "profiles": self.profiles,
            "terminal": self.terminal,
            "problems": self.problems,
        }
        return json.dumps(found, indent=2)

    def as_text(self, terminal_width: int | None = None) -> str:
        """Return the report for people: a line for each backend, with details and advice below it; wrapped for a
        terminal."""
        lines = []
        for name, found in self.backends.items():
            lines.append(f"{name}: {'usable' if found.usable else 'NOT usable'}: {found.summary}")
            lines.extend(f"    {detail}" for detail in found.details)
            lines.extend(f"    -> {advice}" for advice in found.advice)
        for title, settings in (("profiles", self.profiles), ("terminal tool", self.terminal)):
            if settings:
                lines.append(f"{title}:")
                lines.extend(f"    {setting}" for setting in settings)
        lines.extend(f"problem: {problem}" for problem in self.problems)
        return "\n".join(lines if terminal_width is None else (_wrapped(line, terminal_width) for line in lines))


def _wrapped(line: str, width: int) -> str:
    """Return the line wrapped, with all lines but the first indented further. Long words such as paths are not
    split."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


async def examine(runtime: Runtime, names: Sequence[str] = ()) -> Findings:
    """Check the backends of these names, or all; each by itself, all at once; and the terminal tool's settings.

    Raises:
        UnknownNameError: there is no backend of one of the names.
    """
    for name in names:
        runtime.backends.entry(name)
    async with asyncio.TaskGroup() as group:
        checks = {name: group.create_task(_check(runtime, name)) for name in names or runtime.backends.names()}
    problems = runtime.plugin_manager.problems()
    terminal: list[str] = []
    try:
        settings, lines = explain(runtime.config_classes())
        if not names or settings.backend in names:
            terminal = lines
            runtime.backends.entry(settings.backend)
    except HermesError as error:
        problems.append(f"the terminal tool: {error}")
    return Findings(
        {name: check.result() for name, check in checks.items()},
        tuple(problems),
        tuple(terminal),
        tuple(_profiles(runtime.settings)),
    )


def _profiles(settings: Settings) -> list[str]:
    if not settings.profiles:
        return []
    source = settings.profiles_file or "the settings"
    return [f"{', '.join(settings.profiles)}, from {source}", f"used where none is named: {settings.default_profile}"]


async def _check(runtime: Runtime, name: str) -> Diagnosis:
    """Return one backend's own diagnosis. A backend that can't be made, or hangs, is not usable."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await runtime.backend(name).check()
    except TimeoutError:
        return Diagnosis(False, f"its check was not done within {CHECK_TIMEOUT_S:g} s")
    except HermesError as error:
        return Diagnosis(False, error.message, advice=(error.hint,) if error.hint else ())
    except Exception as error:
        return Diagnosis(False, f"its check failed: {describe(error)}", advice=("report this to the backend's author",))
