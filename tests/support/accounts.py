"""The accounts that run tests: root and an ordinary user, or the latter alone."""

from __future__ import annotations

import os

import pytest

AGAIN = pytest.mark.full if os.geteuid() == 0 else ()
"""A mark for tests that an ordinary user repeats after root."""


def skip_if_slots_need_root(mode: str) -> None:
    """Skip if sandboxes of the Modal emulator in this mode are the host as it is: only root can make its /data."""
    data = "/data" if os.path.exists("/data") else "/"
    if mode != "namespaces" and not os.access(data, os.W_OK):
        pytest.skip("the emulator's sandboxes have no namespaces here, and this user can't write /data; root can")
