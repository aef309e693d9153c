"""The networks that a task demands for its phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hermes_core import Network, NetworkPlan, NetworkPolicy
from hermes_harbor.task_toml import NetworkRules, StepTable, TaskToml

_EVERYWHERE = ("*:*", "0.0.0.0/0:*", "[::/0]:*")
"""Every host of the internet."""


def plan_network(toml: TaskToml) -> Network | NetworkPlan | None:
    """Return the networks of a task's phases; `none` if no phase has one; None if all have the profile's.

    If only some phases are `public`, these reach every public host through the proxy.
    """
    phases = [toml.environment, *next(_rules_of_parts(toml))]
    if all(_mode(each) == "public" for each in phases):
        return None
    if all(_mode(each) == "no-network" for each in phases):
        return Network.NONE
    setup, agent, tests = map(_policy, phases)
    return NetworkPlan(setup, agent, tests)


def explain_differences(toml: TaskToml) -> Iterator[str]:
    """Yield why the phases of a task's steps can't each have the network that the task demands."""
    for index, name in enumerate(("agent", "verifier")):
        if len({_policy(rules[index]) for rules in _rules_of_parts(toml)}) > 1:
            yield f"the network of the {name} is not the same in all steps (accept network if the profile gives that)"


def _rules_of_parts(toml: TaskToml) -> Iterator[tuple[NetworkRules, NetworkRules]]:
    """Yield the rules for the agent and for the tests of each step, or of the whole task."""
    parts: Iterable[TaskToml | StepTable] = toml.steps or [toml]
    for part in parts:
        agent = _first(part.agent, toml.agent) or toml.environment
        own = part.verifier.environment or toml.verifier.environment
        is_separate = toml.mode(part if isinstance(part, StepTable) else None) == "separate"
        place = own if is_separate and own is not None else toml.environment
        yield agent, _first(part.verifier, toml.verifier) or place


def _first(*tables: NetworkRules) -> NetworkRules | None:
    return next((each for each in tables if each.network_mode is not None), None)


def _mode(rules: NetworkRules) -> str:
    return "no-network" if rules.network_mode == "allowlist" and not rules.allowed_hosts else str(rules.network_mode)


def _policy(rules: NetworkRules) -> NetworkPolicy:
    """Return the policy. Harbor's hosts mean every port."""
    if _mode(rules) == "no-network":
        return NetworkPolicy(network=Network.NONE)
    if rules.network_mode == "public":
        return NetworkPolicy(allowed_hosts=_EVERYWHERE)
    return NetworkPolicy(
        allowed_hosts=tuple(f"[{host}]:*" if ":" in host else f"{host}:*" for host in rules.allowed_hosts or ())
    )
