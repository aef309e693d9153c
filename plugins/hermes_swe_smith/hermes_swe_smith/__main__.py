"""`python -m hermes_swe_smith {process,serve,evaluate}`: the environment for the RL trainers of Atropos."""

from __future__ import annotations

from hermes_core.atropos import run_named

if __name__ == "__main__":
    run_named("swe-smith")
