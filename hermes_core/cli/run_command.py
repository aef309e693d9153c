"""What commands that work in sandboxes share, built-in ones and plugins': the options of a run, and a clean end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from hermes_core.agents.base import AgentSettings
from hermes_core.cli.options import (
    DottedCommand,
    collect_settings,
    find_dotted_options,
    merge_options,
    read_config,
    setting_option,
)
from hermes_core.cli.support import finish
from hermes_core.errors import UnknownNameError
from hermes_core.runs.options import RunOptions
from hermes_core.runtime import Runtime
from hermes_core.validation import validate_data

T = TypeVar("T")

Config = Mapping[str, Mapping[str, Any]]
"""The sections of a configuration file."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

RUN_OPTIONS = (
    setting_option(RunOptions, "backend", metavar="NAME"),
    setting_option(RunOptions, "profile", metavar="NAME"),
    setting_option(RunOptions, "isolation", metavar="LEVEL"),
    setting_option(RunOptions, "allow_unisolated"),
    click.option("--confine", is_flag=True, help="Give commands no network, and at most 4 GiB of memory per process."),
    setting_option(RunOptions, "concurrency", metavar="N"),
    setting_option(RunOptions, "seed", metavar="N"),
    click.option(
        *("--config",),
        type=FILE,
        metavar="FILE.yaml",
        help="Configuration file with sections env, agent, backend and run.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)
"""Options of every command that works in sandboxes."""

_CONFINED = {"network": "none", "process_memory": 4096}
"""The backend's settings that `--confine` sets unless the user gives them."""

_WRITTEN_ONLY = frozenset({"environment", "out", "out_dir", "resume"})
"""Arguments that the command line can have but a configuration file can't."""


class RunCommand(DottedCommand):
    """A click command that has, beside its own options, those of a run: `--backend`, `--isolation`, `--concurrency`,
    `--seed`, `--config` and so on, and `--agent.KEY=VALUE` and `--backend.KEY=VALUE`.

        @click.command(cls=RunCommand)
        @click.argument("repo")
        @click.pass_context
        def make_something(ctx, repo, **given):
            \"\"\"Make something of REPO.\"\"\"
            made = carry_out(ctx, lambda runtime, options: make(runtime, options, repo))
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"sections": ("agent", "backend"), **options})
        for option in RUN_OPTIONS:
            option(self)


def carry_out(
    ctx: click.Context,
    work: Callable[[Runtime, RunOptions], Coroutine[Any, Any, T]],
    interrupted: Callable[[], str] = lambda: "interrupted",
) -> T:
    """Run the work of a `RunCommand` in a new runtime, and return the work's result. Ctrl-C cancels the work; the
    program then ends when the sandboxes have ended, or after a time limit.

    Args:
        work: gets the runtime, and the options from the command line and the configuration file.
        interrupted: returns the message to print after Ctrl-C.

    Raises:
        UsageError: an option or a setting is wrong.
        HermesError: as `work` raised it; the program then ends with its message and exit code.
    """

    async def main(runtime: Runtime) -> T:
        options = options_of(ctx, runtime, read_config(ctx.params["config"]))
        return await work(runtime, validate_data(RunOptions, options, "the run"))

    return finish(ctx, main, interrupted)


def choose_agent(ctx: click.Context, runtime: Runtime, agent: str) -> AgentSettings:
    """Return the settings of an agent for a `RunCommand`. Later sources override earlier ones: the configuration file,
    `--agent.KEY=VALUE`, and the command's own options made with `setting_option(AgentSettings, "model")` and the like.

    Raises:
        UnknownNameError, ConfigError: a setting is wrong, or there is no such agent.
    """
    config = read_config(ctx.params["config"])
    return runtime.agent_settings(agent_settings_of(ctx, runtime, agent, config["agent"]), agent)


def agent_settings_of(ctx: click.Context, runtime: Runtime, agent: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the agent's settings: the file's section, overridden by `--agent.…`, then by options of their own."""
    values = {key: value for key, value in section.items() if key != "name"}
    written = merge_options(values, find_dotted_options(ctx, "agent"), runtime.agent_config_class(agent))
    return {**written, **collect_settings(ctx, AgentSettings)}


def options_of(
    ctx: click.Context, runtime: Runtime, config: Config, *, known: Collection[str] | None = None, **instead: str | None
) -> dict[str, Any]:
    """Return the fields of `RunOptions`: the file's section `run`, overridden by the command line's options.

    Args:
        known: the settings of the backend to take from those given; None takes all.
        instead: values that replace those of the options of the same name, unless they are None.

    Raises:
        UnknownNameError: the file's section `run` has an unknown key.
    """
    for key in config["run"].keys() - RunOptions.model_fields.keys():
        place = {"agent": "`agent` is a section of its own: write `agent: NAME`, or `agent: {name: NAME, …}`"}
        hint = place.get(key) or ("give it on the command line" if key in _WRITTEN_ONLY else None)
        raise UnknownNameError("key", key, RunOptions.model_fields, where="of the run", hint=hint)
    from_options = {
        **collect_settings(ctx, RunOptions),
        **{key: value for key, value in instead.items() if value is not None},
    }
    backend = first(from_options.get("backend"), config["backend"].get("name"), config["run"].get("backend"))
    options = {**config["run"], **from_options, "backend": str(first(backend, RunOptions().backend))}
    section = {key: value for key, value in config["backend"].items() if key != "name"}
    written = find_dotted_options(ctx, "backend")
    if known is not None:
        section = {key: value for key, value in section.items() if key in known}
        written = {key: value for key, value in written.items() if key.partition(".")[0] in known}
    if section or written or ctx.params["confine"]:
        confined = _CONFINED if ctx.params["confine"] else {}
        kind = runtime.backend(options["backend"]).config_class
        options["backend_config"] = confined | merge_options(section, written, kind)
    return options


def first(*values: Any) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)
