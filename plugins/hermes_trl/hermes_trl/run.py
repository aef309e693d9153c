"""The run behind a spec, with the prompts and the tools that TRL asks for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hermes_core import AdaptedPackage, Environment, RunOptions, TrainerRun, UsageError, open_trainer_session

TRL = AdaptedPackage("hermes-rl-trl", "trl", "1.16.0")
"""The version of TRL. It is pinned, because the adapter uses experimental parts of TRL."""

ITEM = "item_id"
"""The field of a prompt's last message that has the item's id, because `rollout_func` gets only the prompt."""

_MORE_ROOM = (
    "set concurrency of HermesSpec to the rollouts of a generation batch in one process: "
    "per_device_train_batch_size × steps_per_generation"
)


class TrlRun(TrainerRun):
    """A run for TRL, whose trainers are synchronous.

    Raises:
        ConfigError: TRL is not installed.
    """

    def __init__(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any] | None,
        options: RunOptions,
        refills: int,
    ) -> None:
        TRL.check()
        super().__init__(
            partial(open_trainer_session, environment, options, env=env, agent=agent),
            exact=agent is not None,
            refills=refills,
            more_room=_MORE_ROOM,
        )

    def prompt(self, item_id: str) -> list[dict[str, Any]]:
        """Return the prompt of an item, with the item's id in its last message."""
        *before, last = self.session.environment.initial_messages(self.item(item_id))
        return [*before, {**last, ITEM: item_id}]

    def tools(self) -> list[dict[str, Any]]:
        """Return the tool schemas, which all rollouts of the run share.

        Raises:
            UsageError: items differ in their tools, or some tools come from MCP servers.
        """
        session, offered, items = self.session, self.session.tools, list(self.items.values())
        if offered.servers or any(map(session.environment.mcp_servers, items)):
            raise UsageError(
                "the tools of MCP servers are known only once a rollout has begun, and an environment_factory has to "
                "name all tools before that",
                hint="use rollout_func",
            )
        drawn = session.environment.config.distribution or any(map(session.environment.distribution, items))
        names = {offered.names(item) for item in items} or {offered.names()}
        if drawn or len(names) > 1:
            raise UsageError(
                f"the rollouts of environment {session.name!r} differ in their tools, and all instances of an "
                "environment_factory have the same",
                hint="use rollout_func, or name the toolsets in env: enabled_toolsets",
            )
        return session.runtime.tools.schemas(names.pop())
