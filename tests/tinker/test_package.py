"""The package itself: what it imports, and what it says without the cookbook."""

from __future__ import annotations

import importlib.util

import pytest
from hermes_tinker import advantages

from hermes_core import ConfigError
from tests.test_import_cost import HEAVY, loaded


def test_importing_it_loads_nothing_heavy() -> None:
    modules = loaded("from hermes_tinker import TinkerRun, grpo")
    assert "hermes_tinker.run" in modules
    assert modules.isdisjoint({*HEAVY, "tinker", "tinker_cookbook", "transformers", "numpy"})


def test_a_missing_cookbook_is_an_error_with_a_hint() -> None:
    if importlib.util.find_spec("tinker_cookbook") is not None:
        pytest.skip("the cookbook is installed")
    with pytest.raises(ConfigError, match="pip install 'tinker-cookbook=="):
        importlib.import_module("hermes_tinker.cookbook")


def test_advantages_compare_a_group_with_itself() -> None:
    assert advantages([0.5, 0.5]) == [0.0, 0.0]
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-4)
