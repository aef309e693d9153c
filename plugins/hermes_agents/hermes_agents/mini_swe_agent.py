"""mini-swe-agent, a coding agent with one tool, bash."""

from __future__ import annotations

from hermes_agents.packages import PythonPackages, python
from hermes_agents.program import AgentProgram, ProgramAgent

_OPTIONS = {
    "agent.cost_limit": "0",
    "model.cost_tracking": "ignore_errors",
    "model.model_kwargs.custom_llm_provider": "openai",
    "model.model_kwargs.api_base": "{url}/v1",
    "model.model_kwargs.api_key": "{key}",
}


class MiniSweAgent(ProgramAgent):
    """Runs `mini`, whose only tool is bash."""

    program = AgentProgram(
        name="mini-swe-agent",
        version="2.4.6",
        package=PythonPackages(("mini-swe-agent=={version}",)),
        argv=(
            *python("from minisweagent.run.mini import app; app()"),
            *("--model", "{model}", "--model-class", "litellm"),
            *("--task={prompt}", "--exit-immediately", "--yolo", "-c", "mini"),
            *(word for key, value in _OPTIONS.items() for word in ("-c", f"{key}={value}")),
            "{args}",
        ),
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": "{folder}/mini",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # otherwise it repeats every failed call for minutes
        },
        tried="2.4.6: solves the demo tasks on `local` and `docker`, without a network",
    )
