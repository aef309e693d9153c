"""The module that `vf-eval hermes_rl` loads: verifiers looks for one Taskset, one Harness and one Env in it."""

from __future__ import annotations

from hermes_verifiers.versions import VERIFIERS

with VERIFIERS.imports():
    from hermes_verifiers.adapter import HermesEnv, HermesHarness, HermesTaskset

__all__ = ["HermesEnv", "HermesHarness", "HermesTaskset"]
