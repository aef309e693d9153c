"""Terminus 2, Harbor's own agent."""

from __future__ import annotations

from hermes_agents.packages import PythonPackages, python
from hermes_agents.program import AgentProgram, ProgramAgent

# Harbor runs this agent outside of the sandbox in which its commands run. Here the agent runs in the sandbox itself.
_RUN = """\
import asyncio, os, pathlib, subprocess, sys
from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.trial.paths import EnvironmentPaths

class Slot:
    default_user = None
    session_id = "slot"

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd, env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        said, failed = output.decode(errors="replace"), errors.decode(errors="replace")
        return ExecResult(stdout=said, stderr=failed, return_code=process.returncode)

async def main():
    folder = pathlib.Path("{folder}")
    EnvironmentPaths.agent_dir = pathlib.PurePosixPath(folder)
    agent = Terminus2(
        folder, "{model}", api_base="{url}/v1", record_terminal_session=False,
        llm_kwargs={"custom_llm_provider": "openai", "api_key": "{key}"},
    )
    await agent.setup(Slot())
    await agent.run(sys.stdin.read(), Slot(), AgentContext())

asyncio.run(main())
"""


class Terminus2(ProgramAgent):
    """Runs Harbor's agent in the slot. The model calls no tools, but writes keys for a terminal as JSON text."""

    program = AgentProgram(
        name="terminus-2",
        version="0.26.0",
        package=PythonPackages(("harbor=={version}",), oldest=(3, 12)),
        argv=(*python("import runpy; runpy.run_path(sys.argv.pop(1))"), "{folder}/run.py", "{args}"),
        needs=("bash", "tmux"),
        env={"TMUX_TMPDIR": "{folder}", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        files={"run.py": _RUN},
        tried="0.26.0: solves a task on `local`, at `user` and `namespace`, with Python 3.13",
    )
