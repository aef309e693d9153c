"""aider, whose model writes changes as text and calls no tools."""

from __future__ import annotations

from hermes_agents.packages import PythonPackages, python
from hermes_agents.program import AgentProgram, ProgramAgent


class Aider(ProgramAgent):
    """Runs `aider --message`. The model calls no tools, but names files and writes changes as text."""

    program = AgentProgram(
        name="aider",
        version="0.86.2",
        package=PythonPackages(("aider-chat=={version}",)),
        argv=(
            *python("from aider.main import main; sys.exit(main())"),
            *("--yes-always", "--no-check-update", "--analytics-disable", "--no-auto-commits", "--no-gitignore"),
            *("--no-show-release-notes", "--no-show-model-warnings", "--no-pretty", "--no-fancy-input"),
            *("--model", "openai/{model}", "--message-file", "{prompt_file}", "{args}"),
        ),
        needs=("git",),
        env={"OPENAI_API_BASE": "{url}/v1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        tried="0.86.2: solves a task on `local`, at `user`",
    )
