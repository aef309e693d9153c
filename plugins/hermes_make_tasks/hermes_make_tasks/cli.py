"""The command `make-tasks`: parse, call, print. Only light modules are imported before it runs."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hermes_core import (
    AgentSettings,
    CanCheckEndpoint,
    RunCommand,
    RunOptions,
    Runtime,
    UnknownNameError,
    UsageError,
    carry_out,
    choose_agent,
    collect_settings,
    progress_for,
    progress_option,
    say,
    setting_option,
    validate_data,
)
from hermes_make_tasks.wanted import Wanted

if TYPE_CHECKING:
    from hermes_make_tasks.making import MakingOutcome

EXIT_INCOMPLETE = 3

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NAMED = 10


@click.command("make-tasks", cls=RunCommand)
@click.argument("repo", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the dataset; an interrupted run goes on there.",
)
@setting_option(Wanted, "count", metavar="N")
@setting_option(Wanted, "ref", metavar="NAME")
@setting_option(Wanted, "name", metavar="OWNER__NAME")
@setting_option(Wanted, "python", metavar="VERSION")
@setting_option(Wanted, "requirements", type=_FILE, multiple=False, metavar="FILE")
@setting_option(Wanted, "install", metavar="COMMAND")
@setting_option(Wanted, "pythonpath", metavar="DIRS")
@setting_option(Wanted, "tests", metavar="PATH")
@setting_option(Wanted, "test_command", metavar="COMMAND")
@click.option("--kinds", metavar="KIND,…", help="Kinds of bugs; -KIND leaves one out [all].")
@click.option("--list-kinds", is_flag=True, help="List the kinds of bugs, and exit.")
@setting_option(Wanted, "max_broken", metavar="N")
@setting_option(Wanted, "runs", metavar="N")
@setting_option(Wanted, "per_function", metavar="N")
@setting_option(Wanted, "candidates", metavar="N")
@setting_option(Wanted, "test_timeout_s", "--test-timeout", metavar="S")
@click.option(
    "--statement",
    type=click.Choice(["template", "model"]),
    help="Who writes the problem statements [model if --model is given].",
)
@setting_option(AgentSettings, "model", metavar="NAME")
@setting_option(AgentSettings, "base_url", metavar="URL")
@progress_option
@click.pass_context
def make_tasks(ctx: click.Context, /, repo: str | None, out: Path | None, **given: Any) -> None:
    """Make SWE-smith tasks of the repository REPO: a path, a git bundle, or a URL.

    Bugs are put into its functions. A bug is kept if it breaks up to --max-broken tests that pass each time without it.
    The repository's code runs in slots only. The dataset is for the environment `swe-smith`:

    \b
    hermes-rl make-tasks REPO --out DIR
    hermes-rl validate swe-smith --env.dataset_name=DIR/tasks.jsonl --env.repo_base_url=DIR

    Exits with 0 if there are as many tasks as asked for, 3 if there are fewer, 2 for wrong use, and 130 after Ctrl-C.
    """
    from hermes_make_tasks.making import make_tasks as make

    if given["list_kinds"]:
        _list_kinds(given["as_json"])
        return
    if repo is None or out is None:
        raise click.UsageError("give REPO and --out DIR")
    display = progress_for(given["progress"], sys.stderr)

    async def work(runtime: Runtime, options: RunOptions) -> MakingOutcome:
        wanted = _read_wanted(ctx, repo, options)
        if wanted.statement == "template":
            return await make(runtime, options, wanted, out, progress=display)
        agent = runtime.agent("model", choose_agent(ctx, runtime, "model"))
        if isinstance(agent, CanCheckEndpoint):
            await agent.check_endpoint()
        return await make(runtime, options, wanted, out, writer=agent, progress=display)

    command = f"`hermes-rl make-tasks {shlex.quote(repo)} --out {shlex.quote(str(out))} …` goes on with it"
    outcome = carry_out(ctx, work, lambda: f"interrupted; {command}")
    say(json.dumps(outcome.to_dict(), indent=2) if given["as_json"] else _text(outcome))
    ctx.exit(0 if outcome.complete else EXIT_INCOMPLETE)


def _read_wanted(ctx: click.Context, repo: str, options: RunOptions) -> Wanted:
    """Return the settings that the command line gives.

    Raises:
        UsageError: a value is wrong.
    """
    from hermes_swe_smith.repos import TestCommand

    from hermes_make_tasks.origin import check_ref

    given, params = collect_settings(ctx, Wanted), ctx.params
    made: dict[str, Any] = {
        "repo": str(Path(repo).absolute()) if Path(repo).exists() else repo,
        "kinds": _kinds(params["kinds"]),
        "seed": options.seed or 0,
        "statement": params["statement"] or ("model" if params["model"] else "template"),
        "model": params["model"],
    }
    if "requirements" in given:
        lines = given["requirements"].read_text(encoding="utf-8").splitlines()
        made["requirements"] = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    wanted = validate_data(Wanted, {**given, **made}, "the command line")
    check_ref(wanted.ref)
    if not re.fullmatch(r"((>=)?\d+\.\d+)?", wanted.python):
        raise UsageError(f"--python {wanted.python!r} is not a version", hint="write 3.11, or >=3.9")
    if wanted.name is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", wanted.name, re.ASCII):
        raise UsageError(f"--name {wanted.name!r} can't be a name", hint="use letters, digits, '.', '_' and '-'")
    try:
        TestCommand.parse(wanted.test_command)
    except ValueError as error:
        raise UsageError(f"--test-command: {error}", hint="write `python -m pytest …`") from error
    return wanted


def _all_kinds() -> dict[str, str]:
    from hermes_make_tasks.candidates import COMBINED
    from hermes_make_tasks.kinds import kinds

    return {**kinds(), **COMBINED}


def _kinds(text: str | None) -> tuple[str, ...]:
    """Return the kinds that the text names, or all if it names none, without the kinds after a `-`.

    Raises:
        UnknownNameError: there is no such kind.
    """
    known = _all_kinds()
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    for word in words:
        if word.removeprefix("-") not in known:
            raise UnknownNameError("kind of bug", word.removeprefix("-"), known)
    named = [word for word in words if not word.startswith("-")]
    without = {word[1:] for word in words if word.startswith("-")}
    return tuple(kind for kind in (named or known) if kind not in without)


def _list_kinds(as_json: bool) -> None:
    known = _all_kinds()
    if as_json:
        say(json.dumps([{"kind": kind, "summary": summary} for kind, summary in known.items()], indent=2))
        return
    width = max(map(len, known))
    say("\n".join(f"{kind.ljust(width)}  {summary}" for kind, summary in known.items()))


def _text(outcome: MakingOutcome) -> str:
    """Return the outcome for people."""
    lines = [
        f"{outcome.tasks} of {outcome.wanted} tasks of {outcome.repo} in {outcome.folder}, {outcome.elapsed_s:.0f} s"
    ]
    for title, counts in (
        ("kinds", outcome.kinds),
        ("difficulty", outcome.levels),
        ("changes tried", outcome.outcomes),
    ):
        if counts:
            lines.append(f"{title}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}")
    lines.append(f"tests that pass each time: {outcome.stable}")
    for title, names in (
        ("flaky tests, which are in no task", outcome.flaky),
        ("sources left out", outcome.unreadable),
        ("test files that can't be collected", outcome.broken),
    ):
        if names:
            more = [f"… and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
            lines += [f"{title}:", *(f"  {name}" for name in [*names[:_NAMED], *more])]
    if not outcome.complete:
        lines.append(
            "nothing is left to try: raise --per-function and --candidates in another --out, or add kinds of bugs"
        )
    return "\n".join(lines)
