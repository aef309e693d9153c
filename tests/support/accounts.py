"""The accounts that run tests: root and an ordinary user, or the latter alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

AGAIN = pytest.mark.full if os.geteuid() == 0 else ()
"""A mark for tests that an ordinary user repeats after root."""


def skip_if_slots_need_root(mode: str) -> None:
    """Skip if sandboxes of the Modal emulator in this mode are the host as it is: only root can make its /data."""
    data = "/data" if os.path.exists("/data") else "/"
    if mode != "namespaces" and not os.access(data, os.W_OK):
        pytest.skip("the emulator's sandboxes have no namespaces here, and this user can't write /data; root can")


def interpreter_for_others() -> Path | None:
    """Return an interpreter that every user can run, and that our compiled packages fit."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    places = [own, *(f"{place}/python{version}" for place in ("/usr/local/bin", "/usr/bin"))]
    for path in map(Path, places):
        if path.exists() and all(directory.stat().st_mode & 0o001 for directory in path.resolve().parents):
            return path
    return None
