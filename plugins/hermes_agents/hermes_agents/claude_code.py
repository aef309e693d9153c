"""Anthropic's Claude Code."""

from __future__ import annotations

from dataclasses import replace

from hermes_agents.packages import NpmPackages
from hermes_agents.program import MCP_SERVER, AgentProgram, ProgramAgent
from hermes_core import AgentTask

_SMALL = (
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"),
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Environment variables that name the models for side tasks."""


def _argv(*mode: str) -> tuple[str, ...]:
    return (
        *("{install}/claude", "-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"),
        *("--mcp-config", "{folder}/mcp.json", "--append-system-prompt-file", "{folder}/instructions.md"),
        *(*mode, "{args}"),
    )


_ARGV = _argv("--bare", "--tools", "Bash,Edit,Read")
_SKILLED = _argv("--tools", "Bash,Edit,Read,Skill")
"""The arguments for a task with skills: `--bare` is left out, because with it the model does not learn about skills."""


class ClaudeCode(ProgramAgent):
    """Runs `claude -p` with its tools Bash, Edit and Read, and, for a task that has skills, Skill. The setting `args`
    can offer other tools: `--tools default`."""

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
            "IS_SANDBOX": "1",  # lets root skip the questions for permission
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ANTHROPIC_MODEL": "{model}",
            **dict.fromkeys(_SMALL, "{model}"),
        },
        env_when_answered={"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "DISABLE_PROMPT_CACHING": "1"},
        files={"mcp.json": '{"mcpServers": {{mcp}}}'},
        instructions="instructions.md",
        skills="claude/skills",
        mcp=MCP_SERVER,
        dialect="anthropic",
        tried="2.1.332: solves the demo tasks on `local` and `docker`, without a network",
    )

    def program_for(self, task: AgentTask) -> AgentProgram:
        """Return the program, with other arguments if the task has skills."""
        if task.skills is None:
            return self.program
        return replace(self.program, argv=_SKILLED, again=(*_SKILLED, "--continue"))
