"""A task whose phases reach different hosts, with servers that the profile permits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hermes_core.errors import PolicyError
from hermes_core.runtime import Runtime
from tests.harbor.harbor_tasks import PYTHON, Shell, roll_out, roll_out_here, write_task
from tests.sandbox.egress.servers import hello, serving

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

LOAD = "curl -sS -o /dev/null -w '%{http_code}' --noproxy '' "
"""Prints a status. The test's hosts are addresses of the loopback, which programs reach without a proxy otherwise."""

LEFT_BEHIND = "(while sleep 0.05; do curl -s --noproxy '' $HTTP_PROXY >/dev/null; done) & "
"""A process that outlives the agent, and would use the port of the verification."""


def write_networks_task(folder: Path, agent: int, tests: int) -> None:
    """The tests score one if they reach their own host, and not the agent's."""
    other = f"[ $({LOAD} http://127.0.0.1:{agent}/) = 403 ]"
    check = f"[ $({LOAD} http://127.0.0.2:{tests}/) = 200 ] && {other} && grep -qx '200 403' /app/out"
    write_task(
        folder,
        """
[environment]
network_mode = "no-network"
[agent]
network_mode = "allowlist"
allowed_hosts = ["127.0.0.1"]
[verifier]
network_mode = "allowlist"
allowed_hosts = ["127.0.0.2"]
""",
        test=f"if {check}; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n",
        image=PYTHON,
    )


async def test_each_phase_reaches_its_own_hosts(host_runtime: Runtime, tmp_path: Path) -> None:
    async with serving(hello) as agents, serving(hello, host="127.0.0.2") as tests:
        write_networks_task(tmp_path / "task", agents, tests)
        shell = Shell(
            LEFT_BEHIND + f"echo $({LOAD} http://127.0.0.1:{agents}/) $({LOAD} http://127.0.0.2:{tests}/) >/app/out"
        )
        permits = {"network": "allow", "allowed_hosts": [f"127.0.0.1:{agents}", f"127.0.0.2:{tests}"]}
        for config, reward in ((permits, 1.0), ({}, 0.0), ({"network": "none"}, 0.0)):
            records = await roll_out_here(host_runtime, tmp_path / "task", shell, backend_config=config)
            assert records["task"]["reward"] == reward, (config, records["task"])
            network = records["task"].get("network")
            if reward:
                assert network["agent"]["reached"] == {f"127.0.0.1:{agents}": 1}
                assert network["agent"]["refused"][f"127.0.0.2:{tests}"] == 1
                assert network["verify"]["reached"] == {f"127.0.0.2:{tests}": 1}
                assert network["verify"]["refused"] == {f"127.0.0.1:{agents}": 1}
            elif config:  # without a network, an item gets none
                assert network is None
            else:  # the loopback of the driver's host is not an item's to open
                assert network["agent"]["reached"] == network["verify"]["reached"] == {}


@pytest.mark.full
async def test_a_list_of_hosts_in_a_container(runtime: Runtime, tmp_path: Path) -> None:
    task = '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.org"]'
    check = 'echo 1 >/logs/verifier/reward.txt; [ -n "$HTTP_PROXY" ] || echo 0 >/logs/verifier/reward.txt\n'
    write_task(tmp_path / "task", task, test=check, image=PYTHON)
    records = await roll_out(runtime, tmp_path, backend_config={"cap_add": ["SYS_ADMIN"]})
    assert records["task"]["reward"] == 1.0, records["task"]
    with pytest.raises(PolicyError, match="use level private-root"):
        await roll_out(runtime, tmp_path, isolation="dedicated")
