"""The package itself: what it imports, and what it says about the version of TRL that it meets."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
from hermes_trl.run import TESTED, check_version

from hermes_core import ConfigError
from tests.test_import_cost import HEAVY, loaded


def test_importing_it_loads_neither_trl_nor_torch() -> None:
    modules = loaded("from hermes_trl import HermesSpec, HermesRolloutWorker")
    assert "hermes_trl.worker" in modules
    assert modules.isdisjoint({*HEAVY, "trl", "transformers", "accelerate"})


@pytest.mark.parametrize(("found", "warns"), [(TESTED, False), ("1.16.3", False), ("1.17.0", True), ("2.0.0", True)])
def test_another_version_of_trl_is_warned_of(
    found: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with caplog.at_level(logging.WARNING):
        check_version()
    assert [f"tested with trl {TESTED}, and this is trl {found}" in text for text in caplog.messages] == [True] * warns


def test_trl_that_is_missing_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="pip install"):
        check_version()
