"""`python -m hermes_core`: the command `hermes-rl`, for an interpreter whose programs are not on the PATH."""

from hermes_core.cli.main import main

main(prog_name="hermes-rl")
