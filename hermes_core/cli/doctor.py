"""The checks of `hermes-rl doctor`: whether each backend and agent can be used here, and what to do if not."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from hermes_core.agents.base import InstallableProgram
from hermes_core.aio import LoopThread
from hermes_core.cli.listing import program_of
from hermes_core.errors import HermesError
from hermes_core.runtime import Runtime, close
from hermes_core.sandbox.contract import Diagnosis
from hermes_core.sandbox.promises import diagnosis_of
from hermes_core.settings import Settings
from hermes_core.terminal.settings import explain

CHECK_TIMEOUT_S = 60.0
"""Seconds that a backend has for its check."""

END_S = 5.0
"""Seconds that a check has to end after it was cancelled."""


@dataclass(frozen=True)
class Findings:
    """The findings for each backend and agent, and the problems of plugins."""

    backends: dict[str, Diagnosis]
    problems: tuple[str, ...]
    agents: dict[str, Diagnosis] = field(default_factory=dict)
    terminal: tuple[str, ...] = ()
    """The terminal tool's settings, each with its source."""
    profiles: tuple[str, ...] = ()
    """The profiles of runs, and the file that declares them."""
    hanging: bool = False
    """Whether a check still runs because it can't be cancelled. A normal exit of the program would wait for it."""

    @property
    def healthy(self) -> bool:
        """Return whether every checked backend and agent can be used, and no plugin is broken."""
        return not self.problems and all(found.usable for found in (self.backends | self.agents).values())

    def as_json(self) -> str:
        """Return the report for programs."""
        backends = {name: asdict(found) for name, found in self.backends.items()}
        found = {
            "healthy": self.healthy,
            "backends": backends,
            "agents": {name: asdict(found) for name, found in self.agents.items()},
            "profiles": self.profiles,
            "terminal": self.terminal,
            "problems": self.problems,
        }
        return json.dumps(found, indent=2)

    def as_text(self, terminal_width: int | None = None) -> str:
        """Return the report for people: a line for each backend and agent, with details and advice below it; wrapped
        for a terminal."""
        lines = []
        agents = {f"agent {name}": found for name, found in self.agents.items()}
        for name, found in {**self.backends, **agents}.items():
            lines.append(f"{name}: {'usable' if found.usable else 'NOT usable'}: {found.summary}")
            lines.extend(f"    {detail}" for detail in found.details)
            lines.extend(f"    -> {advice}" for advice in found.advice)
        for title, settings in (("profiles", self.profiles), ("terminal tool", self.terminal)):
            if settings:
                lines.append(f"{title}:")
                lines.extend(f"    {setting}" for setting in settings)
        lines.extend(f"problem: {problem}" for problem in self.problems)
        return "\n".join(lines if terminal_width is None else (_wrap(line, terminal_width) for line in lines))


@dataclass(frozen=True)
class _Checked:
    """The outcome of one backend's check."""

    diagnosis: Diagnosis
    hangs: bool


def _wrap(line: str, width: int) -> str:
    """Return the line wrapped, with all lines but the first indented further. Long words such as paths are not
    split."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


async def examine(runtime: Runtime, names: Sequence[str] = (), agents: Sequence[str] = ()) -> Findings:
    """Check these backends, or all of them, at the same time; the terminal tool's settings; and the programs of these
    agents, in a slot of each backend in `names`.

    Raises:
        UnknownNameError: no backend or agent has one of the names.
        UsageError: an agent does not run a program.
    """
    for name in names:
        runtime.backends.entry(name)
    programs = {name: program_of(runtime, name) for name in agents}
    async with asyncio.TaskGroup() as group:
        checks = {name: group.create_task(_check(runtime, name)) for name in names or runtime.backends.names()}
    usable = [name for name in names if checks[name].result().diagnosis.usable]
    examined = {
        name: await _check_agent(runtime, program, usable, named=bool(names)) for name, program in programs.items()
    }
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
        {name: check.result().diagnosis for name, check in checks.items()},
        tuple(problems),
        examined,
        tuple(terminal),
        tuple(_profiles(runtime.settings)),
        hanging=any(check.result().hangs for check in checks.values()),
    )


def _profiles(settings: Settings) -> list[str]:
    if not settings.profiles:
        return []
    source = settings.profiles_file or "the settings"
    return [f"{', '.join(settings.profiles)}, from {source}", f"used where none is named: {settings.default_profile}"]


async def _check(runtime: Runtime, name: str) -> _Checked:
    """Return one backend's own diagnosis. A backend that can't be made, or hangs, is not usable.

    The backend is made and checked in a thread with an event loop of its own, so that a backend that blocks does not
    hold up the checks of the others.
    """
    thread = LoopThread(f"check of backend {name}", _nothing)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            diagnosis = await thread.run(_diagnosis(runtime, name))
    except TimeoutError:
        diagnosis = Diagnosis(
            False,
            f"its check was not done within {CHECK_TIMEOUT_S:g} s",
            advice=("`check` needs time limits of its own: one that never ends is a bug in the plugin",),
        )
    finally:
        await asyncio.to_thread(thread.close, END_S)
    return _Checked(diagnosis, hangs=not thread.closed)


async def _check_agent(
    runtime: Runtime, program: InstallableProgram, backends: Sequence[str], *, named: bool
) -> Diagnosis:
    """Return whether a program is fetched or can be fetched, and whether these backends' slots meet its requirements.

    Args:
        backends: the usable backends among those that the caller named.
        named: whether the caller named any backends.
    """
    try:
        found = program.check()
    except HermesError as error:
        return Diagnosis(False, error.message, advice=(error.hint,) if error.hint else ())
    for backend in backends:
        lacks, hint = await _lack(runtime, program, backend)
        found = replace(
            found,
            usable=found.usable and lacks is None,
            details=(*found.details, f"on {backend}: {lacks or 'a slot has what it needs'}"),
            advice=(*found.advice, *filter(None, [hint])),
        )
    if not named:
        found = replace(found, advice=(*found.advice, "name a backend to see whether its slots have what it needs"))
    return found


async def _lack(runtime: Runtime, program: InstallableProgram, backend: str) -> tuple[str | None, str | None]:
    """Return the reason why a program can't run in a slot of this backend, and a hint; each may be None."""
    try:
        async with (
            asyncio.timeout(CHECK_TIMEOUT_S),
            runtime.tool_backend(backend) as slots,
            slots.lease() as slot,
        ):
            await program.check_slot(slots.commands(slot))
    except TimeoutError:
        return f"there was no slot within {CHECK_TIMEOUT_S:g} s", "have the image on this host before"
    except HermesError as error:
        return error.message, error.hint
    return None, None


async def _diagnosis(runtime: Runtime, name: str) -> Diagnosis:
    try:
        backend = runtime.new_backend(name)
        try:
            return await diagnosis_of(backend)
        finally:
            await close(backend)
    except HermesError as error:
        return Diagnosis(False, error.message, advice=(error.hint,) if error.hint else ())


async def _nothing() -> None:
    """Close nothing: a backend is closed after its check."""
