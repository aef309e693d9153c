"""pi, a coding agent for the terminal."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_core import AgentProgram, ProgramAgent

_MODELS = """\
{"providers": {"hermes": {"baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "OPENAI_API_KEY", "models": [
  {"id": "{model}", "reasoning": false, "input": ["text"], "contextWindow": 1000000, "maxTokens": 32000}
]}}}
"""

_ARGV = (
    *("{install}/node", "{install}/node_modules/@mariozechner/pi-coding-agent/dist/cli.js"),
    *("-p", "--mode", "json", "--provider", "hermes", "--model", "{model}", "{args}"),
)


class Pi(ProgramAgent):
    """Runs `pi -p`. It brings its own node."""

    program = AgentProgram(
        name="pi",
        version="0.73.1",
        package=NpmPackages(
            ("@mariozechner/pi-coding-agent@{version}", "node-linux-{cpu}@22.23.5"),
            keep={"node": "node_modules/node-linux-{cpu}/bin/node", "node_modules": "node_modules"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        again=(*_ARGV, "--continue"),
        env={"PI_CODING_AGENT_DIR": "{folder}/pi", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={"pi/models.json": _MODELS},
        tried="0.73.1: solves the demo tasks on `local`, at `user` and `namespace`, without a network",
    )
