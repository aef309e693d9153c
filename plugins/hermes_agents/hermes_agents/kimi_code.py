"""Moonshot's Kimi Code."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_agents.program import AgentProgram, ProgramAgent

_ARGV = (
    *("{install}/node", "{install}/node_modules/@moonshot-ai/kimi-code/dist/main.mjs"),
    *("--output-format", "stream-json", "{args}", "--prompt={prompt}"),
)


class KimiCode(ProgramAgent):
    """Runs `kimi --prompt`. The package contains node."""

    program = AgentProgram(
        name="kimi-code",
        version="2.1.0",
        package=NpmPackages(
            ("@moonshot-ai/kimi-code@{version}", "node-linux-{cpu}@22.23.5"),
            keep={"node": "node_modules/node-linux-{cpu}/bin/node", "node_modules": "node_modules"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        files={"kimi/mcp.json": '{"mcpServers": {{mcp}}}'},
        instructions="kimi/AGENTS.md",
        skills="kimi/skills",
        mcp=(
            '"{server}": {"transport": "http", "url": "{url}/mcp/{server}", "toolTimeoutMs": 7200000, '
            '"headers": {"Authorization": "Bearer {key}"}}'
        ),
        env={
            "KIMI_CODE_HOME": "{folder}/kimi",
            "KIMI_MODEL_NAME": "{model}",
            "KIMI_MODEL_API_KEY": "{key}",
            "KIMI_MODEL_BASE_URL": "{url}/v1",
            "KIMI_MODEL_PROVIDER_TYPE": "openai",
            "KIMI_DISABLE_TELEMETRY": "1",
            "KIMI_CODE_NO_AUTO_UPDATE": "1",
        },
        tried="2.1.0: solves the demo tasks on `local` and `docker`, without a network",
    )
