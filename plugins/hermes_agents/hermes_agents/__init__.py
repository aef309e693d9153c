"""Coding agents for hermes-rl, as programs in slots: the driver fetches them, and answers their model calls."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1

_ANY = ("a model endpoint", "the program in the sandbox")
_NPM = ("a model endpoint", "npm on the driver, once")
_PIP = ("a model endpoint", "pip on the driver, once", "glibc and the driver's Python in the sandbox")


@hookimpl
def hermes_register_agents(registry: Registrar) -> None:
    """Add the agents that run any program, and the agents for known programs, which have Harbor's names."""
    registry.add(
        "program",
        "hermes_agents.program:CommandAgent",
        summary="Runs any agent that is a program in the sandbox, and answers its model calls",
        requires=_ANY,
    )
    registry.add(
        "acp",
        "hermes_agents.acp:AcpAgent",
        summary="Runs any agent that speaks the Agent Client Protocol, and answers its model calls",
        requires=_ANY,
    )
    registry.add("codex", "hermes_agents.codex:Codex", summary="OpenAI's Codex: `codex exec`", requires=_NPM)
    registry.add(
        "claude-code",
        "hermes_agents.claude_code:ClaudeCode",
        aliases=("claude",),
        summary="Anthropic's Claude Code: `claude -p`",
        requires=(*_NPM, "glibc and bash in the sandbox"),
    )
    registry.add("pi", "hermes_agents.pi:Pi", summary="pi: `pi -p`", requires=(*_NPM, "glibc and bash in the sandbox"))
    registry.add(
        "mini-swe-agent",
        "hermes_agents.mini_swe_agent:MiniSweAgent",
        aliases=("mini",),
        summary="mini-swe-agent: `mini`",
        requires=_PIP,
    )
    registry.add("kimi-code", "hermes_agents.kimi_code:KimiCode", summary="Kimi Code: `kimi --prompt`", requires=_NPM)
    registry.add("opencode", "hermes_agents.opencode:OpenCode", summary="opencode: `opencode run`", requires=_NPM)
    registry.add(
        "qwen-coder",
        "hermes_agents.qwen_coder:QwenCoder",
        aliases=("qwen-code",),
        summary="Qwen Code: `qwen`",
        requires=_NPM,
    )
    registry.add(
        "hermes",
        "hermes_agents.hermes:Hermes",
        aliases=("hermes-agent",),
        summary="hermes-agent: `hermes chat`",
        requires=_PIP,
    )
    registry.add(
        "gemini-cli",
        "hermes_agents.gemini_cli:GeminiCli",
        aliases=("gemini",),
        summary="Google's Gemini CLI: `gemini`",
        requires=(*_NPM, "glibc and bash in the sandbox"),
    )
    registry.add("aider", "hermes_agents.aider:Aider", summary="aider: `aider --message`", requires=_PIP)
    registry.add(
        "terminus-2",
        "hermes_agents.terminus_2:Terminus2",
        summary="Terminus 2, Harbor's agent, which writes keys for a terminal",
        requires=(*_PIP, "Python 3.12 or newer", "tmux in the sandbox"),
    )
