"""A pytest fixture: `pytest_plugins = ["hermes_modal_emulator.fixtures"]` in a top-level conftest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hermes_modal_emulator.emulator import ModalEmulator


@pytest.fixture
def modal_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalEmulator]:
    """Yield an emulator for one test, with environment variables that point the SDK to it.

    The SDK reads its environment at its first import. If it was imported before, make a client with
    `modal.Client.from_credentials`, or use the backend `modal`, which makes its own.
    """
    with ModalEmulator() as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        yield emulator
