"""Anthropic's Claude Code."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_core import MCP_SERVER, AgentProgram, ProgramAgent

_SMALL = (
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"),
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Variables that name models for certain work."""

_ARGV = (
    *("{install}/claude", "-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
    *("--bare", "--mcp-config", "{folder}/mcp.json", "--tools", "Bash,Edit,Read", "{args}"),
)


class ClaudeCode(ProgramAgent):
    """Runs `claude -p` with its tools Bash, Edit and Read. More arguments can offer others: `--tools default`."""

    program = AgentProgram(
        name="claude-code",
        version="2.1.332",
        package=NpmPackages(
            ("@anthropic-ai/claude-code-linux-{cpu}@{version}",),
            keep={"claude": "node_modules/@anthropic-ai/claude-code-linux-{cpu}/claude"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        again=(*_ARGV, "--continue"),
        env={
            "CLAUDE_CONFIG_DIR": "{folder}/claude",
            "IS_SANDBOX": "1",  # root may skip its questions
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ANTHROPIC_MODEL": "{model}",
            **dict.fromkeys(_SMALL, "{model}"),
        },
        env_when_answered={"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "DISABLE_PROMPT_CACHING": "1"},
        files={"mcp.json": '{"mcpServers": {{mcp}}}'},
        mcp=MCP_SERVER,
        dialect="anthropic",
        tried="2.1.332: solves the demo tasks on `local` and `docker`, without a network",
    )
