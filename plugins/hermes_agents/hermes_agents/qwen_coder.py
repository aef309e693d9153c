"""Qwen Code, which Harbor calls qwen-coder."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_agents.program import AgentProgram, ProgramAgent

# Its memory is off: at the end, Qwen Code would ask in the same conversation what to remember, but its memory ends with
# the rollout.
_SETTINGS = """\
{"security": {"auth": {"selectedType": "openai"}}, "telemetry": {"enabled": false},
 "general": {"enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false},
 "memory": {"enableManagedAutoMemory": false, "enableManagedAutoDream": false}, "mcpServers": {{mcp}}}
"""

_ARGV = (
    *("{install}/node", "{install}/node_modules/@qwen-code/qwen-code/cli.js", "--auth-type", "openai"),
    *("--yolo", "-o", "json", "{args}"),
)


class QwenCoder(ProgramAgent):
    """Runs `qwen`. The package contains node."""

    program = AgentProgram(
        name="qwen-coder",
        version="0.24.4",
        package=NpmPackages(
            ("@qwen-code/qwen-code@{version}", "node-linux-{cpu}@22.23.5"),
            keep={"node": "node_modules/node-linux-{cpu}/bin/node", "node_modules": "node_modules"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        again=(*_ARGV, "--continue"),
        env={
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": "{folder}/settings.json",
            "QWEN_HOME": "{folder}/qwen",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",  # answers are only sent when they are complete
            "QWEN_STREAM_MAX_LIFETIME_MS": "0",
        },
        files={"settings.json": _SETTINGS},
        instructions="qwen/QWEN.md",
        skills="qwen/skills",
        mcp=(
            '"{server}": {"httpUrl": "{url}/mcp/{server}", "headers": {"Authorization": "Bearer {key}"}, '
            '"timeout": 7200000, "trust": true, "alwaysLoadTools": true}'  # else the model must search for them
        ),
        tried="0.24.4: solves the demo tasks on `local` and `docker`, without a network",
    )
