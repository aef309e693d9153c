"""The backend keeps the promises of backends: each check of the conformance kit is a test of its own.

These are the quick groups; `hermes-rl conformance example-backend` runs all of them.
"""

import asyncio
from collections.abc import Callable

import pytest

import example_backend as plugin
from hermes_core import PolicyError, Runtime


@pytest.mark.conformance("example-backend", plugins=[plugin], groups=["contract", "commands", "files"])
def test_conformance(conformance_check: Callable[[], None]) -> None:
    conformance_check()


def test_its_settings_reach_commands() -> None:
    async def work() -> str:
        async with (
            Runtime(plugins=[plugin], load_entry_points=False) as runtime,
            runtime.tool_backend(
                "example-backend",
                isolation="shared",
                config={"greeting": "good day", "slot_variables": ["GREETING"]},
            ) as backend,
            backend.lease("test") as slot,
        ):
            return (await backend.execute(slot, "bash", {"command": "echo $GREETING"})).output

    assert asyncio.run(work()) == "good day\n"


def test_what_it_can_t_give_is_refused() -> None:
    async def work() -> None:
        async with (
            Runtime(plugins=[plugin], load_entry_points=False) as runtime,
            runtime.tool_backend("example-backend", isolation="user"),
        ):
            pass

    with pytest.raises(PolicyError):
        asyncio.run(work())
