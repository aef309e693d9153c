"""Google's Gemini CLI."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_agents.program import AgentProgram, ProgramAgent

# The tools that a provider would run are left out, and so are sub-agents. Loop detection is off, because from the
# thirtieth turn on it would ask the model whether the conversation is in a loop.
_SETTINGS = """\
{"security": {"auth": {"selectedType": "gemini-api-key"}}, "telemetry": {"enabled": false},
 "general": {"enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false},
 "tools": {"exclude": ["google_web_search", "web_fetch", "invoke_agent"]},
 "model": {"disableLoopDetection": true, "skipNextSpeakerCheck": true}, "mcpServers": {{mcp}}}
"""

_ARGV = (
    *("{install}/node", "{install}/node_modules/@google/gemini-cli/bundle/gemini.js"),
    *("--yolo", "-o", "json", "--model", "{model}", "{args}"),
)


class GeminiCli(ProgramAgent):
    """Runs `gemini`. The package contains node.

    It can't go on with a conversation: a resumed conversation begins differently, and has some tool results twice.
    """

    program = AgentProgram(
        name="gemini-cli",
        version="0.61.0",
        package=NpmPackages(
            ("@google/gemini-cli@{version}", "node-linux-{cpu}@22.23.5"),
            keep={"node": "node_modules/node-linux-{cpu}/bin/node", "node_modules": "node_modules"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        env={
            "GEMINI_CLI_HOME": "{folder}",
            "GEMINI_CLI_NO_RELAUNCH": "1",  # otherwise it starts itself again, with more memory
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        files={".gemini/settings.json": _SETTINGS},
        mcp=(
            '"{server}": {"httpUrl": "{url}/mcp/{server}", "headers": {"Authorization": "Bearer {key}"}, '
            '"timeout": 7200000, "trust": true}'
        ),
        dialect="gemini",
        tried="0.61.0: solves the demo tasks on `local` and `docker`, without a network",
    )
