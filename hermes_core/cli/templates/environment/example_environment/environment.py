"""The environment: its settings, its items, and how a rollout is prepared, verified and solved."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from hermes_core import CommandError, Environment, EnvironmentConfig, Item, RolloutHandle, hookimpl


class ExampleEnvironmentConfig(EnvironmentConfig):
    """The settings: `--env.count=100` on the command line."""

    count: int = Field(default=10, ge=1)
    """How many items to make."""


class ExampleEnvironment(Environment):
    """Count the lines of a file, and write the number to another."""

    name = "example-environment"
    config_class = ExampleEnvironmentConfig
    config: ExampleEnvironmentConfig

    def items(self) -> Sequence[Item]:
        """Make the items. A dataset would be loaded in `setup`, and returned here."""
        draw = random.Random(0)
        return [{"id": f"lines-{n}", "lines": draw.randrange(5, 500)} for n in range(self.config.count)]

    def format_prompt(self, item: Item) -> str:
        """Return the text that tells the agent its task."""
        return "How many lines has data.txt? Write the number to answer.txt."

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> Mapping[str, Any]:
        """Write the file to be counted. The verification gets the returned value as `workspace_meta`."""
        text = "".join(f"line {n}\n" for n in range(item["lines"]))
        await rollout.commands.write_file("data.txt", text.encode())
        return {"expected": str(item["lines"])}

    @hookimpl
    async def verify_and_score_trajectory(
        self, rollout: RolloutHandle, workspace_meta: Mapping[str, Any]
    ) -> tuple[float, dict[str, Any]]:
        """Score the answer, which the agent wrote: the file can be missing, huge, or no text."""
        try:
            answer = await rollout.commands.read_file("answer.txt", limit=100)
        except CommandError as error:
            return 0.0, {"reason": error.message}
        said = answer.data.decode(errors="replace").strip()
        return float(said == workspace_meta["expected"]), {"said": said}

    @hookimpl
    async def solve_trajectory(self, rollout: RolloutHandle) -> None:
        """Solve the item in the agent's slot, for the agent `oracle` and `hermes-rl validate`."""
        await rollout.commands.run("wc -l < data.txt > answer.txt")
