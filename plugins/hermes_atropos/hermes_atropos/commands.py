"""The commands `process`, `serve` and `evaluate`, for any environment or for one particular environment.

Atropos' own command line is not used: it reads a negative number as a switch, takes no lists or mappings, prints
defaults that do not apply, and turns wandb on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import click

from hermes_core import ConfigError, Runtime, UnknownNameError, say, validate_data
from hermes_core.cli.exits import EXIT_INCOMPLETE
from hermes_core.cli.main import LazyGroup
from hermes_core.cli.options import DottedCommand, find_dotted_options, merge_options, read_config
from hermes_core.cli.support import finish

SECTIONS = ("env", "openai")


class Modes(Protocol):
    """The parts of an environment that the commands use."""

    name: str | None

    def __init__(self, config: Any, server_configs: Any, *, runtime: Runtime) -> None: ...

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        """Return the default settings and servers."""

    async def process_manager(self) -> None:
        """Run the command `process`."""

    async def env_manager(self) -> None:
        """Run the command `serve`."""

    async def evaluate_manager(self) -> None:
        """Run the command `evaluate`."""

    def outcome(self, mode: str) -> dict[str, Any]:
        """Return the counts of a mode that has ended, and the paths of its files."""


FindClass = Callable[[Runtime, str | None], type[Modes]]
"""Returns the environment's class. The name is None if the command has no argument for it."""


class EnvironmentCommands(LazyGroup):
    """The three commands, with the messages and exit codes of `hermes-rl`."""

    elsewhere: Mapping[str, tuple[str, str]] = {}


def make_group(find_class: FindClass, *, takes_name: bool) -> EnvironmentCommands:
    """Return the click group of the three commands.

    Args:
        takes_name: whether the environment's name is an argument of each command.
    """
    group = EnvironmentCommands("atropos", help="Generate training data for Atropos' RL trainers.")
    summaries = {
        "process": "Write groups of rollouts, and exit.",
        "serve": "Keep the queue of a trainer at `run-api` filled with groups until its training ends.",
        "evaluate": "Roll out each item, and report how many were solved.",
    }
    for mode, summary in summaries.items():
        group.add_command(_command(mode, summary, find_class, takes_name=takes_name))
    return group


def _command(mode: str, summary: str, find_class: FindClass, *, takes_name: bool) -> click.Command:
    @click.pass_context
    def run(ctx: click.Context, /, config: Path | None, environment: str | None = None) -> None:
        _run(ctx, mode, find_class, environment, config)

    parameters: list[click.Parameter] = [
        click.Option(
            ["--config"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE.yaml",
            help="Configuration file with sections env and openai (one server, or a list).",
        )
    ]
    if takes_name:
        parameters.insert(0, click.Argument(["environment"], metavar="ENV"))
    return DottedCommand(mode, callback=run, params=parameters, help=summary, sections=SECTIONS)


def run_commands_of(kind: type[Modes]) -> None:
    """Run the command line of a class, for `HermesAgentBaseEnv.cli`. Exits."""
    run_as_program(lambda runtime, _: kind)


def run_as_program(find_class: FindClass) -> None:
    """Run the command line as a program, with the options that `hermes-rl` itself has. Exits."""
    group = make_group(find_class, takes_name=False)
    group.params += [
        click.Option(["-v", "--verbose"], count=True, help="Log more: -v progress, -vv everything."),
        click.Option(["--traceback"], is_flag=True, help="Also show the tracebacks of expected errors."),
    ]
    group.callback = click.pass_context(_store_verbosity)
    group()


def _store_verbosity(ctx: click.Context, /, verbose: int, traceback: bool) -> None:
    ctx.obj = verbose


def _run(ctx: click.Context, mode: str, find_class: FindClass, name: str | None, config: Path | None) -> None:
    async def main(runtime: Runtime) -> int:
        kind = find_class(runtime, name)  # raises ConfigError if a package is not installed
        logger = logging.getLogger("atroposlib")
        logger.handlers = logging.getLogger("hermes_core").handlers
        logger.setLevel(logging.getLogger("hermes_core").level)
        from atroposlib.envs import base

        base.logger.setLevel(logging.NOTSET)  # atroposlib sets DEBUG at import
        env = _make_environment(ctx, kind, mode, config, runtime)
        if mode == "process":
            await env.process_manager()
        elif mode == "serve":
            await env.env_manager()
        else:
            await env.evaluate_manager()
        outcome = env.outcome(mode)
        say(json.dumps({"mode": mode, **outcome}))
        return EXIT_INCOMPLETE if outcome.get("groups_short") else 0

    ctx.exit(finish(ctx, main))


def _make_environment(ctx: click.Context, kind: type[Modes], mode: str, path: Path | None, runtime: Runtime) -> Modes:
    """Return an environment. The command line overrides the file, which overrides `config_init`."""
    default_config, default_servers = kind.config_init()
    sections = read_config(path, SECTIONS, lists=("openai",))
    config_class = type(default_config)
    values = {
        **default_config.model_dump(exclude_unset=True),
        **_defaults_of_mode(kind, mode),
        **sections["env"],
    }
    settings = merge_options(values, find_dotted_options(ctx, "env"), config_class)
    config = validate_data(config_class, settings, f"environment {kind.name!r}")
    return kind(config, _servers(ctx, default_servers, sections["openai"]), runtime=runtime)


def _defaults_of_mode(kind: type[Modes], mode: str) -> dict[str, Any]:
    if mode == "process":
        path = f"data/{kind.name or 'groups'}.jsonl"
        return {"ensure_scores_are_not_same": False, "include_messages": True, "data_path_to_save_groups": path}
    return {"data_dir_to_save_evals": f"data/{kind.name or 'groups'}-eval"} if mode == "evaluate" else {}


def _servers(ctx: click.Context, defaults: Any, section: Any) -> list[Any]:
    """Return the servers of the file, or else of `config_init`. `--openai.KEY` overrides a setting if there is only one
    server.

    Raises:
        ConfigError: there are several servers, and `--openai.KEY` was used.
        UnknownNameError: a key does not exist.
    """
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    from hermes_atropos.servers import default_server

    base = defaults if isinstance(defaults, list) else [defaults]
    first = base[0] if base and isinstance(base[0], APIServerConfig) else default_server()
    if isinstance(section, list) and len(section) != 1:
        listed = [{**first.model_dump(), **server} for server in section]
    elif section or len(base) == 1:
        listed = [{**first.model_dump(), **(section[0] if isinstance(section, list) else section)}]
    else:
        listed = [server.model_dump() for server in base]
    options = find_dotted_options(ctx, "openai")
    if options and len(listed) != 1:
        raise ConfigError(
            f"--openai.… is for one server, and there are {len(listed)}", hint="write the settings in the file"
        )
    for server in listed:
        for key in (*server, *options):
            if key not in APIServerConfig.model_fields:
                raise UnknownNameError("key", key, APIServerConfig.model_fields, where="of openai")
    return [
        validate_data(APIServerConfig, merge_options(server, options, APIServerConfig), "openai") for server in listed
    ]
