"""The package itself: what it imports."""

from __future__ import annotations

from tests.test_import_cost import HEAVY, loaded


def test_importing_it_loads_neither_trl_nor_torch() -> None:
    modules = loaded("from hermes_trl import HermesSpec, HermesRolloutWorker")
    assert "hermes_trl.worker" in modules
    assert modules.isdisjoint({*HEAVY, "trl", "transformers", "accelerate"})
