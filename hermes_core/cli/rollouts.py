"""The commands `rollout`, `validate` and `rescore`: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hermes_core.cli.exits import EXIT_BROKEN, EXIT_INCOMPLETE
from hermes_core.cli.options import DottedCommand, dotted, merged, read_config
from hermes_core.cli.report import Failures, rescoring_text, summary_text, validation_text
from hermes_core.cli.support import finish, terminal_width
from hermes_core.envs.store import TRAJECTORIES
from hermes_core.envs.summary import RunSummary
from hermes_core.errors import FailureKind, UnknownNameError, UsageError
from hermes_core.printing import say

if TYPE_CHECKING:
    from hermes_core.envs.rescore import Rescoring
    from hermes_core.envs.validate import Validation
    from hermes_core.runtime import Runtime

Command = Callable[..., Any]

_AS_BEFORE = ("backend", "profile")
"""What a rescoring takes from the run, unless other values are given."""

_CONFINED = {"network": "none", "process_memory": 4096}
"""The backend's settings that `--confine` sets, unless they are given."""

_OF_AGENT = ("max_turns", "temperature", "model", "base_url", "tool_call_parser")
"""The agent's settings that have an option of their own."""

_WRITTEN_ONLY = frozenset({"environment", "out", "out_dir", "resume"})
"""Defaults for what a configuration file does not set."""

_RETRIED = [kind.value for kind in FailureKind if kind is not FailureKind.CANCELLED]
"""Kinds of failures that `--retry-failed` takes. Cancelled rollouts are always repeated."""

RUNS = "runs"
"""Where a run gets its own folder if none is given."""

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _at_least_one(ctx: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise click.BadParameter(f"{value} is less than 1")
    return value


def _folder(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value == "":
        raise click.BadParameter("the name is empty")
    return None if value is None else Path(value)


RUN_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option("--backend", metavar="NAME", help="Backend that makes the sandboxes [local]."),
    click.option("--profile", metavar="NAME", help="Profile from HERMES_PROFILES_FILE [its default]."),
    click.option(
        "--isolation",
        metavar="LEVEL",
        help="Isolation level: shared, user, namespace, private-root or dedicated [user].",
    ),
    click.option(
        "--allow-unisolated",
        is_flag=True,
        default=None,  # not False, which would override the file's
        help="Accept a level below the minimum of the environment or the agent.",
    ),
    click.option(
        *("--confine",),
        is_flag=True,
        help="Give commands no network, and at most 4 GiB of memory per process.",
    ),
    click.option("--concurrency", type=int, metavar="C", help="How many run at the same time [4]."),
    click.option("--seed", type=int, metavar="S", help="Random seed."),
    click.option(
        "--config",
        type=_FILE,
        metavar="FILE.yaml",
        help="Configuration file with sections env, agent, backend and run.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)
"""Options that all commands have which work in sandboxes."""


def _number(name: str, unit: str, summary: str) -> Callable[[Command], Command]:
    return click.option(name, type=float, metavar=unit, help=summary)


_STOP_ON_INFRA = _number(
    *("--stop-on-infra", "RATE"),
    "Stop when more than this share (0 to 1) of the last 20 rollouts were infra, image or model failures.",
)


def _run_options(command: Command) -> Command:
    """Add the options that all three commands have."""
    for option in reversed((*RUN_OPTIONS, _STOP_ON_INFRA)):
        command = option(command)
    return command


_items_option = click.option(
    "--items", type=int, callback=_at_least_one, metavar="N", help="Use at most N items [all]."
)


_prefetch_option = click.option(
    "--prefetch", type=int, metavar="K", help="Make the images of K groups ahead, while others run [4]."
)

_mcp_option = click.option(
    "--mcp", type=_FILE, metavar="FILE", help="Offer the tools of these MCP servers: JSON or YAML, key mcpServers."
)

_progress_option = click.option(
    "--progress",
    default="auto",
    metavar="FORM",
    help="Progress on standard error: auto, plain, json, none, or json:FD for a descriptor [auto].",
)


@click.command(cls=DottedCommand)
@click.argument("environment", metavar="ENV")
@click.option("--agent", metavar="NAME", help="Agent: model, oracle, nop, cheat:NAME, or one of a plugin [model].")
@_items_option
@_prefetch_option
@click.option("--group-size", type=int, metavar="G", help="Number of rollouts per item [1].")
@click.option("--max-turns", type=int, metavar="N", help="Maximum number of model answers per rollout [30].")
@_number("--temperature", "T", "Sampling temperature [1.0].")
@click.option("--model", metavar="M", help="Name of the model, as its endpoint knows it.")
@click.option(
    "--base-url", metavar="URL", help="OpenAI-compatible endpoint; its key is read from OPENAI_API_KEY [OpenAI's own]."
)
@click.option(
    *("--parser", "tool_call_parser"),
    metavar="NAME",
    help="Parser of the model's tool calls, or auto. Rollouts are then token-exact, with a vLLM or SGLang server.",
)
@_number("--rollout-timeout", "S", "Agent time limit in seconds; what was done by then is scored [3600].")
@_number("--model-timeout", "S", "Total time in seconds that a rollout may wait for the model [3600].")
@_number(
    "--deadline",
    "S",
    "Time limit in seconds for a whole rollout, release included [all limits together, and 600 more].",
)
@_number("--max-cost", "USD", "Begin no rollout once the model's tokens have cost this much; needs --agent.prices.")
@_mcp_option
@click.option("--quarantine", metavar="FILE", help="Leave out the items in this file, which `validate` wrote.")
@click.option("--out", callback=_folder, metavar="DIR", help="Directory for the records [runs/ENV-TIME].")
@click.option("--sink", multiple=True, metavar="NAME[=TARGET]", help="Also send the records to this sink of a plugin.")
@click.option("--resume", is_flag=True, help="Continue the run in --out DIR.")
@click.option(
    "--retry-failed",
    multiple=True,
    type=click.Choice(_RETRIED),
    help="Like --resume, but repeat only failures of this kind (can be given more than once).",
)
@_progress_option
@_run_options
@click.pass_context
def rollout(ctx: click.Context, /, environment: str, **given: Any) -> None:
    """Run an agent on the items of ENV, and score what it did.

    Exits with 0 if every rollout ended without a failure, 3 if some failed, 2 for wrong use, and 130 after Ctrl-C.
    """
    from hermes_core.cli.progress import progress_for
    from hermes_core.envs.runner import run_rollouts
    from hermes_core.view.index import Run

    failures = Failures()
    folder: Path | None = given["out"]

    def begun(path: Path) -> None:
        nonlocal folder
        if folder is None:
            say(f"records go to {path}", err=True)
        folder = path

    def interrupted() -> str:
        resumable = folder is not None and (folder / TRAJECTORIES).exists()
        return f"interrupted; `--out {folder} --resume` goes on with it" if resumable else "interrupted"

    async def main(runtime: Runtime) -> RunSummary:
        config = read_config(given["config"])
        agent = _agent_name(config, given)
        return await run_rollouts(
            runtime,
            environment,
            agent,
            env=_env(ctx, runtime, environment, config["env"], given),
            settings=agent_settings_of(ctx, runtime, agent, config["agent"], given),
            out_dir=given["out"],
            runs_dir=RUNS,
            on_folder=begun,
            resume=given["resume"] or bool(given["retry_failed"]),
            retry_failed=[FailureKind(kind) for kind in given["retry_failed"]] or None,
            sinks=given["sink"],
            on_record=failures.add,
            progress=progress_for(given["progress"], sys.stderr),
            **options_of(ctx, runtime, config, given),
        )

    summary = finish(ctx, main, interrupted)
    text = json.dumps(summary.to_dict(), indent=2) if given["as_json"] else None
    say(text or summary_text(summary, failures, terminal_width()))
    if folder is not None and (folder / TRAJECTORIES).exists():
        Run(folder)  # writes the index, so that `show` and `view` need not read tens of thousands of records first
    ctx.exit(0 if summary.complete else EXIT_INCOMPLETE)


@click.command(cls=DottedCommand, sections=("env", "backend"))
@click.argument("environment", metavar="ENV")
@_items_option
@_prefetch_option
@click.option(
    "--repeat",
    type=int,
    callback=_at_least_one,
    default=1,
    metavar="N",
    help="Number of rollouts of the reference solution, and of doing nothing, per item and backend [1].",
)
@_mcp_option
@click.option("--cheats", is_flag=True, help="Also try every cheat of ENV once.")
@click.option("--cheat", "named_cheats", multiple=True, metavar="NAME", help="Also try this cheat (more than once).")
@click.option(
    "--backends",
    metavar="A,B",
    help="Several backends, whose results must be equal; NAME:PROFILE names a profile of one.",
)
@click.option("--out", callback=_folder, metavar="DIR", help="Directory for the results [runs/validate-ENV-TIME].")
@click.option("--resume", is_flag=True, help="Continue the validation in --out DIR.")
@_progress_option
@_run_options
@click.pass_context
def validate(ctx: click.Context, /, environment: str, repeat: int, **given: Any) -> None:
    """Check every item of ENV: the reference solution must score 1.0, and doing nothing 0.0, every time.

    No cheat may score, and all backends must give the same. Writes a table, and a quarantine file with the items that
    are not sound, for `rollout --quarantine FILE`.

    Exits with 0 if every item is sound, 1 if one is not, 3 if not everything could be tried, 2 for wrong use, and 130
    after Ctrl-C.
    """
    from hermes_core.cli.progress import progress_for
    from hermes_core.envs.validate import validate as run_validation

    folder: Path | None = given["out"]
    known: list[Validation] = []

    def begun(path: Path) -> None:
        nonlocal folder
        if folder is None:
            say(f"results go to {path}", err=True)
        folder = path

    def interrupted() -> str:
        text = "".join(f"{validation_text(each, terminal_width())}\n" for each in known)
        return f"{text}interrupted" + (f"; `--out {folder} --resume` goes on with it" if known and folder else "")

    async def main(runtime: Runtime) -> Validation:
        config = read_config(given["config"])
        common, backends = _places(ctx, runtime, config, given)
        return await run_validation(
            runtime,
            environment,
            env=_env(ctx, runtime, environment, config["env"], given),
            repeat=repeat,
            cheats=given["named_cheats"] or given["cheats"],
            backends=backends,
            out_dir=given["out"],
            runs_dir=RUNS,
            resume=given["resume"],
            on_folder=begun,
            on_broken_off=known.append,
            progress=lambda backend: progress_for(given["progress"], sys.stderr, backend),
            **common,
        )

    outcome = finish(ctx, main, interrupted)
    say(json.dumps(outcome.to_dict(), indent=2) if given["as_json"] else validation_text(outcome, terminal_width()))
    ctx.exit(EXIT_BROKEN if outcome.findings else 0 if outcome.complete else EXIT_INCOMPLETE)


@click.command(cls=DottedCommand, sections=("env", "backend"))
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--environment", metavar="ENV", help="Environment that scores; nothing that the run names is used then.")
@click.option(
    *("--trust-run",), is_flag=True, help="Use environment, backend and their settings as DIR/run.json names them."
)
@_run_options
@click.pass_context
def rescore(ctx: click.Context, /, directory: Path, **given: Any) -> None:
    """Score the recorded patches of the run in DIR again, and write DIR/rescored.jsonl.

    Settings can name programs, so those of DIR/run.json are used only with --trust-run. Without it, name the
    environment and the backend as for `rollout`.

    Exits with 0 if every patch got the same reward again, and 3 if one did not.
    """
    from hermes_core.cli.progress import progress_on
    from hermes_core.envs.rescore import rescore as run_rescore
    from hermes_core.envs.rescore import run_configuration_of

    async def main(runtime: Runtime) -> Rescoring:
        config = read_config(given["config"])
        trusted = {"environment": given["environment"], "trust_run": given["trust_run"]}
        ran = run_configuration_of(directory, **trusted)
        return await run_rescore(
            runtime,
            directory,
            env=_env(ctx, runtime, ran["environment"], config["env"], given),
            **trusted,
            progress=progress_on(sys.stderr),
            **options_of(ctx, runtime, config, {**given, **{key: given[key] or ran.get(key) for key in _AS_BEFORE}}),
        )

    outcome = finish(ctx, main)
    say(json.dumps(outcome.to_dict(), indent=2) if given["as_json"] else rescoring_text(outcome))
    ctx.exit(0 if outcome.agrees else EXIT_INCOMPLETE)


# ---------------------------------------------------------------------- from the command line to arguments


def _agent_name(config: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> str:
    return str(_first(given["agent"], config["agent"].get("name"), "model"))


def _first(*values: Any) -> Any:
    """Return the first value that is given."""
    return next(value for value in values if value is not None)


def _env(
    ctx: click.Context, runtime: Runtime, environment: str, section: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the environment's configuration: the file's, then `--env.…`, then `--items`."""
    model = runtime.environment_class(environment).config_class
    values = merged(section, dotted(ctx, "env"), model)
    return {**values, "max_items": given["items"]} if given.get("items") else values


def agent_settings_of(
    ctx: click.Context, runtime: Runtime, agent: str, section: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the agent's settings: the file's, then `--agent.…`, then the options of the same names."""
    values = {key: value for key, value in section.items() if key != "name"}
    flags = {key: given[key] for key in _OF_AGENT if given.get(key) is not None}
    return {**merged(values, dotted(ctx, "agent"), runtime.agent_config_class(agent)), **flags}


def _places(
    ctx: click.Context, runtime: Runtime, config: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the options that are the same on all backends, and those of each.

    With several backends, a setting goes to those that have it.

    Raises:
        UsageError: a backend is named twice, or in two ways.
        UnknownNameError: there is no such backend, or a setting that none of them has.
    """
    if given["backends"] is None:
        options = options_of(ctx, runtime, config, given)
        return options, {options["backend"]: {}}
    labels = [part.strip() for part in given["backends"].split(",") if part.strip()]
    if given["backend"] is not None or not labels or len(set(labels)) < len(labels):
        raise UsageError("--backends names each backend once, in place of --backend", hint="--backends local,docker")
    written = [*config["backend"], *dotted(ctx, "backend")]
    models = [runtime.backend(label.partition(":")[0]).config_class for label in labels]
    known = [frozenset(model.model_fields) - {*model.unsupported, "name"} for model in models]
    for name in {key.partition(".")[0] for key in written} - {"name"}:
        if name not in (every := frozenset().union(*known)):
            raise UnknownNameError("setting", name, every, where=f"of the backends {', '.join(labels)}")
    places = {}
    for label, fields in zip(labels, known, strict=True):
        backend, _, profile = label.partition(":")
        own = {**given, "backend": backend, "profile": profile or given["profile"]}
        places[label] = options_of(ctx, runtime, config, own, known=fields)
    differing = ("backend", "profile", "backend_config")
    common = {key: value for key, value in places[labels[0]].items() if key not in differing}
    return common, {
        label: {key: options[key] for key in differing if key in options} for label, options in places.items()
    }


def options_of(
    ctx: click.Context,
    runtime: Runtime,
    config: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the fields of `RunOptions`: the file's, then the flags.

    Args:
        known: the only settings of the backend that are taken; None is all that are given.

    Raises:
        UnknownNameError: the file's section `run` has an unknown key.
    """
    from hermes_core.envs.options import RunOptions

    for key in config["run"].keys() - RunOptions.model_fields.keys():
        place = {"agent": "`agent` is a section of its own: write `agent: NAME`, or `agent: {name: NAME, …}`"}
        hint = place.get(key) or ("give it on the command line" if key in _WRITTEN_ONLY else None)
        raise UnknownNameError("key", key, RunOptions.model_fields, where="of the run", hint=hint)
    backend = str(_first(given["backend"], config["backend"].get("name"), config["run"].get("backend"), "local"))
    section = {key: value for key, value in config["backend"].items() if key != "name"}
    written = dotted(ctx, "backend")
    if known is not None:
        section = {key: value for key, value in section.items() if key in known}
        written = {key: value for key, value in written.items() if key.partition(".")[0] in known}
    options = {**config["run"], "backend": backend}
    if section or written or given["confine"]:
        confined = _CONFINED if given["confine"] else {}
        options["backend_config"] = confined | merged(section, written, runtime.backend(backend).config_class)
    return {**options, **{name: given[name] for name in RunOptions.model_fields if given.get(name) is not None}}
