"""The commands `rollout`, `validate` and `rescore`: parse arguments, call the library, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.model import ExactSettings
from hermes_core.cli.exits import EXIT_BROKEN, EXIT_INCOMPLETE
from hermes_core.cli.options import (
    SECTIONS,
    collect_settings,
    find_dotted_options,
    merge_options,
    read_config,
    setting_option,
)
from hermes_core.cli.progress import progress_for, progress_on, progress_option
from hermes_core.cli.report import Failures, rescoring_text, summary_text, validation_text
from hermes_core.cli.run_command import FILE, Config, RunCommand, agent_settings_of, first, options_of
from hermes_core.cli.support import finish, terminal_width
from hermes_core.environment import EnvironmentConfig
from hermes_core.errors import FailureKind, UnknownNameError, UsageError
from hermes_core.printing import say
from hermes_core.records.store import TRAJECTORIES
from hermes_core.records.summary import RunSummary
from hermes_core.runs.options import RunOptions

if TYPE_CHECKING:
    from hermes_core.runtime import Runtime
    from hermes_core.soundness.rescore import Rescoring
    from hermes_core.soundness.validate import Validation

_AS_BEFORE = ("backend", "profile")
"""The options that a rescoring takes from the run unless other values are given."""

_OF_BACKEND = ("backend", "profile", "backend_config")
"""The options that differ between the backends of a validation."""

_RETRIED = [kind.value for kind in FailureKind if kind is not FailureKind.CANCELLED]
"""The kinds of failures that `--retry-failed` accepts. Cancelled rollouts are always repeated."""

RUNS = "runs"
"""The parent folder of a run's folder, if no folder is given."""


def _at_least_one(ctx: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise click.BadParameter(f"{value} is less than 1")
    return value


def _folder(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    if value == "":
        raise click.BadParameter("the name is empty")
    return None if value is None else Path(value)


_items_option = setting_option(EnvironmentConfig, "max_items", "--items", callback=_at_least_one, metavar="N")
_prefetch_option = setting_option(RunOptions, "prefetch", metavar="N")
_mcp_option = setting_option(RunOptions, "mcp", type=FILE, metavar="FILE")
_stop_on_infra_option = setting_option(RunOptions, "stop_on_infra", metavar="RATE")


@click.command(cls=RunCommand, sections=SECTIONS)
@click.argument("environment", metavar="ENV")
@click.option("--agent", metavar="NAME", help="Agent: model, oracle, nop, cheat:NAME, or one of a plugin [model].")
@_items_option
@_prefetch_option
@setting_option(RunOptions, "group_size", metavar="N")
@setting_option(AgentSettings, "max_turns", metavar="N")
@setting_option(AgentSettings, "temperature", metavar="T")
@setting_option(AgentSettings, "model", metavar="NAME")
@setting_option(AgentSettings, "base_url", metavar="URL")
@setting_option(ExactSettings, "tool_call_parser", "--parser", metavar="NAME")
@setting_option(RunOptions, "rollout_timeout", metavar="S")
@setting_option(RunOptions, "model_timeout", metavar="S")
@setting_option(RunOptions, "deadline", metavar="S")
@setting_option(RunOptions, "max_cost", metavar="USD")
@_mcp_option
@setting_option(RunOptions, "quarantine", metavar="FILE")
@click.option("--out", callback=_folder, metavar="DIR", help="Directory for the records [runs/ENV-TIME].")
@click.option("--sink", multiple=True, metavar="NAME[=TARGET]", help="Also send the records to this sink of a plugin.")
@click.option("--resume", is_flag=True, help="Continue the run in --out DIR.")
@click.option(
    "--retry-failed",
    multiple=True,
    type=click.Choice(_RETRIED),
    help="Like --resume, but repeat only failures of this kind (can be given more than once).",
)
@progress_option
@_stop_on_infra_option
@click.pass_context
def rollout(ctx: click.Context, /, environment: str, **given: Any) -> None:
    """Run an agent on the items of ENV, and score what it did.

    Exits with 0 if every rollout ended without a failure, 3 if some failed, 2 for wrong use, and 130 after Ctrl-C.
    """
    from hermes_core.records.index import RecordedRun
    from hermes_core.runs.runner import run_rollouts

    failures = Failures()
    folder: Path | None = given["out"]

    def report_folder(path: Path) -> None:
        nonlocal folder
        if folder is None:
            say(f"records go to {path}", err=True)
        folder = path

    def describe_interruption() -> str:
        resumable = folder is not None and (folder / TRAJECTORIES).exists()
        return f"interrupted; `--out {folder} --resume` goes on with it" if resumable else "interrupted"

    async def main(runtime: Runtime) -> RunSummary:
        config = read_config(given["config"])
        agent = str(first(given["agent"], config["agent"].get("name"), "model"))
        return await run_rollouts(
            runtime,
            environment,
            agent,
            env=_env(ctx, runtime, environment, config["env"]),
            settings=agent_settings_of(ctx, runtime, agent, config["agent"]),
            out_dir=given["out"],
            runs_dir=RUNS,
            on_folder=report_folder,
            resume=given["resume"] or bool(given["retry_failed"]),
            retry_failed=[FailureKind(kind) for kind in given["retry_failed"]] or None,
            sinks=given["sink"],
            on_record=failures.add,
            progress=progress_for(given["progress"], sys.stderr),
            **options_of(ctx, runtime, config),
        )

    summary = finish(ctx, main, describe_interruption)
    text = json.dumps(summary.to_dict(), indent=2) if given["as_json"] else None
    say(text or summary_text(summary, failures, terminal_width()))
    if folder is not None and (folder / TRAJECTORIES).exists():
        # This writes the index, so that `show` and `view` need not read tens of thousands of records first.
        RecordedRun(folder)
    ctx.exit(0 if summary.complete else EXIT_INCOMPLETE)


@click.command(cls=RunCommand, sections=("env", "backend"))
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
@progress_option
@_stop_on_infra_option
@click.pass_context
def validate(ctx: click.Context, /, environment: str, repeat: int, **given: Any) -> None:
    """Check every item of ENV: the reference solution must score 1.0, and doing nothing 0.0, every time.

    No cheat may score, and all backends must give the same. Writes a table, and a quarantine file with the items that
    are not sound, for `rollout --quarantine FILE`.

    Exits with 0 if every item is sound, 1 if one is not, 3 if not everything could be tried, 2 for wrong use, and 130
    after Ctrl-C.
    """
    from hermes_core.soundness.validate import validate as run_validation

    folder: Path | None = given["out"]
    outcomes: list[Validation] = []

    def report_folder(path: Path) -> None:
        nonlocal folder
        if folder is None:
            say(f"results go to {path}", err=True)
        folder = path

    def describe_interruption() -> str:
        text = "".join(f"{validation_text(outcome, terminal_width())}\n" for outcome in outcomes)
        return f"{text}interrupted" + (f"; `--out {folder} --resume` goes on with it" if outcomes and folder else "")

    async def main(runtime: Runtime) -> Validation:
        config = read_config(given["config"])
        common, backends = _places(ctx, runtime, config, given["backends"])
        return await run_validation(
            runtime,
            environment,
            env=_env(ctx, runtime, environment, config["env"]),
            repeat=repeat,
            cheats=given["named_cheats"] or given["cheats"],
            backends=backends,
            out_dir=given["out"],
            runs_dir=RUNS,
            resume=given["resume"],
            on_folder=report_folder,
            on_broken_off=outcomes.append,
            progress=lambda backend: progress_for(given["progress"], sys.stderr, backend),
            **common,
        )

    outcome = finish(ctx, main, describe_interruption)
    say(json.dumps(outcome.to_dict(), indent=2) if given["as_json"] else validation_text(outcome, terminal_width()))
    ctx.exit(EXIT_BROKEN if outcome.findings else 0 if outcome.complete else EXIT_INCOMPLETE)


@click.command(cls=RunCommand, sections=("env", "backend"))
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--environment", metavar="ENV", help="Environment that scores; nothing that the run names is used then.")
@click.option(
    *("--trust-run",), is_flag=True, help="Use environment, backend and their settings as DIR/run.json names them."
)
@_stop_on_infra_option
@click.pass_context
def rescore(ctx: click.Context, /, directory: Path, **given: Any) -> None:
    """Score the recorded patches of the run in DIR again, and write DIR/rescored.jsonl.

    Settings can name programs, so those of DIR/run.json are used only with --trust-run. Without it, name the
    environment and the backend as for `rollout`.

    Exits with 0 if every patch got the same reward again, and 3 if one did not.
    """
    from hermes_core.soundness.rescore import rescore as run_rescore
    from hermes_core.soundness.rescore import run_configuration_of

    async def main(runtime: Runtime) -> Rescoring:
        config = read_config(given["config"])
        trusted = {"environment": given["environment"], "trust_run": given["trust_run"]}
        ran = run_configuration_of(directory, **trusted)
        return await run_rescore(
            runtime,
            directory,
            env=_env(ctx, runtime, ran["environment"], config["env"]),
            **trusted,
            progress=progress_on(sys.stderr),
            **options_of(ctx, runtime, config, **{key: given[key] or ran.get(key) for key in _AS_BEFORE}),
        )

    outcome = finish(ctx, main)
    say(json.dumps(outcome.to_dict(), indent=2) if given["as_json"] else rescoring_text(outcome))
    ctx.exit(0 if outcome.agrees else EXIT_INCOMPLETE)


# ---------------------------------------------------------------------- from the command line to arguments


def _env(ctx: click.Context, runtime: Runtime, environment: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's configuration: the file's section, overridden by `--env.…`, then by `--items`."""
    model = runtime.environment_class(environment).config_class
    return {
        **merge_options(section, find_dotted_options(ctx, "env"), model),
        **collect_settings(ctx, EnvironmentConfig),
    }


def _places(
    ctx: click.Context, runtime: Runtime, config: Config, backends: str | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the options that all backends share, and the options of each backend by its name.

    With several backends, a setting goes to the backends that have this setting.

    Args:
        backends: the value of `--backends`.

    Raises:
        UsageError: a backend is named twice, or in two ways.
        UnknownNameError: there is no such backend, or none of the backends has a given setting.
    """
    if backends is None:
        options = options_of(ctx, runtime, config)
        return options, {options["backend"]: {}}
    labels = [part.strip() for part in backends.split(",") if part.strip()]
    if ctx.params["backend"] is not None or not labels or len(set(labels)) < len(labels):
        raise UsageError("--backends names each backend once, in place of --backend", hint="--backends local,docker")
    places: dict[str, dict[str, Any]] = {}
    settings: set[str] = set()
    for label in labels:
        backend, _, profile = label.partition(":")
        model = runtime.backend(backend).config_class
        known = frozenset(model.model_fields) - {*model.unsupported, "name"}
        places[label] = options_of(ctx, runtime, config, known=known, backend=backend, profile=profile or None)
        settings |= known
    for name in {key.partition(".")[0] for key in (*config["backend"], *find_dotted_options(ctx, "backend"))} - {
        "name"
    }:
        if name not in settings:
            raise UnknownNameError("setting", name, settings, where=f"of the backends {', '.join(labels)}")
    common, *_ = places.values()
    return (
        {key: value for key, value in common.items() if key not in _OF_BACKEND},
        {label: {key: options[key] for key in _OF_BACKEND if key in options} for label, options in places.items()},
    )
