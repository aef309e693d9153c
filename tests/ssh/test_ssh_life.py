"""Sandboxes on hosts: made once, kept through lost connections, gone without a trace; pools of hosts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hermes_ssh.backend import SshBackend
from hermes_ssh.config import SshConfig

from hermes_core.errors import ChannelLost, ConfigError, PolicyError, ProvisionError
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from hermes_core.sandbox.pool.profile_check import check_profile
from hermes_core.tool_backend import ToolBackend

Maker = Callable[..., AbstractAsyncContextManager[ToolBackend]]


PACKAGES = "find / -name proc -prune -o -path '*-packages/*' -print 2>/dev/null | grep -v -e -packages/pip"
"""What a slot can read of the packages that the host's Pythons have installed, but for pip."""


def spec_of(config: SshConfig, level: Isolation = Isolation.NAMESPACE, creation_id: str | None = None) -> SandboxSpec:
    return SandboxSpec(
        creation_id=creation_id or uuid.uuid4().hex,
        owner="me",
        config=config,
        isolation=level,
    )


@pytest.fixture
async def backend() -> AsyncIterator[SshBackend]:
    backend = SshBackend()
    yield backend
    await backend.aclose()


async def bash(backend: ToolBackend, slot: Any, command: str, timeout_s: float = 60) -> Any:
    (result,) = await backend.execute_batch([(slot, "bash", {"command": command})], timeout_s=timeout_s)
    return result


async def until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


# --- one sandbox ---------------------------------------------------------------------------------------------------


async def test_commands_files_and_nothing_left(server: Any, tool_backend: Maker, marked: Any, leak_check: None) -> None:
    async with tool_backend(**server.config()) as backend:
        slot = await backend.acquire("one")
        assert slot.isolation == "namespace"
        ran = await bash(backend, slot, "id -u; echo err >&2; cat /proc/1/comm; exit 7")
        assert ran.metadata["exit_code"] == 7 and "err" in ran.output + ran.error
        wrote, read = await backend.execute_batch(
            [
                (slot, "write_file", {"path": "a b", "content": "ä\n"}),
                (slot, "bash", {"command": "sleep 0.3; cat 'a b'"}),
            ]
        )
        assert wrote.success and "ä" in read.output
        assert marked(slot.sandbox_id)
        await bash(backend, slot, "setsid sleep 1000 & nohup sleep 1000 & disown -a")
        sandbox = slot.sandbox_id
        await backend.release(slot, reset_workspace=True)
        again = await backend.acquire("two")
        assert (await bash(backend, again, "ls -A; pgrep sleep")).output.strip() == ""
    assert marked(sandbox) == []
    await until(lambda: server.connections() == [])


@pytest.mark.parametrize("level", ["shared", "user", "namespace"])
async def test_every_level_that_an_ordinary_account_has(server: Any, tool_backend: Maker, level: str) -> None:
    async with tool_backend(level, **server.config()) as backend:
        slot = await backend.acquire("one")
        assert (await bash(backend, slot, "echo hello")).output.strip() == "hello"
        assert slot.isolation == ("shared" if level == "shared" else "namespace")
        name = server.account if level == "shared" else "agent"
        assert (await bash(backend, slot, "id -un; id -gn")).output.split() == [name, name]


@pytest.mark.parametrize("level", ["user", "namespace"])
async def test_root_s_account_gives_each_slot_a_user(
    make_server: Callable[..., Any], tool_backend: Maker, tmp_path: Path, level: str
) -> None:
    (tmp_path / "authorized").write_text(Path(os.environ["HERMES_TEST_SSH_CONFIG"]).with_name("client.pub").read_text())
    server = make_server(AllowUsers="root", AuthorizedKeysFile=str(tmp_path / "authorized"), StrictModes="no")
    lists = [Path("/etc/passwd"), Path("/etc/group")]
    before = [path.read_bytes() for path in lists]
    async with tool_backend(level, user="root", **server.config()) as backend:
        slots = [await backend.acquire(name) for name in ("one", "two")]
        ids = [(await bash(backend, slot, "id -u")).output.strip() for slot in slots]
        assert len(set(ids)) == 2 and all(int(uid) > 20000 for uid in ids)
        assert {slot.isolation for slot in slots} == {level}
        names = [(await bash(backend, slot, 'id -un; id -gn; echo "$USER"')).output.split() for slot in slots]
        assert names == [[name] * 3 for name in (["agent0", "agent1"] if level == "user" else ["agent", "agent"])]
        assert [path.read_bytes() for path in lists] == before
        await bash(backend, slots[0], "echo secret > mine; chmod 644 mine")
        assert "secret" not in (await bash(backend, slots[1], f"cat {slots[0].workspace_dir}/mine")).output
        assert (await bash(backend, slots[0], PACKAGES)).output.split() == []


async def test_what_a_slot_sees_of_the_host(server: Any, tool_backend: Maker, place: Path) -> None:
    async with tool_backend(**server.config()) as backend:
        one, two = await backend.acquire("one"), await backend.acquire("two")
        home = f"/home/{server.account}"
        assert (await bash(backend, one, f"ls -d {home} /root /home /work {place}")).metadata["exit_code"] == 2
        await bash(backend, two, "echo secret > mine; sleep 1000 & disown")
        seen = (await bash(backend, one, f"cat {two.workspace_dir}/mine; ps ax; ls /tmp")).output
        assert "secret" not in seen and "sleep 1000" not in seen
        assert (await bash(backend, one, "env")).output.count("SSH_") == 0
        assert (await bash(backend, one, PACKAGES)).output.split() == []


async def test_the_last_sandbox_takes_its_directory_with_it(
    server: Any, backend: SshBackend, place: Path, marked: Any
) -> None:
    config = SshConfig(**server.config(directory=str(place)))
    spec = spec_of(config)
    one, other = await asyncio.gather(backend.create(spec), backend.create(spec_of(config)))
    assert {info.sandbox_id for info in await backend.list("me")} == {one.id, other.id}
    await backend.terminate_id(one.id)
    assert await one.status() is SandboxStatus.GONE
    attached = await backend.attach(other.id)
    assert (attached.id, attached.workspace_base) == (other.id, other.workspace_base)
    await other.terminate()
    assert marked(one.id) + marked(other.id) == [] and not place.exists()


async def test_a_channels_ends(server: Any, backend: SshBackend, place: Path) -> None:
    sandbox = await backend.create(spec_of(SshConfig(**server.config(directory=str(place)))))
    killed = await sandbox.open(["sh", "-c", "kill -9 $$"])
    assert await killed.wait() == 128 + 9
    await killed.aclose()
    cut = await sandbox.open(["sleep", "1000"])
    server.cut()
    with pytest.raises(ChannelLost):
        await cut.read(1)
    with pytest.raises(ChannelLost):
        await cut.wait()
    await cut.aclose()
    await sandbox.terminate()


@pytest.mark.parametrize("key", ["image", "cpu", "memory"])
async def test_what_an_account_on_a_host_can_not_give(server: Any, backend: SshBackend, key: str) -> None:
    config = SshConfig(**server.config(**{key: "debian" if key == "image" else 1}))
    with pytest.raises(PolicyError, match=f"sets {key}, which backend 'ssh' can't give"):
        check_profile(backend, Isolation.USER, config, prepares=False)


async def test_no_host_is_named(backend: SshBackend) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        await backend.create(spec_of(SshConfig()))


async def test_a_directory_that_others_can_write_to(server: Any, backend: SshBackend) -> None:
    with pytest.raises(PolicyError, match=r"host 'test': the directory /var/tmp"):
        await backend.create(spec_of(SshConfig(**server.config(directory="/var/tmp"))))


async def test_a_host_that_allows_no_namespaces(make_server: Callable[..., Any], backend: SshBackend) -> None:
    # As on such a host: the limits of the user namespace that is made here hold for what is started in it.
    limit = 'for limit in /proc/sys/user/max_*_namespaces; do echo 0 > $limit; done; eval "$SSH_ORIGINAL_COMMAND"'
    server = make_server(ForceCommand=f"exec unshare --user --map-root-user sh -c '{limit}'")
    place = f"/var/tmp/hermes-none-{uuid.uuid4().hex[:8]}"
    config = SshConfig(**server.config(directory=place))
    for level in (Isolation.USER, Isolation.NAMESPACE):
        with pytest.raises(PolicyError, match=rf"'test': .*isolation '{level.label}': .*unshare .*No space"):
            await backend.create(spec_of(config, level))
    sandbox = await backend.create(spec_of(config, Isolation.SHARED))
    assert sandbox.workspace_base.startswith(place)
    await sandbox.terminate()
    assert not Path(place).exists()


# --- lost connections ----------------------------------------------------------------------------------------------


async def test_cuts_in_the_middle_of_commands(server: Any, tool_backend: Maker) -> None:
    line = "printf 'line %d %0100d\\n' $i $i; [ $((i % 200)) -gt 0 ] || sleep 0.3"
    script = f"echo begun >> ran; for i in $(seq 2000); do {line}; done; echo end"
    expected = "".join(f"line {i} {i:0100d}\n" for i in range(1, 2001)) + "end\n"
    async with tool_backend(**server.config()) as backend:
        slots = [await backend.acquire(f"t{i}") for i in range(3)]
        running = True

        async def cutter() -> None:
            while running:
                await asyncio.sleep(1)
                server.cut()

        async with asyncio.TaskGroup() as group:
            cutting = group.create_task(cutter())
            for _ in range(2):
                results = await backend.execute_batch(
                    [(slot, "bash", {"command": f"({script}) | tee out | sha256sum"}) for slot in slots], timeout_s=60
                )
                for result in results:
                    assert result.output.split()[0] == hashlib.sha256(expected.encode()).hexdigest(), result
            running = False
            cutting.cancel()
        for slot in slots:
            assert (await bash(backend, slot, "wc -l < ran")).output.strip() == "2"
            read = await bash(backend, slot, "cat out")
            assert read.error_kind is None


async def test_a_silent_connection_is_noticed(server: Any, tool_backend: Maker) -> None:
    async with tool_backend(keepalive_s=1, **server.config()) as backend:
        slot = await backend.acquire("one")
        running = asyncio.create_task(bash(backend, slot, "sleep 2; echo through"))
        await asyncio.sleep(0.5)
        frozen = server.freeze()
        began = time.monotonic()
        try:
            result = await running
            took = time.monotonic() - began
        finally:
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert result.output.strip() == "through" and took < 12, took


async def test_a_host_that_is_away_for_a_while(server: Any, tool_backend: Maker) -> None:
    async with tool_backend(orphan_ttl_s=20, **server.config()) as backend:
        slot = await backend.acquire("one")
        running = asyncio.create_task(bash(backend, slot, "sleep 3; echo still here"))
        await asyncio.sleep(0.5)
        server.stop()
        await asyncio.sleep(4)
        server.start()
        assert (await running).output.strip() == "still here"


async def test_a_host_that_stays_away(server: Any, tool_backend: Maker, marked: Any, place: Path) -> None:
    async with tool_backend(orphan_ttl_s=4, acquire_timeout_s=5, **server.config()) as backend:
        slot = await backend.acquire("one")
        sandbox = slot.sandbox_id
        server.stop()
        result = await bash(backend, slot, "true")
        assert result.error_kind == "infra"
        await until(lambda: marked(sandbox) == [] and not place.exists())


async def test_a_driver_that_is_killed_leaves_nothing(server: Any, tmp_path: Path, marked: Any, place: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(
        "import asyncio, json, sys\n"
        "from hermes_core.runtime import Runtime\n"
        "import hermes_ssh\n"
        "from hermes_core.settings import Settings\n"
        "async def main():\n"
        "    async with Runtime(Settings(), plugins=[hermes_ssh], load_entry_points=False) as runtime:\n"
        "        config = json.loads(sys.argv[1])\n"
        "        level = 'namespace'\n"
        "        async with runtime.tool_backend('ssh', isolation=level, config=config, profiles={}) as backend:\n"
        "            slot = await backend.acquire('one')\n"
        "            await backend.execute_batch([(slot, 'bash', {'command': 'setsid sleep 999 & disown; touch f'})])\n"
        "            print(slot.sandbox_id, flush=True)\n"
        "            await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    config = json.dumps(server.config(orphan_ttl_s=4, directory=str(place), max_sandboxes=1))
    with subprocess.Popen([sys.executable, str(program), config], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        sandbox = (await asyncio.to_thread(driver.stdout.readline)).strip()
        assert sandbox and len(marked(sandbox)) >= 3
        driver.kill()
    await until(lambda: marked(sandbox) == [] and not place.exists(), 15)


async def test_create_finds_what_a_lost_answer_made(server: Any, backend: SshBackend, place: Path) -> None:
    config = SshConfig(**server.config(directory=str(place)))
    spec = spec_of(config)

    async def cutter() -> None:
        for _ in range(3):
            await asyncio.sleep(0.25)
            server.cut()

    async def created() -> Sandbox:
        while True:
            try:
                return await backend.create(spec)
            except ProvisionError as error:  # cut while it logged in: the pool calls again, too
                assert error.retryable
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        group.create_task(cutter())
        sandbox = await created()
    assert [info.sandbox_id for info in await backend.list()] == [sandbox.id]
    await sandbox.terminate()


async def test_create_after_an_answer_was_lost_and_the_host_was_gone(
    server: Any, backend: SshBackend, place: Path
) -> None:
    spec = spec_of(SshConfig(**server.config(directory=str(place))))
    making = asyncio.create_task(backend.create(spec))
    while not place.exists():
        await asyncio.sleep(0.005)
    server.freeze()  # its answer does not come through
    await asyncio.sleep(1)
    server.stop()
    with pytest.raises(ChannelLost, match=r"and then: .*refused"):  # not that there was never a connection
        await making
    server.start()
    sandbox = await backend.create(spec)
    assert [info.sandbox_id for info in await backend.list()] == [sandbox.id]
    await sandbox.terminate()


async def test_the_sandbox_is_killed(server: Any, tool_backend: Maker, marked: Any) -> None:
    async with tool_backend(**server.config()) as backend:
        slot = await backend.acquire("one")
        running = asyncio.create_task(bash(backend, slot, "sleep 100"))
        await asyncio.sleep(0.5)
        for pid in marked(slot.sandbox_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert (await running).error_kind == "infra"
        again = await backend.acquire("two")
        assert (await bash(backend, again, "echo anew")).output.strip() == "anew"


async def test_cancelled_while_it_is_made(server: Any, tool_backend: Maker, place: Path) -> None:
    for pause in (0.05, 0.3, 0.6):
        async with tool_backend(min_sandboxes=0, **server.config()) as backend:
            acquiring = asyncio.create_task(backend.acquire("one"))
            await asyncio.sleep(pause)
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acquiring
        await until(lambda: not place.exists(), 40)


# --- sessions and hosts --------------------------------------------------------------------------------------------


async def test_no_more_sessions_than_the_server_allows(make_server: Callable[..., Any], tool_backend: Maker) -> None:
    server = make_server(MaxSessions="2", LogLevel="VERBOSE")
    async with tool_backend(max_sandboxes=5, min_sandboxes=5, slots_per_sandbox=1, **server.config()) as backend:
        slots = [await backend.acquire(f"t{i}") for i in range(4)]
        results = await backend.execute_batch([(slot, "bash", {"command": "echo $((6 * 7))"}) for slot in slots])
        assert [result.output.strip() for result in results] == ["42"] * 4
        assert len({slot.sandbox_id for slot in slots}) == 4


async def test_a_server_with_one_session_a_connection(make_server: Callable[..., Any], tool_backend: Maker) -> None:
    server = make_server(MaxSessions="1")
    async with tool_backend(max_sessions=1, **server.config()) as backend:
        slot = await backend.acquire("one")
        assert (await bash(backend, slot, "echo one")).output.strip() == "one"


async def test_one_connection_carries_all(server: Any, tool_backend: Maker) -> None:
    async with tool_backend(**server.config()) as backend:
        slots = [await backend.acquire(f"t{i}") for i in range(3)]
        await backend.execute_batch([(slot, "bash", {"command": "sleep 0.2"}) for slot in slots])
        assert server.log().count("Accepted publickey") == 1


async def test_two_hosts_share_the_load_and_one_fails(make_server: Callable[..., Any], tool_backend: Maker) -> None:
    one, two = make_server(), make_server()
    one.config_file.write_text(one.stanza("one") + two.stanza("two"))
    config = {"config_file": str(one.config_file), "hosts": ["one", "two"], "slots_per_sandbox": 2, "max_sandboxes": 4}
    async with tool_backend(min_sandboxes=2, orphan_ttl_s=4, retry_host_after_s=1, **config) as backend:
        slots = [await backend.acquire(f"t{i}") for i in range(3)]
        assert {slot.sandbox_id.partition("/")[0] for slot in slots} == {"one", "two"}
        two.stop()
        for slot in slots:
            outcome = await bash(backend, slot, "true")
            assert (outcome.error_kind == "infra") is slot.sandbox_id.startswith("two/"), outcome
            await backend.release(slot)
        again = [await backend.acquire(f"again{i}") for i in range(3)]
        assert {slot.sandbox_id.partition("/")[0] for slot in again} == {"one"}
        listed = [info.sandbox_id.partition("/")[0] for info in await backend.backend.list()]
        assert listed and set(listed) == {"one"}
        two.start()
        await asyncio.sleep(1.5)
        more = [await backend.acquire(f"more{i}") for i in range(3)]
        assert "two" in {slot.sandbox_id.partition("/")[0] for slot in more}


async def test_every_host_fails(make_server: Callable[..., Any], backend: SshBackend) -> None:
    server = make_server()
    server.config_file.write_text(server.stanza("one") + server.stanza("two"))
    server.stop()
    config = SshConfig(hosts=("one", "two"), config_file=str(server.config_file))
    with pytest.raises(ProvisionError, match=r"(?s)'one'.*'two'") as caught:
        await backend.create(spec_of(config))
    assert not caught.value.retryable  # neither has ever let us in
    found = await backend.check()
    assert not found.usable and len(found.details) == 2


async def test_the_doctor_says_what_an_account_can_give(server: Any, runtime_of: Callable[..., Any]) -> None:
    async with runtime_of(profiles={"far": server.config(), "other": {"image": "x"}}) as runtime:
        found = await runtime.backend("ssh").check()
    assert found.usable and "an ordinary account" in found.details[0] and "namespace" in found.details[0]
