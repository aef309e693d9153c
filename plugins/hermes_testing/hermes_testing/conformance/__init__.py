"""The backend conformance kit: tests that every backend must pass. `hermes-rl conformance NAME` runs it.

A check is a plain async function that takes a `Kit` and is registered with `check`. `run` runs the checks one after
another and returns a `Report`. For pytest there is `hermes_testing.conformance.plugin`.
"""

from hermes_testing.conformance.checks import GROUPS, Check, all_checks, check, chosen
from hermes_testing.conformance.expect import CheckFailed, NotApplicable
from hermes_testing.conformance.kit import Kit, Rig
from hermes_testing.conformance.runner import CheckOutcome, Report, Result, run, run_one

__all__ = [
    "GROUPS",
    "Check",
    "CheckFailed",
    "CheckOutcome",
    "Kit",
    "NotApplicable",
    "Report",
    "Result",
    "Rig",
    "all_checks",
    "check",
    "chosen",
    "run",
    "run_one",
]
