"""MCP servers of a task, on Docker: their tools are offered, and they run beside the agent."""

from __future__ import annotations

import json

import pytest

from hermes_core.agents.base import StopReason
from tests.harbor.harbor_tasks import PYTHON, roll_out, write_task
from tests.mcp.mcp_servers import HERE


class Caller:
    """An agent that calls the task's tool, and writes down where it runs."""

    name = "caller"

    async def run(self, task):
        task.result.messages.extend(task.messages)
        self.skills = task.skills
        self.offered = [schema["function"]["name"] for schema in task.tool_schemas]
        self.answer = json.loads(await task.tool_handler("odd__t", {"text": "hello"}, task.trajectory_id))
        await task.tool_handler("terminal", {"command": "mkdir -p /app; echo hello >/app/out"}, task.trajectory_id)
        task.result.messages.append({"role": "assistant", "content": "Done."})
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self):
        return


async def test_a_tasks_server_runs_in_its_sandbox(runtime, tmp_path):
    pytest.importorskip("mcp")
    program = json.dumps((HERE / "odd_server.py").read_text())
    toml = f"""
[environment]
skills_dir = "/skills"
[[environment.mcp_servers]]
name = "odd"
transport = "stdio"
command = "python3"
args = ["-c", {program}, "normal"]
"""
    write_task(tmp_path / "task", toml, image=PYTHON)
    agent = Caller()
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert record["failure"] is None and record["reward"] == 1.0
    assert agent.answer == {"output": '{"text": "hello"}'} and "odd__t" in agent.offered
    assert agent.skills == "/skills"
