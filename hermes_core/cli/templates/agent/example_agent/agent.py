"""The agent: runs a list of shell commands through the tool `terminal`, without a model."""

import copy
import json
import time
from typing import Any

from hermes_core import AgentResult, AgentSettings, AgentTask, StopReason, run_calls


class ExampleAgentSettings(AgentSettings):
    """The settings: `--agent.commands='["ls", "make"]'` on the command line.

    Those of `AgentSettings` (`model`, `base_url`, `max_turns`, …) are for agents that ask a model.
    """

    commands: tuple[str, ...] = ()
    """Shell commands, run in this order in the workspace."""
    stop_on_error: bool = True
    """Whether a command that fails is the last one."""


class ExampleAgent:
    """Works on many tasks at the same time: what belongs to one task is kept in `run`, never on the object."""

    name = "example-agent"
    config_class = ExampleAgentSettings

    def __init__(self, settings: ExampleAgentSettings) -> None:
        self.settings = settings

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task. `task.result` is filled as it goes, so that it can be read however this ends."""
        result = task.result
        result.messages.extend(copy.deepcopy(task.messages))
        for number, command in enumerate(self.settings.commands[: self.settings.max_turns]):
            started = time.time()
            answer = _answer(f"call{number:05}", command)  # an agent with a model asks it here
            calls = result.add_turn(answer, started=started)
            [told] = await run_calls(task, calls)
            if self.settings.stop_on_error and (told.error or told.exit_code):
                break
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self) -> None:
        """Close what the agent holds open: a connection to a model, for instance."""


def _answer(call_id: str, command: str) -> dict[str, Any]:
    """Return an answer of a model that calls the tool `terminal`, in the form of OpenAI's API."""
    function = {"name": "terminal", "arguments": json.dumps({"command": command})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
