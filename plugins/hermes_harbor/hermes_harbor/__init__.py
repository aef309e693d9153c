"""Harbor's task folders and Terminal-Bench 2 for hermes-rl: each task has its own image, tests and solution."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1

_REQUIRES = ("a backend whose sandboxes are made from images: --backend docker",)


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Add the environments `harbor` and `terminal-bench-2`."""
    registry.add(
        "harbor",
        "hermes_harbor.environment:HarborEnvironment",
        summary="Harbor's task folders: an image, an instruction, and tests that write a reward",
        requires=_REQUIRES,
    )
    registry.add(
        "terminal-bench-2",
        "hermes_harbor.terminal_bench:TerminalBench2Environment",
        aliases=("terminal_bench_2",),
        summary="Terminal-Bench 2, from the rows of its dataset",
        requires=_REQUIRES,
    )
