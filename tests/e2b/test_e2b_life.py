"""The life of E2B's sandboxes: what is asked for, how they are found again, kept alive, taken over and ended."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import PolicyError, SandboxLost
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry
from tests.e2b.conftest import E2bEmulator
from tests.support.requirements import ROOT

Spec = Callable[..., SandboxSpec]
HERMES = (sys.executable, "-c", "from hermes_core.cli.main import main; main()")


def asked(emulator: E2bEmulator) -> dict[str, Any]:
    """Return the body of the last creation."""
    found: dict[str, Any] = emulator.calls("create")[-1]["asked"]
    return found


async def run(sandbox: Sandbox, script: str) -> bytes:
    channel = await sandbox.open(["sh", "-c", script])
    output = b""
    while piece := await channel.read(1 << 16):
        output += piece
    await channel.aclose()
    return output


async def test_what_a_profile_says_is_asked_for(backend: Any, spec: Spec, emulator: E2bEmulator, owner: str) -> None:
    sandbox = await backend.create(
        spec(image="python", orphan_ttl_s=100, max_lifetime=1800, allow_out=["pypi.org"], deny_out=["0.0.0.0/0"])
    )
    body = asked(emulator)
    assert (body["templateID"], body["timeout"]) == ("python", 200)
    assert (body["secure"], body["autoPause"]) == (True, False), "AgentENV's defaults are open sandboxes that pause"
    assert body["network"] == {"allowOut": ["pypi.org"], "denyOut": ["0.0.0.0/0"]}
    assert body["envVars"] == {"OF_THE_SPEC": "yes"}
    assert body["metadata"]["hermes-rl.owner"] == owner and body["metadata"]["hermes-rl.isolation"] == "user"
    assert sandbox.lifetime_s == 1800
    assert await run(sandbox, "id -u; cat /proc/sys/kernel/sem /proc/sys/kernel/shmmni; ls -d /data") == (
        b"0\n0\t0\t0\t0\n0\n/data\n"
    )
    await backend.create(spec(network="none"))
    assert asked(emulator)["allow_internet_access"] is False


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cpu": 2}, "cpu"),
        ({"memory": 512}, "memory"),
        ({"image": ""}, "must name a template"),
        ({"max_lifetime": 100_000}, "86400"),
        ({"network": "none", "deny_out": ["1.1.1.1"]}, "leave one of them out"),
        ({"network": "allow", "allowed_hosts": ["pypi.org"], "deny_out": ["1.1.1.1"]}, "leave one of them out"),
        ({"allow_out": ["pypi.org"]}, "deny_out: \\[0.0.0.0/0\\]"),
        ({"template": "base"}, "template"),
    ],
)
async def test_wrong_settings_say_what_to_do(e2b_sdk: None, wrong: dict[str, Any], said: str) -> None:
    from hermes_e2b.backend import E2bBackend
    from hermes_e2b.config import E2bConfig

    from hermes_core.errors import HermesError
    from hermes_core.sandbox.pool.profile_check import check_profile

    with pytest.raises(HermesError, match=said):
        config = E2bConfig.from_dict("training", wrong)
        check_profile(E2bBackend(), Isolation.USER, config, prepares=False)


def test_timeouts_of_e2b_follow_the_time_to_live(e2b_sdk: None) -> None:
    from hermes_e2b.config import E2bConfig

    found = [E2bConfig(orphan_ttl_s=ttl, max_lifetime=900).timeout_s for ttl in (1, 30, 31.2, 300, 5000)]
    assert found == [60, 60, 63, 600, 900]


async def test_a_creation_id_is_one_sandbox_of_one_level(backend: Any, spec: Spec) -> None:
    wanted = spec()
    first, second = await asyncio.gather(backend.create(wanted), backend.create(wanted))
    assert first.id == second.id
    with pytest.raises(PolicyError, match="'user', not 'dedicated'"):
        await backend.create(spec(Isolation.DEDICATED, creation_id=wanted.creation_id))
    assert await first.status() is SandboxStatus.RUNNING
    await first.terminate()
    assert (await backend.create(wanted)).id != first.id


async def test_two_drivers_that_create_at_once_get_the_same_sandbox(
    backend: Any, spec: Spec, emulator: E2bEmulator, owner: str
) -> None:
    from hermes_e2b.backend import E2bBackend

    other, kills = E2bBackend(), len(emulator.calls("kill"))
    emulator.fail("create", delay_s=1, times=2)  # so that each has looked before the other has made one
    wanted = spec()
    first, second = await asyncio.gather(backend.create(wanted), other.create(wanted))
    assert first.id == second.id
    assert [info.sandbox_id for info in await backend.list(owner)] == [first.id]
    assert len(emulator.calls("kill")) > kills, "two were made"
    await other.aclose()


async def test_a_sandbox_of_another_driver_is_attached_to(backend: Any, spec: Spec, emulator: E2bEmulator) -> None:
    from hermes_e2b.backend import E2bBackend

    made = await backend.create(spec(max_lifetime=600))
    other = E2bBackend()
    again = await other.attach(made.id)
    assert await run(again, "echo $OF_THE_SPEC") == b"yes\n"
    assert (again.uid_base, again.isolation, again.timeout_s) == (made.uid_base, "user", 120)
    assert 500 < again.lifetime_s <= 600
    emulator.pause(made.id)
    assert [info.status for info in await other.list()] == [SandboxStatus.ENDED]
    with pytest.raises(SandboxLost, match="no such sandbox runs"):
        await other.attach(made.id)
    await other.aclose()


async def test_lists_have_pages(backend: Any, spec: Spec, emulator: E2bEmulator, owner: str) -> None:
    emulator.set(page=2)
    made = await asyncio.gather(*(backend.create(spec()) for _ in range(5)))
    assert {info.sandbox_id for info in await backend.list(owner)} == {each.id for each in made}


async def test_sandboxes_of_a_living_driver_are_kept_alive_and_others_are_not(
    backend: Any, spec: Spec, emulator: E2bEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hermes_e2b.config

    monkeypatch.setattr(hermes_e2b.config, "LEAST_TIMEOUT_S", 6)
    sandbox = await backend.create(spec(orphan_ttl_s=3))
    beats = "mkdir -p /data/.hermes; while sleep 0.5; do date +%N >/data/.hermes/heartbeat; done"
    heart = await sandbox.open(["sh", "-c", beats])  # as a guest's, so that the watchdog does not end the sandbox
    emulator.fail("timeout", status=500)
    await asyncio.sleep(9)
    assert await sandbox.status() is SandboxStatus.RUNNING
    await backend.aclose()
    calls = len(emulator.calls("timeout"))
    await _until_gone(sandbox)
    assert len(emulator.calls("timeout")) == calls >= 2
    await heart.aclose()


async def _until_gone(sandbox: Sandbox) -> None:
    async with asyncio.timeout(30):
        while await sandbox.status() is not SandboxStatus.GONE:
            await asyncio.sleep(0.1)


async def test_the_end_of_the_main_process_ends_the_machine(backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec(orphan_ttl_s=1))
    began = time.monotonic()
    await _until_gone(sandbox)
    assert time.monotonic() - began < 20, "E2B's own timeout is a minute"


DRIVER = """
import asyncio, sys
from hermes_core import Isolation, Runtime
from hermes_core.tool_backend import ToolBackend
async def main():
    async with Runtime() as runtime:
        backend, owner, ttl = runtime.backend("e2b"), sys.argv[1], float(sys.argv[2])
        config = backend.config_class(slots_per_sandbox=2, min_sandboxes=2, max_sandboxes=2, orphan_ttl_s=ttl)
        tools = ToolBackend(
            backend, profiles={"default": config}, tools=runtime.tools, isolation=Isolation.USER, owner=owner
        )
        async with tools:
            await tools.acquire()
            print("ready", flush=True)
            await asyncio.sleep(1000)
asyncio.run(main())
"""


async def _kill_a_driver(owner: str, orphan_ttl_s: float) -> None:
    """Start a driver with two sandboxes, and kill it."""
    environment = os.environ | {"HERMES_PLUGINS": "e2b"}
    argv = (sys.executable, "-c", DRIVER, owner, str(orphan_ttl_s))
    driver = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, env=environment)
    assert driver.stdout is not None
    assert await driver.stdout.readline() == b"ready\n"
    driver.kill()
    await driver.wait()


async def test_a_killed_driver_leaves_nothing(backend: Any, owner: str) -> None:
    await _kill_a_driver(owner, 3)
    assert len(await backend.list(owner)) == 2
    async with asyncio.timeout(60):
        while await backend.list(owner):
            await asyncio.sleep(0.2)


async def test_reap_ends_what_a_killed_driver_left(
    backend: Any, emulator: E2bEmulator, owner: str, tmp_path: Path
) -> None:
    await _kill_a_driver(owner, 600)
    emulator.pause((await backend.list(owner))[0].sandbox_id)
    environment = os.environ | {"HERMES_PLUGINS": "e2b", "XDG_STATE_HOME": str(tmp_path)}
    reaping = await asyncio.create_subprocess_exec(
        *HERMES, "reap", "e2b", "--owner", owner, "--json", stdout=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    said, _ = await reaping.communicate()
    assert said.count(b'"outcome": "ended"') == 2, said
    assert await backend.list(owner) == []


async def test_slots_share_a_sandbox_at_each_level(backend: Any, owner: str) -> None:
    from hermes_e2b.config import E2bConfig

    for level in (Isolation.USER, Isolation.NAMESPACE):
        config = E2bConfig(slots_per_sandbox=2, min_sandboxes=0, max_sandboxes=1, reserve_slots=0)
        tools = ToolBackend(backend, profiles={"default": config}, tools=ToolRegistry(), isolation=level, owner=owner)
        async with tools:
            one, other = [await tools.acquire(name) for name in ("a", "b")]
            assert one.sandbox_id == other.sandbox_id and one.isolation == level.label
            await tools.commands(one).run("echo mine >file")
            assert "file" not in (await tools.commands(other).run("ls -R /data 2>/dev/null")).text
        assert await backend.list(owner) == []


async def test_a_list_of_hosts_is_kept_by_the_driver(backend: Any, emulator: E2bEmulator, owner: str) -> None:
    from hermes_e2b.config import E2bConfig

    host = emulator.url.removeprefix("http://")
    config = E2bConfig(network="allow", allowed_hosts=[host], min_sandboxes=0, max_sandboxes=1, reserve_slots=0)
    tools = ToolBackend(
        backend, profiles={"default": config}, tools=ToolRegistry(), isolation=Isolation.USER, owner=owner
    )
    async with tools, tools.lease() as slot:
        assert asked(emulator)["allow_internet_access"] is False
        ask = 'import urllib.request as u; print(u.urlopen("http://%s/_calls/none", timeout=10).read())'
        through = f"env -u no_proxy -u NO_PROXY python3 -c '{ask % host}'"  # the proxy is not asked for a loopback
        said = await tools.commands(slot).run(through)
        assert said.stdout == b"b'[]'\n", said
        assert b"refused" in (await tools.commands(slot).run(f"python3 -c '{ask % host}'")).stderr


def test_doctor_says_what_is_missing(e2b_sdk: None, tmp_path: Path) -> None:
    def doctor(**environment: str) -> dict[str, Any]:
        argv = [*HERMES, "doctor", "e2b", "--json"]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("E2B_")}
        given = {"HERMES_PLUGINS": "e2b", "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environment}
        out = subprocess.run(
            argv, stdout=subprocess.PIPE, text=True, env=kept | given, cwd=tmp_path, check=False
        ).stdout
        found: dict[str, Any] = json.loads(out)
        return found

    without_key = json.dumps(doctor())
    assert "there is no E2B API key" in without_key and "https://e2b.dev/dashboard" in without_key
    assert "does not answer" in json.dumps(doctor(E2B_API_KEY="x", E2B_API_URL="http://127.0.0.1:1"))


def test_every_part_of_the_sdk_that_its_documentation_does_not_mention_is_there(e2b_sdk: None) -> None:
    """Names what a new version of the SDK may have changed, before other tests fail in a way that is hard to read."""
    import inspect

    from connectrpc.errors import ConnectError
    from e2b import AsyncSandbox, ConnectionConfig
    from e2b.api.client.api.sandboxes import get_sandboxes_sandbox_id, post_sandboxes
    from e2b.api.client.models import NewSandbox, SandboxDetail
    from e2b.api.client_async import get_api_client
    from e2b.envd.client_async import create_rpc_client
    from e2b.envd.process import process_pb
    from e2b.envd.process.process_connect import ProcessClient
    from e2b.envd.rpc import handle_rpc_exception

    assert [*inspect.signature(create_rpc_client).parameters] == ["client_cls", "base_url", "config"]
    assert callable(get_api_client)
    assert callable(post_sandboxes.asyncio_detailed) and callable(get_sandboxes_sandbox_id.asyncio_detailed)
    assert {"start", "list", "send_input", "send_signal", "close_stdin"} <= set(dir(ProcessClient))
    assert process_pb.StartRequest(tag="x", stdin=True).tag == "x"
    cancelled = ConnectError.__new__(ConnectError)
    cancelled.__cause__ = asyncio.CancelledError()
    assert isinstance(handle_rpc_exception(cancelled), asyncio.CancelledError)
    connection = ConnectionConfig(extra_sandbox_headers={"X-Access-Token": "t"}, api_key="k", debug=False)
    assert connection.sandbox_headers["X-Access-Token"] == "t"
    assert connection.get_sandbox_url("id", "example.org") == "https://49983-id.example.org"
    assert {"kill", "list", "set_timeout"} <= set(dir(AsyncSandbox))
    assert {"envd_access_token", "domain", "metadata", "state", "started_at"} <= set(SandboxDetail.__annotations__)
    assert NewSandbox.from_dict({"templateID": "t", "secure": True}).secure is True


def test_names_of_settings_are_those_of_the_docs(e2b_sdk: None) -> None:
    from hermes_e2b.config import E2bConfig

    page = (ROOT / "docs" / "guides" / "e2b.md").read_text()
    for name in E2bConfig.__annotations__:
        assert f"`{name}`" in page, name
