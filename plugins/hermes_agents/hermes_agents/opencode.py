"""opencode."""

from __future__ import annotations

from hermes_agents.packages import NpmPackages
from hermes_agents.program import AgentProgram, ProgramAgent

# The agent `title` is switched off: before the first model call, it would ask `small_model` for a title.
_CONFIG = """\
{
  "model": "hermes/{model}", "small_model": "hermes/{model}", "permission": "allow", "autoupdate": false,
  "share": "disabled", "mcp": {{mcp}}, "agent": {"title": {"disable": true}},
  "provider": {"hermes": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
    "models": {"{model}": {"name": "{model}", "limit": {"context": 1000000, "output": 32000}}}
  }}
}
"""

_ARGV = ("{install}/opencode", "run", "--format", "json", "{args}")


class OpenCode(ProgramAgent):
    """Runs `opencode run`."""

    program = AgentProgram(
        name="opencode",
        version="1.18.33",
        package=NpmPackages(
            ("opencode-linux-{cpu}@{version}",),
            keep={"opencode": "node_modules/opencode-linux-{cpu}/bin/opencode"},
            needs=("glibc", "bash"),
        ),
        argv=_ARGV,
        again=(*_ARGV, "--continue"),
        env={
            "OPENCODE_CONFIG": "{folder}/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "XDG_CONFIG_HOME": "{folder}/config",
            "XDG_DATA_HOME": "{folder}/data",
            "XDG_STATE_HOME": "{folder}/state",
            "XDG_CACHE_HOME": "{folder}/cache",
        },
        files={"opencode.json": _CONFIG},
        instructions="config/opencode/AGENTS.md",
        skills="config/opencode/skills",
        mcp=(
            '"{server}": {"type": "remote", "url": "{url}/mcp/{server}", "oauth": false, '
            '"headers": {"Authorization": "Bearer {key}"}, "timeout": 7200000}'
        ),
        tried="1.18.33: solves the demo tasks on `local` and `docker`, without a network",
    )
