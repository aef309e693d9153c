"""Command-line options that choose rollouts: one for each condition of a filter class."""

from __future__ import annotations

from collections.abc import Callable

from hermes_core.cli.options import Command, setting_option
from hermes_core.records.select import Filters

_VALUES = {
    **{"failures": "KIND", "stop": "REASON", "tool": "NAME", "failed_tool": "NAME"},
    **{"min_reward": "R", "max_reward": "R", "max_tokens": "N", "per_item": "N"},
}
"""The name of a condition's value in the help, for conditions that take a value."""


def filter_options(model: type[Filters]) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each condition."""

    def add(command: Command) -> Command:
        for name in reversed(model.model_fields):
            names = ("--failure",) if name == "failures" else ()  # given once for each kind
            command = setting_option(model, name, *names, metavar=_VALUES.get(name))(command)
        return command

    return add
