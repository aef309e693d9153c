"""The agent: runs a list of shell commands through the tool `terminal`, without a model."""

import copy
import json

from hermes_core import AgentResult, AgentSettings, AgentTask, StopReason


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
            arguments = {"command": command}
            answer = await task.tool_handler("terminal", arguments, task.trajectory_id)
            self._note(result, f"call{number:05}", arguments, answer)
            told = json.loads(answer)
            if self.settings.stop_on_error and (told.get("error") or told.get("exit_code")):
                break
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self) -> None:
        """Close what the agent holds open: a connection to a model, for instance."""

    @staticmethod
    def _note(result: AgentResult, call_id: str, arguments: dict[str, str], answer: str) -> None:
        """Put one call and its answer into the conversation, in the form of OpenAI's API."""
        function = {"name": "terminal", "arguments": json.dumps(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        result.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result.messages.append({"role": "tool", "tool_call_id": call_id, "content": answer})
        result.turns_used += 1
        result.tool_calls_attempted += 1
