"""The hooks that a plugin can implement.

A plugin is a module (or any object) named by an entry point of the group `hermes_core`. It marks its functions with
`hookimpl` and takes only the arguments that it wants, positional or keyword-only. It may set `HERMES_PLUGIN_API = 1`.

    from hermes_core import hookimpl

    @hookimpl
    def hermes_register_environments(registry):
        registry.add("my-env", "my_package.env:MyEnvironment", summary="What it is")

The factory is named as `module:attribute` and imported on first use, so that listing plugins stays cheap.

Environment hooks have exactly one implementation, the environment's own method (sync or async). A plugin may only wrap
them, for every environment, with a plain generator that receives an awaitable and returns another:

    @hookimpl(wrapper=True)
    def verify_and_score_trajectory(trajectory_id):
        scoring = yield
        async def logged():
            reward, details = await scoring
            log.info("%s: %s", trajectory_id, reward)
            return reward, details
        return logged()

Observers are plain functions called on the event loop, and must be quick. The first error of one is logged with a
traceback, later ones at level debug; nothing else notices.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from hermes_core.agents.base import AgentResult
    from hermes_core.environment import FollowUp, Item, Score
    from hermes_core.handles import ExecTool, RolloutHandle
    from hermes_core.plugins.registry import Registrar, ToolRegistrar
    from hermes_core.sandbox.commands import ExecutionResult, ProcessUpdate

PROJECT = "hermes_core"
"""The pluggy project, and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# Registration: `registry.add(name, factory, aliases=(), summary="", requires=())`, once each, when first needed.


@hookspec
def hermes_register_backends(registry: Registrar) -> None:
    """Add sandbox providers: `factory(settings) -> Backend`."""


@hookspec
def hermes_register_tools(registry: ToolRegistrar) -> None:
    """Add tools: `add(tool)`, `add_toolset(name, tools=…, includes=…)`, `add_distribution(name, {toolset: 80})`."""


@hookspec
def hermes_register_agents(registry: Registrar) -> None:
    """Add agents: `factory(settings) -> Agent`.

    The settings are an `AgentSettings`, or an instance of the subclass that the factory names as its `config_class`.
    """


@hookspec
def hermes_register_parsers(registry: Registrar) -> None:
    """Add parsers of tool calls written as text: `factory() -> Parser`."""


@hookspec
def hermes_register_environments(registry: Registrar) -> None:
    """Add environments: the factory is the `Environment` class."""


@hookspec
def hermes_register_sinks(registry: Registrar) -> None:
    """Add sinks for records: `factory(target) -> Sink`. The target is TARGET of `--sink NAME=TARGET`."""


@hookspec
def hermes_register_observers(registry: Registrar) -> None:
    """Add observers that are on while the setting `telemetry` is: `factory() -> object`, once for each runtime.

    The object has observer hooks as methods, and `async aclose()`, which is called when the runtime is closed.
    """


@hookspec
def hermes_register_commands(registry: Registrar) -> None:
    """Add commands of `hermes-rl`: the factory is the `click.Command` itself, best as `module:attribute`."""


# Environment hooks: one implementation, the environment's own; plugins may wrap it.


@hookspec(firstresult=True)
def setup_trajectory_workspace(
    item: Item, trajectory_id: str, exec_tool: ExecTool, rollout: RolloutHandle
) -> Awaitable[Mapping[str, Any]] | None:
    """Prepare the slot for this item. The returned metadata is passed to the other hooks as `workspace_meta`."""


@hookspec(firstresult=True)
def verify_and_score_trajectory(  # noqa: PLR0917 - pluggy calls by position
    item: Item,
    result: AgentResult,
    trajectory_id: str,
    exec_tool: ExecTool,
    workspace_meta: Mapping[str, Any],
    rollout: RolloutHandle,
) -> Awaitable[Score] | None:
    """Score what the agent left, after its processes are dead. Return the reward and details, or raise an error."""


@hookspec(firstresult=True)
def solve_trajectory(
    item: Item, trajectory_id: str, exec_tool: ExecTool, workspace_meta: Mapping[str, Any], rollout: RolloutHandle
) -> Awaitable[None] | None:
    """Apply the reference solution in the agent's slot."""


@hookspec(firstresult=True)
def continue_trajectory(  # noqa: PLR0917 - pluggy calls by position
    item: Item,
    result: AgentResult,
    trajectory_id: str,
    exec_tool: ExecTool,
    workspace_meta: Mapping[str, Any],
    rollout: RolloutHandle,
) -> Awaitable[FollowUp | str | None] | None:
    """Return what the user says when the agent is done: a `FollowUp` or a text, or None at the end."""


@hookspec(firstresult=True)
def cheat_trajectory(  # noqa: PLR0917 - pluggy calls by position
    cheat: str,
    item: Item,
    trajectory_id: str,
    exec_tool: ExecTool,
    workspace_meta: Mapping[str, Any],
    rollout: RolloutHandle,
) -> Awaitable[None] | None:
    """Do the cheat of this name in the agent's slot. Core implements it with the environment's `cheats()`."""


# Observers.


@hookspec
def hermes_trajectory_started(trajectory_id: str, environment: str, item_id: str) -> None:
    """Called when a rollout begins."""


@hookspec
def hermes_trajectory_finished(trajectory_id: str, record: Mapping[str, Any]) -> None:
    """Called when a rollout has ended. `record` is the trajectory as it is written."""


@hookspec
def hermes_tool_called(
    trajectory_id: str, tool_name: str, arguments: Mapping[str, Any], result: ExecutionResult
) -> None:
    """Called when the model has called a tool. `result` is the `ExecutionResult`."""


@hookspec
def hermes_sandbox_created(sandbox_id: str, backend: str, profile: str) -> None:
    """Called when a sandbox is ready."""


@hookspec
def hermes_sandbox_lost(sandbox_id: str, backend: str, profile: str, reason: str) -> None:
    """Called when a sandbox died, could not be reached again, or was quarantined."""


@hookspec
def hermes_sandbox_terminated(sandbox_id: str, backend: str, profile: str) -> None:
    """Called when this driver has ended a sandbox."""


@hookspec
def hermes_process_updated(trajectory_id: str, update: ProcessUpdate) -> None:
    """Called when a watched background process has new output or has ended. `update` is the `ProcessUpdate`."""
