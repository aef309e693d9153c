"""hermes-rl: tool-using agents in sandboxes, scored by what really happened there, recorded for RL trainers.

Plugins and scripts import all names that they need from this package. A module is loaded when the first of its names is
used, so that `import hermes_core` stays quick. `__init__.pyi` lists the names and their modules.
All names that it does not list are internal.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^from ([\w.]+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)


@functools.cache
def _places() -> dict[str, str]:
    listed = _IMPORT.findall(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {name: module for module, *names in listed for name in re.findall(r"(\w+) as", "".join(names))}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_places())
    if name not in _places():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_places()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_places()})
