"""Nous Research's hermes-agent."""

from __future__ import annotations

from hermes_agents.packages import PythonPackages, python
from hermes_agents.program import AgentProgram, ProgramAgent

# Lazy installs are off: otherwise hermes-agent tries to install packages at each start, and waits until pip gives up.
_CONFIG = """\
{"model": {"provider": "slot", "default": "{model}"}, "approvals": {"mode": "off"},
 "security": {"allow_lazy_installs": false},
 "mcp_servers": {{mcp}}, "auxiliary": {"title_generation": {"enabled": false}},
 "providers": {"slot": {"api": "{url}/v1", "api_key": "{key}", "discover_models": false}}}
"""

_ARGV = (*python("from hermes_cli.main import main; main()"), "--yolo", "chat", "--query={prompt}", "--quiet", "{args}")


class Hermes(ProgramAgent):
    """Runs `hermes chat`."""

    program = AgentProgram(
        name="hermes",
        version="0.19.0",
        package=PythonPackages(("hermes-agent[mcp]=={version}",)),
        argv=_ARGV,
        again=(*_ARGV, "--continue"),
        needs=("bash",),
        env={"HERMES_HOME": "{folder}/hermes"},
        files={"hermes/config.yaml": _CONFIG, "hermes/.no-bundled-skills": ""},
        skills="hermes/skills",
        mcp=(
            '"{server}": {"url": "{url}/mcp/{server}", "headers": {"Authorization": "Bearer {key}"}, "timeout": 7200}'
        ),
        tried="0.19.0: solves the demo tasks on `local` and `docker`, without a network",
    )
