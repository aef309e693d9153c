"""The command line: parses arguments, calls the library and prints. Imports little but click, so that `--help` is
instant."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

import click

from hermes_core.cli.exits import EXIT_BROKEN, EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_USAGE, exit_code
from hermes_core.errors import HermesError, InfraError, UnknownNameError, UsageError
from hermes_core.printing import printable, say
from hermes_core.version import __version__

if TYPE_CHECKING:
    from hermes_core.cli.listing import Tables
    from hermes_core.cli.sandboxes import Census

ELSEWHERE = {
    "rollout": (
        "hermes_core.cli.rollouts:rollout",
        "Run an agent on the items of an environment, and score what it did.",
    ),
    "validate": (
        "hermes_core.cli.rollouts:validate",
        "Check that the reference solution scores 1.0 and doing nothing 0.0 on every item.",
    ),
    "rescore": ("hermes_core.cli.rollouts:rescore", "Score the recorded patches of a run again."),
    "show": ("hermes_core.cli.view:show", "Show a run in the terminal: its rollouts, items, tools, or one rollout."),
    "view": ("hermes_core.cli.view:view", "Open runs in Inspect's viewer, also while they run."),
    "export": ("hermes_core.cli.exports:export", "Write the rollouts of a run as a dataset, or for other tools."),
    "merge": ("hermes_core.cli.exports:merge", "Join runs into one."),
    "new": ("hermes_core.cli.new:new", "Write a plugin's package: one that works, to change from there."),
    "shell": ("hermes_core.cli.shell:shell", "Open a terminal in a sandbox."),
}
"""Commands with a module of their own, each with the line that `--help` shows for it."""


class LazyGroup(click.Group):
    """Imports the commands in `elsewhere` when they run, and turns a `HermesError` into a message and an exit code."""

    elsewhere: Mapping[str, tuple[str, str]] = ELSEWHERE

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands: the program's main purpose first, then those that describe it."""
        return [*self.elsewhere, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with this name. Imports the command's module if necessary.

        Raises:
            UnknownNameError: no command has this name; names the nearest.
        """
        if cmd_name in self.elsewhere:
            module, _, attribute = self.elsewhere[cmd_name][0].partition(":")
            command: click.Command = getattr(importlib.import_module(module), attribute)
            return command
        if cmd_name not in self.commands and not cmd_name.startswith("-"):
            return self.further_command(cmd_name, self.list_commands(ctx))
        return super().get_command(ctx, cmd_name)

    def further_command(self, name: str, known: list[str]) -> click.Command:
        """Return a command that `--help` does not list.

        Args:
            known: the commands that `--help` lists.

        Raises:
            UnknownNameError: no command has this name; names the nearest.
        """
        raise UnknownNameError("command", name, known)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one line for each command, without importing any."""
        own = {name: command.get_short_help_str(90) for name, command in self.commands.items()}
        lines = {name: line for name, (_, line) in self.elsewhere.items()} | own
        with formatter.section("Commands"):
            formatter.write_dl([(name, lines[name]) for name in self.list_commands(ctx)])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make a context as click does, but report wrong options in one line."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise _reword(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Expected errors end in a message and an exit code."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _reword(error) from error
        except KeyboardInterrupt:
            say("interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except (HermesError, ExceptionGroup) as error:
            expected = _own_errors(error)
            if not expected or ctx.find_root().params.get("traceback"):
                raise
            for one in expected:
                say(f"error: {one}", err=True)
            ctx.exit(exit_code(expected[0]))


class _WithPlugins(LazyGroup):
    """Also has the commands of plugins. Plugins are searched only for names that no built-in command has."""

    def further_command(self, name: str, known: list[str]) -> click.Command:
        """Return the command of a plugin.

        Raises:
            UnknownNameError: no command has this name, or the plugin that would have it is not in use.
            PluginError: two plugins claim it, or it can't be imported, or is no command.
        """
        from hermes_core.cli.support import plugin_command

        return plugin_command(name, known)


class _Misuse(click.ClickException):
    """Wrong options, reported in one line like every other error."""

    exit_code = EXIT_USAGE

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(printable(f"error: {self.message}"), file=file, err=file is None)


def _reword(error: click.UsageError) -> click.ClickException:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return error
    if isinstance(error, click.NoSuchOption) and error.ctx is not None and error.ctx.parent is not None:
        root = error.ctx.find_root()
        if any(error.option_name in parameter.opts for parameter in root.command.params):
            written = f"{root.command_path} {error.option_name} {error.ctx.info_name} …"
            return _Misuse(f"{error.option_name} comes before the command's name: `{written}`")
    message = " ".join(line.strip() for line in error.format_message().splitlines()).rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "hermes-rl"
    return _Misuse(f"{message[:1].lower()}{message[1:]} (`{command} --help` lists what it takes)")


def _own_errors(error: Exception) -> list[HermesError]:
    """Return the `HermesError`s in this error or exception group; an empty list if it holds any other error."""
    if isinstance(error, HermesError):
        return [error]
    if not isinstance(error, ExceptionGroup):
        return []
    parts = [_own_errors(part) for part in error.exceptions]
    return [one for part in parts for one in part] if all(parts) else []


@click.group(
    cls=_WithPlugins,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Plugins add more commands, such as atropos, conformance and make-tasks: `hermes-rl commands` lists them.",
)
@click.version_option(__version__, prog_name="hermes-rl")
@click.option("-v", "--verbose", count=True, help="Log more: -v progress, -vv everything.")
@click.option("--traceback", is_flag=True, help="Also show the tracebacks of expected errors and of failed hooks.")
@click.pass_context
def main(ctx: click.Context, verbose: int, traceback: bool) -> None:
    """Run tool-using agents in sandboxes, and score what they did there."""
    ctx.obj = verbose


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


_LISTS = {
    "plugins": ("plugin", "List plugins, what each provides, and which are not loaded."),
    "backends": ("backend", "List available backends, or what the backend NAME can do and every setting of it."),
    "envs": ("environment", "List available environments, or every setting of the environment NAME."),
    "tools": ("tool", "List available tools, toolsets and distributions, or the parameters of the tool NAME."),
    "parsers": (
        "parser",
        "List available parsers of tool calls that models write as text, or how to use the parser NAME.",
    ),
    "sinks": ("sink", "List available sinks: further places for the records of a run, or how to use the sink NAME."),
    "commands": ("command", "List the commands that plugins add, or how to use the command NAME."),
}
"""The commands that list plugins' entries: for each command, the kind of entry and the help text."""


def _add_list(command: str, what: str, summary: str) -> None:
    @_json_option
    @click.pass_context
    def show(ctx: click.Context, as_json: bool, name: str | None = None) -> None:
        _list(ctx, what, name, as_json)

    named = show if what == "plugin" else click.argument("name", required=False)(show)
    main.command(command, help=summary)(named)


for _command, (_what, _summary) in _LISTS.items():
    _add_list(_command, _what, _summary)


@main.command()
@click.argument("words", nargs=-1, metavar="[[install] NAME]")
@click.option("--version", metavar="VERSION", help="The version to install, if it is another than the one tried.")
@_json_option
@click.pass_context
def agents(ctx: click.Context, words: tuple[str, ...], version: str | None, as_json: bool) -> None:
    """List available agents, or every setting of the agent NAME, or install it.

    `install NAME` fetches the program of an agent that is one into the driver's cache, before a run does.
    """
    import asyncio

    from hermes_core.cli.listing import not_installable, program_of
    from hermes_core.cli.support import new_runtime

    installs = words[:1] == ("install",)
    if version and not installs:
        raise click.UsageError("--version is only for `agents install NAME`; a run takes --agent.version", ctx)
    if len(words) != 2 if installs else len(words) > 1:
        raise click.UsageError("name one agent, as in `agents NAME` or `agents install NAME`", ctx)
    if not installs:
        _list(ctx, "agent", words[0] if words else None, as_json)
    else:
        program = program_of(new_runtime(ctx.obj), words[1])
        folder = asyncio.run(program.fetch(version))
        if folder is None:
            raise not_installable(words[1])
        row = {"name": program.name, "version": version or program.version or "", "folder": str(folder)}
        _show({"installed": [row]}, as_json)


@main.command()
@click.argument("backend", nargs=-1)
@click.option("--agent", "agents", multiple=True, metavar="NAME", help="Also check the program of this agent.")
@_json_option
@click.pass_context
def doctor(ctx: click.Context, backend: tuple[str, ...], agents: tuple[str, ...], as_json: bool) -> None:
    """Check whether backends work here, and say how to fix those that don't.

    Checks the BACKENDs named, or all of them. Exits with 1 if one of them does not work or a plugin is broken.

    With --agent: whether its program is fetched or could be, and whether a slot of each BACKEND named has what it
    needs. For that, a sandbox of the default profile is made.
    """
    import asyncio

    from hermes_core.cli.doctor import Findings, examine
    from hermes_core.cli.support import leave, new_runtime, terminal_width

    async def report() -> Findings:
        async with new_runtime(ctx.obj) as runtime:
            return await examine(runtime, backend, agents)

    try:
        found = asyncio.run(report())
    except KeyboardInterrupt:  # the checks have ended by now, or can't be ended
        say("interrupted", err=True)
        leave(EXIT_INTERRUPTED)
    say(found.as_json() if as_json else found.as_text(terminal_width()))
    if found.hanging:
        leave(EXIT_BROKEN)
    ctx.exit(0 if found.healthy else EXIT_BROKEN)


@main.command()
@click.argument("backend", nargs=-1)
@click.option("--owner", metavar="NAME", help="Only sandboxes of this owner [all].")
@_json_option
@click.pass_obj
def ps(verbose: int, backend: tuple[str, ...], owner: str | None, as_json: bool) -> None:
    """List all sandboxes, of any owner.

    Asks the BACKENDs named, or all of them. The status is the sandbox's own: it is `running` or `ended`. It says
    nothing about the driver; `hermes-rl reap --dry-run` finds out which drivers are dead.
    """
    import asyncio

    from hermes_core.cli.sandboxes import find
    from hermes_core.cli.support import new_runtime

    async def census() -> Census:
        async with new_runtime(verbose) as runtime:
            return await find(runtime, backend, owner)

    found = asyncio.run(census())
    _show({"sandboxes": [sandbox.row() for sandbox in found.sandboxes]}, as_json)
    _tell_unasked(found, backend)


@main.command()
@click.argument("backend", nargs=-1)
@click.option("--owner", metavar="NAME", help="Only sandboxes of this owner [HERMES_OWNER].")
@click.option("--any-owner", is_flag=True, help="Sandboxes of every owner.")
@click.option("--waiting", is_flag=True, help="Also end sandboxes that wait for their driver to come back.")
@click.option("--dry-run", is_flag=True, help="End nothing; print what would be done.")
@_json_option
@click.pass_context
def reap(
    ctx: click.Context,
    *,
    backend: tuple[str, ...],
    owner: str | None,
    any_owner: bool,
    waiting: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """End sandboxes whose driver is dead.

    Asks the BACKENDs named, or all of them. Give the owner by --owner or HERMES_OWNER, or use --any-owner. Prints for
    each sandbox the outcome and why:

    \b
    ended      its driver is dead, or the sandbox has ended by itself and is removed
    would end  the same with --dry-run
    left       its driver is alive, may still be creating it, or cannot be listened to;
               or it is a shell or terminal task that waits for its driver (--waiting ends it)
    failed     it could not be ended: exit code 3
    """
    import asyncio

    from hermes_core.cli.sandboxes import Reaped, find
    from hermes_core.cli.sandboxes import reap as reap_sandboxes
    from hermes_core.cli.support import new_runtime

    async def work() -> tuple[Census, list[Reaped]]:
        async with new_runtime(ctx.obj) as runtime:
            whose = None if any_owner else owner or runtime.settings.owner
            if (whose is None) != any_owner or (any_owner and owner):
                raise UsageError(
                    "no owner is given", hint="use --owner NAME (or HERMES_OWNER), or --any-owner, not both"
                )
            found = await find(runtime, backend, whose)
            return found, await reap_sandboxes(runtime, found.sandboxes, waiting=waiting, dry_run=dry_run)

    found, outcomes = asyncio.run(work())
    _show({"sandboxes": [outcome.row() for outcome in outcomes]}, as_json)
    _tell_unasked(found, backend)
    if any(outcome.outcome == "failed" for outcome in outcomes):
        ctx.exit(EXIT_INCOMPLETE)


def _list(ctx: click.Context, what: str, name: str | None, as_json: bool) -> None:
    """Print a listing. Problems of plugins, and what else could be installed, go to standard error."""
    from hermes_core.cli.listing import list_entries
    from hermes_core.cli.support import new_runtime, tell_not_installed, tell_problems

    runtime = new_runtime(ctx.obj)
    _show(list_entries(runtime, what, name, taken=main.list_commands(ctx)), as_json)
    tell_problems(runtime)
    if name is None:
        tell_not_installed(runtime, what)


def _show(tables: Tables, as_json: bool) -> None:
    from hermes_core.cli import listing
    from hermes_core.cli.support import terminal_width

    say(listing.as_json(tables) if as_json else listing.as_text(tables, terminal_width=terminal_width()))


def _tell_unasked(found: Census, named: tuple[str, ...]) -> None:
    """Print which backends could not list their sandboxes. If the user named one of these, raise an error.

    Raises:
        InfraError: a backend in `named` could not list its sandboxes.
    """
    for name, problem in found.problems.items():
        if name in named:
            raise InfraError(
                f"backend {name!r} did not answer: {problem}",
                hint=f"`hermes-rl doctor {name}` says whether it can be used here",
            )
        say(f"not asked: {name}: {problem}", err=True)
