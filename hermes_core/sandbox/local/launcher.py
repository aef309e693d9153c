"""The program beside every local sandbox: `create` starts one and stays, `enter` joins one, `probe` tests the host.

`container` starts a container runtime and stays, `build` runs one that makes an image.
It is run as a file by the bare interpreter (`python -I -S launcher.py MODE FD`). Because it forks, it must be small and
have no threads. It starts in 15 ms with its imports; importing our package would take 300 ms.
"""
# pathlib is slow to import
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import os
import sys


def _bare_packages() -> None:
    """Make the modules of our package importable without running the `__init__` files of the package."""
    directory = os.path.dirname(os.path.abspath(__file__))
    names = ("hermes_core.sandbox.local", "hermes_core.sandbox", "hermes_core")
    for name in names:
        package = type(sys)(name)
        package.__path__ = [directory]
        sys.modules[name] = package
        directory = os.path.dirname(directory)
    for sibling in ("guest", "linux"):
        package = type(sys)("hermes_core.sandbox." + sibling)
        package.__path__ = [sys.modules["hermes_core.sandbox"].__path__[0] + "/" + sibling]
        sys.modules[package.__name__] = package


def main(arguments: list[str]) -> None:
    """Run the mode `arguments[0]` with the request from the descriptor `arguments[1]`."""
    _bare_packages()
    if arguments[0] in ("container", "build"):
        from hermes_core.sandbox.local.container import main as run
    else:
        from hermes_core.sandbox.local.supervisor import main as run

    code = run(arguments[0], int(arguments[1]))
    os._exit(code)  # nothing is buffered, and a regular exit takes a third of the interpreter's start-up time


if __name__ == "__main__":
    main(sys.argv[1:])
