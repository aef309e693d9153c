"""The environment: a word is to be written into a file, each of them one of four choices in the prompt."""

import random

from pydantic import Field

from hermes_core.envs.base import Environment, EnvironmentConfig
from hermes_core.hookspecs import hookimpl
from hermes_core.tools.base import Tool, ToolParams
from hermes_core.tools.terminal import TerminalParams, run_terminal

BOXES = ("red", "blue", "green", "gold", "pink", "black", "white", "brown")
WORDS = ("ant", "bee", "cow", "fox", "hen", "owl", "pig", "rat")
CHOICES = 4


def choices(chance):
    """Some words and some boxes."""
    return {"words": chance.sample(WORDS, CHOICES), "boxes": chance.sample(BOXES, CHOICES)}


def question(item):
    """What is asked for, and what is not."""
    right, *wrong = (f"{word} to {box}" for word, box in zip(item["words"], item["boxes"], strict=True))
    return f"Write {right}, not {', not '.join(wrong)}."


class BoxesConfig(EnvironmentConfig):
    """What `boxes` can be told."""

    count: int = Field(default=10_000, ge=1)
    """How many items to make."""


class Boxes(Environment):
    """Write a word into a box. Half of the reward is for the right box, half for the right word."""

    name = "boxes"
    config_class = BoxesConfig
    default_toolsets = ("sh",)

    def items(self):
        """Which words and boxes there are to choose from; the first of each are the right ones."""
        chance = random.Random(self.config.seed)
        return [{"id": f"boxes-{number}", **choices(chance)} for number in range(self.config.count)]

    def format_prompt(self, item):
        """What is asked for."""
        return question(item)

    @hookimpl
    async def verify_and_score_trajectory(self, item, exec_tool):
        """Looks at the files that are there, whichever way they came."""
        found = await exec_tool("bash", {"command": "head -c 100 *"})
        boxes = await exec_tool("bash", {"command": "ls"})
        right_box = boxes.output.split() == item["boxes"][:1]
        right_word = found.output.split() == item["words"][:1]
        return (right_box + right_word) / 2, {"right_box": right_box, "right_word": right_word}

    @hookimpl
    async def solve_trajectory(self, item, exec_tool):
        """What the model has to find out."""
        await exec_tool("bash", {"command": f"echo {item['words'][0]} > {item['boxes'][0]}"})


class ShParams(ToolParams):
    """Parameters of `sh`."""

    command: str = Field(description="The command.")


async def sh(ctx, params):
    """As the tool `terminal`, with less to say about it: a tiny model reads short prompts."""
    return await run_terminal(ctx, TerminalParams(command=params.command))


SH = Tool("sh", ShParams, sh, "Run a command.", toolsets=("sh",))


@hookimpl
def hermes_register_environments(registry):
    """The environment, by its name."""
    registry.add("boxes", Boxes, summary="Write the right word into the right file")


@hookimpl
def hermes_register_tools(registry):
    """The only tool that the model gets."""
    registry.add(SH)
