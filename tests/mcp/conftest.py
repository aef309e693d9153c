"""A slot on this host, servers to run in it and beside it, and proof that nothing of them is left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import SlotCommands


@pytest.fixture(scope="session", autouse=True)
def _mcp_package(require: Callable[[str, str | None], None]) -> None:
    """Every test here needs it."""
    from importlib.util import find_spec

    require("mcp", None if find_spec("mcp") else "the package mcp is not installed; `make setup`")


@pytest.fixture
async def slot() -> AsyncIterator[SlotCommands]:
    """The commands of a slot. At its level `shared`, programs see the packages of this host."""
    async with (
        Runtime(load_entry_points=False) as runtime,
        runtime.tool_backend("local", isolation="shared") as backend,
        backend.lease("t") as leased,
    ):
        yield backend.commands(leased)
