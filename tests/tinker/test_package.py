"""The package itself: what it imports, and what it says about the versions that it meets."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging

import pytest
from hermes_tinker import advantages
from hermes_tinker.versions import TESTED, check_version

from hermes_core import ConfigError
from tests.test_import_cost import HEAVY, loaded


def test_importing_it_loads_nothing_heavy() -> None:
    modules = loaded("from hermes_tinker import TinkerRun, grpo")
    assert "hermes_tinker.run" in modules
    assert modules.isdisjoint({*HEAVY, "tinker", "tinker_cookbook", "transformers", "numpy"})


@pytest.mark.parametrize(("found", "warns"), [(TESTED["tinker"], False), ("0.25.9", False), ("0.38.0", True)])
def test_another_version_is_warned_of(
    found: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with caplog.at_level(logging.WARNING):
        check_version("tinker")
    tested = TESTED["tinker"]
    assert [f"tested with tinker {tested}, and this is tinker {found}" in text for text in caplog.messages] == [
        True
    ] * warns


def test_a_missing_package_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="pip install tinker=="):
        check_version("tinker")


def test_a_missing_cookbook_is_an_error_with_a_hint() -> None:
    if importlib.util.find_spec("tinker_cookbook") is not None:
        pytest.skip("the cookbook is installed")
    with pytest.raises(ConfigError, match="pip install tinker-cookbook=="):
        importlib.import_module("hermes_tinker.cookbook")


def test_advantages_compare_a_group_with_itself() -> None:
    assert advantages([0.5, 0.5]) == [0.0, 0.0]
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-4)
