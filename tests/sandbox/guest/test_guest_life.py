"""A guest's life: its driver's death and successors, its own death, its end, and what it leaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_core.errors import HermesError, InfraError, NoPythonError, PolicyError, SandboxLost
from hermes_core.sandbox.commands import PREPARE
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.guest_client.client import GuestClient
from hermes_core.sandbox.local import processes

ROOT = os.geteuid() == 0

pytestmark = pytest.mark.usefixtures("leak_check")


async def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


async def litter(rig, index):
    """Files everywhere, and processes that do not want to end."""
    slot = rig.client.commands(index)
    await slot.run(
        "mkdir -p a/b; touch a/b/f $HOME/f; chmod 000 a; (trap '' TERM HUP; exec setsid sleep 1000) & sleep 1000 &"
    )
    await slot.start("trap '' TERM; sleep 1000 & sleep 1000")
    if rig.level != "shared":
        await slot.run(f"touch /tmp/hermes-test-{rig.sandbox.id}-{index}")
    await rig.client.commands(PREPARE).run("mkdir -p shared/x private/y; touch shared/x/f private/y/f; sleep 1000 &")


def common_files(rig):
    return list(Path("/tmp").glob(f"hermes-test-{rig.sandbox.id}-*"))


# --- the end --------------------------------------------------------------------------------------------------------


async def test_ending_leaves_nothing(rigged, level):
    async with rigged(level) as rig:
        for _ in range(3):
            await litter(rig, await rig.index())
        await rig.client.reset_slot(1)
        began = time.monotonic()
        await rig.client.aclose(end_sandbox=True)
        assert time.monotonic() - began < 15
        assert rig.client.lost.is_set()
        assert await eventually(lambda: not processes.find_marked(rig.sandbox.id))
        assert not os.path.exists(rig.sandbox.workspace_base) and common_files(rig) == []
        assert Path(rig.sandbox.state_dir, "heartbeat").read_text().splitlines()[0] == "end"
        with pytest.raises(SandboxLost):
            await rig.client.open_slot(0)


async def test_without_a_driver_everything_ends(rigged, level):
    async with rigged(level, orphan_ttl_s=1.5) as rig:
        for _ in range(2):
            await litter(rig, await rig.index())
        await asyncio.sleep(2.0)
        assert (await rig.client.commands(0).run("true")).ok, "a driver that lives is heard, whatever it does"
        await rig.client.aclose()
        began = time.monotonic()
        assert await eventually(lambda: not processes.find_marked(rig.sandbox.id))
        assert 1.0 < time.monotonic() - began < 15
        assert not os.path.exists(rig.sandbox.workspace_base) and common_files(rig) == []
        assert Path(rig.sandbox.state_dir, "heartbeat").read_text().splitlines()[0] == "end"


async def test_the_heart_beats_while_a_driver_is_heard(rigged):
    async with rigged("shared", orphan_ttl_s=1.5) as rig:
        heartbeat = Path(rig.sandbox.state_dir, "heartbeat")
        beats = set()
        async with asyncio.timeout(60):
            while len(beats) < 5:
                beats.add(heartbeat.read_text().splitlines()[0])
                await asyncio.sleep(0.1)
        assert "end" not in beats


@pytest.mark.skipif(not ROOT, reason="mounting takes root")
async def test_a_full_disk_does_not_stop_the_heart(host_sandbox):
    sandbox = host_sandbox()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "none", sandbox.base], check=True)
    try:
        client = await GuestClient.start(sandbox, sandbox.settings("user", orphan_ttl_s=2.0))
        await client.open_slot(0)
        slot = client.commands(0)
        await slot.run("head -c 10000000 /dev/zero >f")
        heartbeat = Path(sandbox.state_dir, "heartbeat")
        before = heartbeat.read_text()
        async with asyncio.timeout(60):
            while heartbeat.read_text() == before:
                await asyncio.sleep(0.1)
        assert (await slot.run("echo fine")).text == "fine\n"
        assert (await slot.run("#" + "x" * 200_000 + "\necho long")).text == "long\n"
        await client.reset_slot(0)
        assert (await slot.run("echo x >f; cat f")).text == "x\n"
        await client.aclose(end_sandbox=True)
    finally:
        subprocess.run(["umount", "-l", sandbox.base], check=True)
        await sandbox.terminate()


# --- its death ------------------------------------------------------------------------------------------------------


async def test_a_killed_guest_is_noticed_at_once_and_takes_its_slots_along(rigged, level):
    async with rigged(level) as rig:
        index = await rig.index()
        await litter(rig, index)
        running = asyncio.ensure_future(rig.client.commands(index).run("sleep 1000"))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        os.kill(rig.guest_pid, 9)
        with pytest.raises(SandboxLost):
            await running
        await rig.client.lost.wait()
        assert time.monotonic() - began < 15
        with pytest.raises(SandboxLost, match="guest is dead"):
            await rig.client.reset_slot(index)
        assert await eventually(lambda: not processes.find_marked(rig.sandbox.id))
        for left in common_files(rig):  # outside of a sandbox of its own, nobody does
            left.unlink()


async def test_a_stopped_guest_is_lost_after_a_while(rigged):
    async with rigged("shared", orphan_ttl_s=1.5) as rig:
        await rig.index()
        pid = rig.guest_pid
        os.kill(pid, 19)
        try:
            with pytest.raises(SandboxLost):
                await asyncio.wait_for(rig.client.commands(0).run("true"), 15)
        finally:
            os.kill(pid, 18)


async def test_a_dead_guest_is_never_replaced_by_an_empty_one(rigged):
    """Its slots are gone: a client that would join goes without, and one that starts anew gets a new guest."""
    async with rigged("shared") as rig:
        await rig.index()
        os.kill(rig.guest_pid, 9)
        await rig.client.lost.wait()
        again = await GuestClient.start(rig.sandbox, rig.sandbox.settings("shared"))
        assert await again.open_slot(0)
        await again.aclose(end_sandbox=True)


async def test_an_ended_sandbox_is_not_started_again(rigged):
    async with rigged("shared") as rig:
        await rig.client.aclose(end_sandbox=True)
        with pytest.raises(InfraError):
            await GuestClient.start(rig.sandbox, rig.sandbox.settings("shared"))


async def test_an_ended_sandbox_is_lost(rigged):
    async with rigged("shared", orphan_ttl_s=5.0) as rig:
        await rig.index()
        rig.sandbox.reachable = rig.sandbox.running = False
        rig.sandbox.cut()
        with pytest.raises(SandboxLost, match="has ended"):
            async with asyncio.timeout(20):
                while True:  # the first may still get through the channel that is being cut
                    await rig.client.commands(0).run("true")


async def test_a_sandbox_out_of_reach_is_given_up_when_it_would_have_ended(rigged):
    async with rigged("shared", orphan_ttl_s=2.0) as rig:
        await rig.index()
        rig.sandbox.reachable = False
        rig.sandbox.cut()
        began = time.monotonic()
        with pytest.raises(SandboxLost, match="could not be reached"):
            while True:  # the first may still get through the channel that is being cut
                await rig.client.commands(0).run("true")
        assert 1.0 < time.monotonic() - began < 20


# --- drivers --------------------------------------------------------------------------------------------------------


@pytest.mark.full
async def test_a_driver_takes_over_slots_files_and_processes(rigged, level):
    async with rigged(level) as rig:
        index = await rig.index()
        first = rig.client.commands(index)
        await first.write_file("f", b"kept")
        process = await first.start("sleep 1000")
        lost = asyncio.ensure_future(first.run("echo $$ >pid; exec sleep 1000"))
        while b"\n" not in (await first.run("cat pid 2>/dev/null; true")).stdout:
            await asyncio.sleep(0.02)
        settings = replace(rig.client.settings, driver_id="second")
        with pytest.raises(PolicyError, match="another driver holds"):
            await GuestClient.start(rig.sandbox, settings)
        assert (await first.run("echo undisturbed")).text == "undisturbed\n"
        client = await GuestClient.start(rig.sandbox, replace(settings, take_over=rig.client.life))
        try:
            assert await client.open_slot(index) == first.workspace_dir
            slot = client.commands(index)
            assert (await slot.read_file("f")).data == b"kept"
            assert [p.process_id for p in await slot.processes()] == [process.process_id]
            assert (await slot.kill(process.process_id, grace_s=0)).signal == 9
            assert not (await slot.run("kill -0 $(cat pid)")).ok, "nobody waits for the first one's commands"
            with pytest.raises(HermesError):
                await lost
            await client.reset_slot(index)
        finally:
            await client.aclose()


async def test_a_sandbox_leased_to_another_is_refused(rigged):
    async with rigged("shared") as rig:
        for take_over in (None, rig.client.life):
            settings = replace(rig.client.settings, creation_id="other", driver_id="other", take_over=take_over)
            with pytest.raises(PolicyError, match="leased to another"):
                await GuestClient.start(rig.sandbox, settings)
        assert await rig.client.open_slot(0)


async def test_a_second_client_of_one_driver_gets_its_own_answers(rigged):
    """Ids of requests begin anew with each client, and must not be taken for those of the one before."""
    async with rigged("shared") as rig:
        await rig.index()
        assert (await rig.client.commands(0).run("echo first")).text == "first\n"
        await rig.client.aclose()
        again = await GuestClient.start(rig.sandbox, rig.client.settings)
        assert await again.open_slot(0)
        assert (await again.commands(0).run("echo second")).text == "second\n"
        await again.aclose()


async def test_two_starts_at_once_make_one_guest(host_sandbox):
    sandbox = host_sandbox()
    try:
        settings = sandbox.settings("shared")
        clients = await asyncio.gather(
            *(GuestClient.start(sandbox, settings) for _ in range(3)), return_exceptions=True
        )
        assert {client.life for client in clients if isinstance(client, GuestClient)} != {None}
        assert len({client.life for client in clients if isinstance(client, GuestClient)}) == 1
        for client in clients[:-1]:
            if isinstance(client, GuestClient):
                await client.aclose()
        if isinstance(clients[-1], GuestClient):
            await clients[-1].aclose(end_sandbox=True)
    finally:
        await sandbox.terminate()


# --- what it can grant ----------------------------------------------------------------------------------------------


async def test_what_is_granted_is_what_was_asked_for(rigged, level):
    async with rigged(level) as rig:
        assert rig.client.granted is Isolation.parse(level)


async def test_one_slot_is_dedicated(rigged):
    async with rigged("dedicated", slots=1) as rig:
        assert rig.client.granted is Isolation.DEDICATED
        assert rig.client.own_users
        assert (await (await rig.slot()).run("echo fine")).text == "fine\n"


@pytest.mark.skipif(not ROOT, reason="an ordinary user's slots have namespaces")
async def test_it_says_when_slots_have_no_user_of_their_own(rigged):
    for level in ("dedicated", "shared"):
        async with rigged(level, slots=1, uid_base=None) as rig:
            assert not rig.client.own_users


@pytest.mark.parametrize("level, changes", [("dedicated", {"slots": 2}), ("user", {"uid_base": None})])
@pytest.mark.skipif(not ROOT, reason="about what root may do")
async def test_what_cannot_be_granted_is_refused(rigged, level, changes):
    with pytest.raises(PolicyError) as caught:
        async with rigged(level, **changes):
            pass
    assert caught.value.hint


@pytest.mark.skipif(not ROOT, reason="becoming an ordinary user takes root")
async def test_an_ordinary_user_gets_namespaces(host_sandbox):
    """Where it may make user namespaces: slots that can't see each other, all of one uid."""
    sandbox = host_sandbox("/usr/bin/setpriv")
    uid = 54_322
    os.chown(sandbox.base, uid, uid)
    plain = sandbox.open

    async def as_user(argv, *, env=None):
        return await plain(
            ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "/usr/bin/python3", *argv[1:]], env=env
        )

    sandbox.open = as_user
    try:
        try:
            client = await GuestClient.start(sandbox, sandbox.settings("user", uid_base=None))
        except PolicyError as error:
            pytest.skip(str(error))
        assert client.granted is Isolation.NAMESPACE
        for index in (0, 1):
            await client.open_slot(index)
        slot, other = client.commands(0), client.commands(1)
        await other.write_file("f", b"secret")
        assert not (
            await slot.run(f"ls {other.workspace_dir}; kill -9 -1; id -u; sleep 0.1; ls {sandbox.state_dir}")
        ).ok
        assert (await slot.run("id -u; ls -d /proc/[0-9]* | wc -l")).text.split()[0] == "1000"
        await slot.run("mkdir -m 000 d; (trap '' TERM; setsid sleep 1000) & true")
        await client.reset_slot(0)
        assert await slot.list_dir() == []
        result = await slot.run("kill -STOP $PPID; sleep 1000", timeout_s=0.3)
        assert result.timed_out
        await client.aclose(end_sandbox=True)
        assert not os.path.exists(sandbox.workspace_base)
    finally:
        await sandbox.terminate()


@pytest.mark.skipif(not ROOT, reason="about what root may do")
async def test_a_place_that_the_slots_cannot_reach_is_refused(host_sandbox):
    sandbox = host_sandbox()
    os.chmod(sandbox.base, 0o700)
    try:
        client = await GuestClient.start(sandbox, sandbox.settings("user"))
        with pytest.raises(InfraError, match="Permission denied"):
            await client.open_slot(0)
        await client.aclose(end_sandbox=True)
    finally:
        await sandbox.terminate()


async def test_a_place_where_nothing_can_be_made_is_refused(host_sandbox):
    sandbox = host_sandbox()
    try:
        with pytest.raises(InfraError, match="workspaces"):
            await GuestClient.start(sandbox, sandbox.settings("shared", workspace_base="/proc/nowhere/data"))
    finally:
        await sandbox.terminate()


# --- interpreters ---------------------------------------------------------------------------------------------------


def instead(sandbox, script):
    """Have the sandbox run a script in the place of whatever is opened in it."""
    plain = sandbox.open
    sandbox.open = lambda _argv, *, env=None: plain(["sh", "-c", script], env=env)
    return sandbox


async def test_a_sandbox_without_python_is_told(host_sandbox):
    sandbox = instead(host_sandbox("/bin/sh"), "exec no-such-python3")
    try:
        with pytest.raises(NoPythonError):
            await GuestClient.start(sandbox, sandbox.settings("shared"))
    finally:
        await sandbox.terminate()


@pytest.mark.parametrize("script", ["echo hello", "head -c 100000 /dev/urandom", "exit 0", "echo broken >&2; exit 9"])
async def test_something_else_than_a_guest_is_a_failure_of_the_infrastructure(host_sandbox, script):
    sandbox = instead(host_sandbox("/bin/sh"), script)
    try:
        with pytest.raises(InfraError) as caught:
            await asyncio.wait_for(GuestClient.start(sandbox, sandbox.settings("shared")), 20)
        assert "broken" in str(caught.value) or "broken" not in script
    finally:
        await sandbox.terminate()
