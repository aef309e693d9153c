"""Harbor's task folders, Terminal-Bench 2 and endless-terminals for hermes-rl: tasks with images and tests."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1

_REQUIRES = ("a backend whose sandboxes are made from images: --backend docker",)


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """Add the environments `harbor`, `terminal-bench-2` and `endless-terminals`."""
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
    registry.add(
        "endless-terminals",
        "hermes_harbor.endless.environment:EndlessTerminalsEnvironment",
        aliases=("endless_terminals",),
        summary="endless-terminals: generated tasks about the state of a system, many of them on one image",
        requires=_REQUIRES,
    )
