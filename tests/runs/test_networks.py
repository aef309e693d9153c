"""Lists of hosts in the settings of a run, down to the record: each phase of a rollout has its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hermes_core.cli.options import merge_options
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.settings import Settings
from tests.sandbox.egress.servers import hello, serving

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

LOAD = "curl -sS -o /dev/null -w '%{http_code} ' --noproxy ''"


def test_the_command_line_has_lists_and_phases() -> None:
    written = {
        "network": "allow",
        "allowed_hosts": "a.org,[::1]:80",
        "denied_hosts": '["code-hosts"]',
        "verify_network.allowed_hosts": "b.org, *.b.org",
        "setup_network.network": "none",
    }
    config = SandboxConfig.from_dict("default", merge_options({}, written, SandboxConfig))
    assert (config.allowed_hosts, config.denied_hosts) == (("a.org", "[::1]:80"), ("code-hosts",))
    assert config.verify_network is not None and config.verify_network.allowed_hosts == ("b.org", "*.b.org")
    assert config.setup_network is not None and not config.setup_network.allowed_hosts


@pytest.mark.usefixtures("isolates")
async def test_each_phase_of_a_rollout_has_its_network(tmp_path: Path) -> None:
    async with serving(hello) as one, serving(hello) as two, serving(hello) as three:
        ports = (one, two, three)
        load = "; ".join(f"{LOAD} http://127.0.0.1:{port}/" for port in ports)
        row = {
            "id": "task",
            "prompt": "Load them.",
            "setup": f"({load}) >setup",
            "solution": f"({load}) >agent",
            "check": f"({load}) >$HOME/check; cat setup agent $HOME/check; [ \"$(cat $HOME/check)\" = '403 403 200 ' ]",
        }
        (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
        config = {
            "network": "allow",
            "allowed_hosts": [f"127.0.0.1:{two}"],
            "setup_network": {"allowed_hosts": [f"127.0.0.1:{one}"]},
            "verify_network": {"allowed_hosts": [f"127.0.0.1:{three}"]},
        }
        records: list[dict[str, Any]] = []
        async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
            await run_rollouts(
                runtime,
                "tasks",
                "oracle",
                env={"dataset_name": str(tmp_path / "tasks.jsonl")},
                backend="local",
                backend_config=config,
                on_record=lambda record: records.append(dict(record)),
            )
    (record,) = records
    assert record["reward"] == 1.0, record
    allowed = dict(zip(("setup", "agent", "verify"), ports, strict=True))
    for phase, port in allowed.items():
        traffic = record["network"][phase]
        assert traffic["reached"] == {f"127.0.0.1:{port}": 1}
        assert traffic["refused"] == {f"127.0.0.1:{other}": 1 for other in ports if other != port}
