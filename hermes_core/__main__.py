"""`python -m hermes_core` runs the command `hermes-rl`, for a Python whose installed programs are not on the PATH."""

from hermes_core.cli.main import main

main(prog_name="hermes-rl")
