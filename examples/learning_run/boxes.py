"""The environment: a word is to be written into a box, each of them one of four."""

import random

from pydantic import Field

from hermes_core import Environment, EnvironmentConfig, hookimpl

BOXES = ("red", "blue", "green", "gold")
WORDS = ("ant", "bee", "cow", "fox")


class BoxesConfig(EnvironmentConfig):
    """What `boxes` can be told."""

    count: int = Field(default=10_000, ge=1)
    """How many items to make."""


class Boxes(Environment):
    """Write a word into a file. Half of the reward is for the right file, half for the right word."""

    name = "boxes"
    config_class = BoxesConfig
    default_toolsets = ("terminal",)

    def items(self):
        """Which word belongs into which box."""
        chance = random.Random(self.config.seed)
        return [
            {"id": f"boxes-{number}", "word": chance.choice(WORDS), "box": chance.choice(BOXES)}
            for number in range(self.config.count)
        ]

    def format_prompt(self, item):
        """What is asked for."""
        return f"Write {item['word']} to {item['box']}."

    @hookimpl
    async def verify_and_score_trajectory(self, item, exec_tool):
        """Looks at the files that are there, whichever way they came."""
        found = await exec_tool("bash", {"command": "grep -H . *"})
        box, _, word = found.output.strip().partition(":")
        return ((box == item["box"]) + (word == item["word"])) / 2, {"found": found.output[:100]}

    @hookimpl
    async def solve_trajectory(self, item, exec_tool):
        """What the model has to find out."""
        await exec_tool("bash", {"command": f"echo {item['word']} > {item['box']}"})


@hookimpl
def hermes_register_environments(registry):
    """The environment, by its name."""
    registry.add("boxes", Boxes, summary="Write the right word into the right file")
