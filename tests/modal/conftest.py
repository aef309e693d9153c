"""What the Modal tests share: one emulator, the real SDK pointed at it, and whichever of its two kinds of sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hermes_modal_emulator import ModalEmulator

from tests.support.accounts import skip_if_slots_need_root
from tests.support.selection import makes_tests_full


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of apps that tests make up are not remembered for the developer."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="session")
@makes_tests_full
def session_emulator() -> Iterator[ModalEmulator]:
    """The emulator that tests without faults share."""
    with ModalEmulator() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def namespaces(session_emulator: ModalEmulator) -> bool:
    return session_emulator.mode == "namespaces"


@pytest.fixture(scope="session")
def workable(session_emulator: ModalEmulator) -> None:
    """Sandboxes that slots can be had in."""
    skip_if_slots_need_root(session_emulator.mode)


def _point(monkeypatch: pytest.MonkeyPatch, emulator: ModalEmulator) -> ModalEmulator:
    for name in os.environ:
        if name.startswith(("MODAL_", "TERMINAL_")):
            monkeypatch.delenv(name)
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    return emulator


@pytest.fixture
def emulator(session_emulator: ModalEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalEmulator]:
    """The shared emulator; the test's environment points at it, and its faults end with the test."""
    yield _point(monkeypatch, session_emulator)
    session_emulator.clear_faults()
    session_emulator.set(max_sandboxes=None, refused_tokens=[], missing_images=[":missing"], page_size=100)


@pytest.fixture
@makes_tests_full
def own_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalEmulator]:
    """An emulator of the test's own."""
    with ModalEmulator() as made:
        yield _point(monkeypatch, made)


@pytest.fixture(params=["v2", pytest.param("v1", marks=pytest.mark.stress)])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of Modal's two kinds of sandbox."""
    if request.param == "v1":
        monkeypatch.setenv("MODAL_SANDBOX_V2", "0")
    return str(request.param)


@pytest.fixture
def page_profiles() -> str:
    """A profiles file as the mission's page has it."""
    return """
profiles:
  default:
    image: python:3.11
    cpu: 1.0
    memory: 2048
    min_pool: 1
    max_pool: 5
    idle_timeout: 120

  gpu:
    image: pytorch/pytorch:2.1.0-cuda12.1-cudnn8-runtime
    gpu: T4
    memory: 16384
    min_pool: 0
    max_pool: 2
"""
