"""The environment is sound: its solution scores 1.0 and doing nothing 0.0, on every item and every time."""

import asyncio

import pytest

import example_environment as plugin
from hermes_core import ConfigError, Runtime, Validation, validate


def checked(**env: object) -> Validation:
    """Validate the environment with these settings, at whatever isolation level this host allows."""

    async def work() -> Validation:
        async with Runtime(plugins=[plugin], load_entry_points=False) as runtime:
            return await validate(runtime, "example-environment", env=env, repeat=2, allow_unisolated=True)

    return asyncio.run(work())


def test_it_is_sound() -> None:
    outcome = checked(count=3)
    assert outcome.sound, outcome.to_dict()
    assert outcome.items == 3


def test_its_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="count must be at least 1"):
        checked(count=0)
