"""What plugins make commands of that work in sandboxes: the options of a run, and a clean end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click

from hermes_core.agents.base import AgentSettings
from hermes_core.cli.options import DottedCommand, read_config
from hermes_core.cli.rollouts import RUN_OPTIONS, agent_settings_of, options_of
from hermes_core.cli.support import finish
from hermes_core.envs.options import RunOptions
from hermes_core.runtime import Runtime
from hermes_core.validation import validated

T = TypeVar("T")


class RunCommand(DottedCommand):
    """A click command with the options of a run beside its own: `--backend`, `--isolation`, `--concurrency`, `--seed`,
    `--config` and so on, and `--agent.KEY=VALUE` and `--backend.KEY=VALUE`.

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
    """Run the work of a `RunCommand` in a runtime of its own, and return its result. Ctrl-C cancels the work, and ends
    the program when the sandboxes have ended, or after a time limit.

    Args:
        work: gets the runtime, and what the command line and the configuration file say.
        interrupted: returns what is said after Ctrl-C.

    Raises:
        UsageError: an option or a setting is wrong.
        HermesError: as `work` raised it; the program then ends with its message and exit code.
    """

    async def main(runtime: Runtime) -> T:
        config = read_config(ctx.params["config"])
        options = validated(RunOptions, options_of(ctx, runtime, config, ctx.params), "the run")
        return await work(runtime, options)

    return finish(ctx, main, interrupted)


def chosen_agent(ctx: click.Context, runtime: Runtime, agent: str) -> AgentSettings:
    """Return the settings of an agent that a `RunCommand` was given: the configuration file's, then
    `--agent.KEY=VALUE`, then those of the command's own options that are named like a setting (`--model`).

    Raises:
        UnknownNameError, ConfigError: a setting is wrong, or there is no such agent.
    """
    config = read_config(ctx.params["config"])
    return runtime.agent_settings(agent_settings_of(ctx, runtime, agent, config["agent"], ctx.params), agent)
