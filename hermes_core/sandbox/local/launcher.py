"""The program beside every local sandbox: `create` starts one and stays, `enter` joins one, `probe` tries things out.

Run as a file by the bare interpreter (`python -I -S launcher.py MODE FD`), because it forks, and what it forks must be
small, without threads, and quick to start: 15 ms with what it imports, where our package would take 300.
"""
# pathlib is slow to import
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import os
import sys


def _bare_packages() -> None:
    """Let modules of our package be imported by name without running the package's own `__init__` files."""
    directory = os.path.dirname(os.path.abspath(__file__))
    names = ("hermes_core.sandbox.local", "hermes_core.sandbox", "hermes_core")
    for name in names:
        package = type(sys)(name)
        package.__path__ = [directory]
        sys.modules[name] = package
        directory = os.path.dirname(directory)
    guest = type(sys)("hermes_core.sandbox.guest")
    guest.__path__ = [sys.modules["hermes_core.sandbox"].__path__[0] + "/guest"]
    sys.modules["hermes_core.sandbox.guest"] = guest


def main(arguments: list[str]) -> None:
    """Do what the mode says with the request that a descriptor holds."""
    _bare_packages()
    from hermes_core.sandbox.local import supervisor

    supervisor.main(arguments[0], int(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
