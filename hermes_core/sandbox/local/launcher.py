"""The program beside every local sandbox: `create` starts one and stays, `enter` joins one, `probe` tests the host.

It is run as a file by the bare interpreter (`python -I -S launcher.py MODE FD`). Because it forks, it must be small,
without threads, and quick to start: 15 ms with its imports, while our package would take 300 ms.
"""
# pathlib is slow to import
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import os
import sys


def _bare_packages() -> None:
    """Make modules of our package importable by name without running the package's own `__init__` files."""
    directory = os.path.dirname(os.path.abspath(__file__))
    names = ("hermes_core.sandbox.local", "hermes_core.sandbox", "hermes_core")
    for name in names:
        package = type(sys)(name)
        package.__path__ = [directory]
        sys.modules[name] = package
        directory = os.path.dirname(directory)
    for beside in ("guest", "linux"):
        package = type(sys)("hermes_core.sandbox." + beside)
        package.__path__ = [sys.modules["hermes_core.sandbox"].__path__[0] + "/" + beside]
        sys.modules[package.__name__] = package


def main(arguments: list[str]) -> None:
    """Carry out the mode with the request from a descriptor."""
    _bare_packages()
    from hermes_core.sandbox.local import supervisor

    code = supervisor.main(arguments[0], int(arguments[1]))
    os._exit(code)  # nothing is buffered, and taking an interpreter down takes a third of the time of its start


if __name__ == "__main__":
    main(sys.argv[1:])
