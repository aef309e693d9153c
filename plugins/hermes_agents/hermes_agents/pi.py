"""pi, a coding agent for the terminal."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_agents.program import AgentProgram, ProgramAgent

_MODELS = """\
{"providers": {"hermes": {"baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "{key}", "models": [
  {"id": "{model}", "reasoning": false, "input": ["text"], "contextWindow": 1000000, "maxTokens": 32000}
]}}}
"""

_ARGV = (
    *("{install}/node", "{install}/node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"),
    *("-p", "--mode", "json", "--provider", "hermes", "--model", "{model}", "{args}"),
)


class Pi(ProgramAgent):
    """Runs `pi -p`. The package contains node."""

    program = AgentProgram(
        name="pi",
        version="1.6.0",
        package=NpmPackages(
            ("@earendil-works/pi-coding-agent@{version}", "node-linux-{cpu}@22.23.5"),
            keep={"node": "node_modules/node-linux-{cpu}/bin/node", "node_modules": "node_modules"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        again=(*_ARGV, "--continue"),
        env={"PI_CODING_AGENT_DIR": "{folder}/pi", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={"pi/models.json": _MODELS, "pi/mcp.json": '{"mcpServers": {{mcp}}}'},
        instructions="pi/AGENTS.md",
        skills="pi/skills",
        mcp=(  # without `direct`, the model reaches the tools only from scripts
            '"{server}": {"url": "{url}/mcp/{server}", "headers": {"Authorization": "Bearer {key}"}, '
            '"exposure": "direct", "timeout": 7200}'
        ),
        tried="1.6.0: solves the demo tasks on `local` and `docker`, without a network",
    )
