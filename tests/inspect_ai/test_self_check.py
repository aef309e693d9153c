"""Inspect's portable checks of sandbox providers (`inspect_ai.util._sandbox.self_check`), on every backend."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.full, pytest.mark.entry_points]

NO_ROOT = "the slot is not root, so it can neither add users nor run commands as others"
ROOT_MAY = "root may read and write files without the permission"

REFUSED = {
    "local namespace": {"test_exec_as_user": NO_ROOT},
    "local user": {"test_exec_as_user": NO_ROOT},
    "docker user": {"test_exec_as_user": NO_ROOT},
    "ssh namespace": {"test_exec_as_user": NO_ROOT},
    "docker root": {
        "test_read_file_not_allowed": ROOT_MAY,
        "test_write_text_file_without_permissions": ROOT_MAY,
        "test_write_binary_file_without_permissions": ROOT_MAY,
    },
}
"""The checks that can't pass, each with the reason; docs/guides/inspect.md lists them."""


def checks() -> list[str]:
    """The names of the checks, read without importing Inspect."""
    found = importlib.util.find_spec("inspect_ai")
    if found is None or found.origin is None:
        return ["test_of_inspect"]
    source = Path(found.origin).parent / "util" / "_sandbox" / "self_check.py"
    return re.findall(r"^async def (test_\w+)", source.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", checks())
@pytest.mark.parametrize(
    "place", [pytest.param(each, marks=pytest.mark.stress) if each.endswith("user") else each for each in REFUSED]
)
async def test_self_check(place: str, name: str, sandbox: Any, request: pytest.FixtureRequest) -> None:
    from inspect_ai.util._sandbox import self_check

    if reason := REFUSED[place].get(name):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    await getattr(self_check, name)(sandbox)
