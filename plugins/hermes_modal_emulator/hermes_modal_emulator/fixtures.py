"""A pytest fixture: `pytest_plugins = ["hermes_modal_emulator.fixtures"]` in a top-level conftest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hermes_modal_emulator.emulator import ModalEmulator


@pytest.fixture
def modal_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalEmulator]:
    """Yield the test's own emulator, which its environment variables point to.

    The SDK reads its environment when it is first imported. If it was imported before, make a client with
    `modal.Client.from_credentials`, or use the backend `modal`, which makes its own.
    """
    with ModalEmulator() as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        yield emulator
