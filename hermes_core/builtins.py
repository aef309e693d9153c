"""What comes with the core, registered through the same hooks as anyone's plugin."""

from __future__ import annotations

from hermes_core.hookspecs import hookimpl
from hermes_core.registries import Registrar


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """The backend that needs nothing but this host."""
    registry.add(
        "local",
        "hermes_core.sandbox.local.backend:LocalBackend",
        summary="Process trees on this host, in slots of level shared, user or namespace",
        requires=("Linux",),
    )


@hookimpl
def hermes_register_agents(registry: Registrar) -> None:
    """The model loop and the two baselines."""
    registry.add(
        "model",
        "hermes_core.agents.model:ModelAgent",
        summary="Asks an OpenAI-compatible model for tool calls until it is done",
        requires=("a model endpoint",),
    )
    registry.add("oracle", "hermes_core.agents.baselines:OracleAgent", summary="Applies the reference solution")
    registry.add("nop", "hermes_core.agents.baselines:NopAgent", summary="Does nothing")


@hookimpl
def hermes_register_environments(registry: Registrar) -> None:
    """An environment that needs no code."""
    registry.add(
        "tasks",
        "hermes_core.envs.tasks:TasksEnvironment",
        summary="A JSONL file of {id, prompt, setup, check, solution} commands",
        requires=("a task file",),
    )
