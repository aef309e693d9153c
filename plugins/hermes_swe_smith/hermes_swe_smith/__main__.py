"""`python -m hermes_swe_smith {process,serve,evaluate}`: the environment for the RL trainers of Atropos."""

from __future__ import annotations

import sys

import click

from hermes_core import ConfigError

if __name__ == "__main__":
    try:
        from hermes_core.atropos import run_named
    except ConfigError as error:  # hermes-rl-atropos is not installed
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    run_named("swe-smith")
