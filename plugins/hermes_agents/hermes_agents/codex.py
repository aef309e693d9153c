"""OpenAI's Codex."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_agents.program import AgentProgram, ProgramAgent

# The time limit for silence must be longer than the longest answer, because answers are only sent when they are
# complete. Without `agents`, Codex offers no tools in a namespace, and has only one conversation.
_CONFIG = """\
model = "{model}"
model_provider = "hermes"
check_for_update_on_startup = false
web_search = "disabled"
mcp_servers = { {mcp} }

[model_providers.hermes]
name = "hermes"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 7200000

[analytics]
enabled = false

[agents]
enabled = false
"""

_BIN = "node_modules/@openai/codex/vendor/{machine}-unknown-linux-musl/bin"
_OPTIONS = ("--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "{args}", "-")


class Codex(ProgramAgent):
    """Runs `codex exec`. The image only has to have /bin/sh.

    For models whose names it knows, Codex offers one tool that runs JavaScript, which is in the second of its two
    files.
    """

    program = AgentProgram(
        name="codex",
        version="0.171.0",
        package=NpmPackages(
            ("@openai/codex@{version}-linux-{cpu}",),
            keep={name: f"{_BIN}/{name}" for name in ("codex", "codex-code-mode-host")},
        ),
        argv=("{install}/codex", "exec", *_OPTIONS),
        again=("{install}/codex", "exec", "resume", "--last", *_OPTIONS),
        env={"CODEX_HOME": "{folder}/codex"},
        files={"codex/config.toml": _CONFIG},
        instructions="codex/AGENTS.md",
        skills="codex/skills",
        mcp=(
            '{server} = { url = "{url}/mcp/{server}", http_headers = { Authorization = "Bearer {key}" }, '
            "tool_timeout_sec = 7200 }"
        ),
        dialect="responses",
        tried="0.171.0: solves the demo tasks on `local` and `docker`, without a network",
    )
