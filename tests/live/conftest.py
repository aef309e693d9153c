"""Tests on the real Modal: MODAL_LIVE=1 runs them, with the account of the token; they cost cents.

`MODAL_LIVE=emulator` runs them on the emulator instead, to see that the tests themselves are right.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

WAYS = ("1", "emulator")


@pytest.fixture(scope="session")
def live() -> Iterator[str]:
    """Which Modal it is."""
    way = os.environ.get("MODAL_LIVE", "")
    if way not in WAYS:
        pytest.skip("MODAL_LIVE=1 runs this on the real Modal, with your token and at your cost")
    if way == "1":
        yield way
        return
    from hermes_modal_emulator import ModalEmulator

    with ModalEmulator() as emulator:
        before = {name: os.environ.get(name) for name in emulator.environment}
        os.environ.update(emulator.environment)
        yield way
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["v2", "v1"])
def version(request: pytest.FixtureRequest, live: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of Modal's two kinds of sandbox."""
    if request.param == "v1":
        monkeypatch.setenv("MODAL_SANDBOX_V2", "0")
    return str(request.param)


@pytest.fixture
async def create(live: str, version: str) -> AsyncIterator[Callable[..., Any]]:
    """Makes sandboxes by the SDK, which end with the test."""
    import modal

    client = await modal.Client.from_env.aio()
    app = await modal.App.lookup.aio("hermes-rl-live-tests", client=client, create_if_missing=True)
    made = []

    async def make(*argv: str, **given: Any) -> Any:
        image = modal.Image.from_registry("python:3.11")
        settings = {"timeout": 300, "image": image, "tags": {"live-test": uuid.uuid4().hex[:8]}, **given}
        sandbox = await modal.Sandbox.create.aio(*argv, app=app, client=client, **settings)
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        await sandbox.terminate.aio()
