"""What the tests of the provider share: Inspect itself, and the sandbox of one sample on each backend."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

PLACES: dict[str, dict[str, Any]] = {
    "local namespace": {},
    "local user": {"isolation": "user"},
    "docker root": {
        "backend": "docker",
        "isolation": "dedicated",
        "backend_config": {"image": "hermes-test-python:bookworm", "slot_user": "root"},
    },
    "docker user": {
        "backend": "docker",
        "isolation": "user",
        "backend_config": {"image": "hermes-test-python:bookworm"},
    },
    "ssh namespace": {
        "backend": "ssh",
        "backend_config": {"host": "hermes-test", "config_file": os.environ.get("HERMES_TEST_SSH_CONFIG", "")},
    },
}
"""The settings of the sandbox by where it is."""

HOW = "`make setup EXTRAS=inspect`, then `.venv-inspect/bin/python -m pytest -m full tests/inspect_ai`"


@pytest.fixture(scope="session")
def inspect_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where Inspect is not installed beside the tests."""
    missing = [name for name in ("inspect_ai", "hermes_inspect") if importlib.util.find_spec(name) is None]
    require("inspect", f"{' and '.join(missing)} not installed; {HOW}" if missing else None)


@pytest.fixture
def settings(place: str, inspect_extra: None, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a sandbox in this place, which can be used here."""
    if place.startswith("docker"):
        request.getfixturevalue("docker_images")
    if place.startswith("ssh"):
        request.getfixturevalue("ssh_config")
    return PLACES[place]


@pytest.fixture
async def sandbox(settings: dict[str, Any], leak_check: None) -> AsyncIterator[Any]:
    """The sandbox of one sample, of a task that has no other."""
    from hermes_inspect import HermesSandbox, HermesSandboxConfig

    config = HermesSandboxConfig(**json.loads(json.dumps(settings)))
    await HermesSandbox.task_init("startup", config)
    try:
        environments = await HermesSandbox.sample_init("task", config, {})
        yield environments["default"]
        await HermesSandbox.sample_cleanup("task", config, environments, False)
    finally:
        await HermesSandbox.task_cleanup("shutdown", config, True)
