"""Killing and resetting slots, and slots whose processes do not want that."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from hermes_core.errors import CommandError, InfraError, SlotLost

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = os.geteuid() == 0
STUBBORN = """
import signal, time
for n in range(1, 32):
    n in (9, 19) or signal.signal(n, signal.SIG_IGN)
while True:
    time.sleep(9)
"""
COMET = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
    except OSError:
        pass
"""
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
STORMS = pytest.mark.parametrize(
    "program", [pytest.param(BOMB, id="bomb", marks=pytest.mark.full), pytest.param(COMET, id="comet")]
)
DEEP = """
import os
for _ in range(300):
    os.mkdir('deep' * 5)
    os.chdir('deep' * 5)
    open('f', 'w').close()
for _ in range(300):
    os.chmod('.', 0)
    os.chdir('..')
"""


async def fresh(rig):
    index = await rig.index()
    return index, rig.client.commands(index)


def running(rig, index):
    """The processes that belong to a slot, by the mark that its commands carry, the host's view of them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes()
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            mark = f"/{index}/".encode()
            if rig.sandbox.id.encode() in environ and b"HERMES_COMMAND=" in environ and stat[0] != "Z":
                value = environ.partition(b"HERMES_COMMAND=")[2].partition(b"\0")[0]
                if mark in value:
                    found.append(int(entry.name))
    return found


# --- killing --------------------------------------------------------------------------------------------------------


async def test_kill_ends_processes_and_keeps_files(rig):
    index, slot = await fresh(rig)
    await slot.write_file("stubborn.py", STUBBORN.encode())
    background = await slot.start("python3 stubborn.py")
    foreground = asyncio.ensure_future(slot.run("echo begun; python3 stubborn.py"))
    await slot.run("setsid python3 stubborn.py >/dev/null 2>&1 & (setsid sleep 1000 &) ; true")
    async with asyncio.timeout(30):
        while len(running(rig, index)) < 4:
            await asyncio.sleep(0.05)
    await rig.client.kill_slot(index)
    assert running(rig, index) == []
    result = await foreground
    assert (result.signal, result.stdout) == (9, b"begun\n")
    assert (await slot.poll(background.process_id)).signal == 9
    assert (await slot.read_file("stubborn.py")).data == STUBBORN.encode()


async def test_reset_leaves_nothing(rig):
    index, slot = await fresh(rig)
    private = (await slot.run("echo $HOME; echo $TMPDIR")).text.split()
    await slot.run(
        "mkdir -p d/e ..x -- -rf; touch .hidden ..x/f d/e/f; echo x >$HOME/.profile; mktemp; ln -s / root;"
        " chmod 000 d; sleep 1000 &"
    )
    process = await slot.start("sleep 1000")
    await slot.run("true", spool=True)
    await rig.client.reset_slot(index)
    assert running(rig, index) == []
    assert await slot.list_dir() == []
    for folder in private:
        assert await slot.list_dir(folder) == []
    assert await slot.processes() == []
    with pytest.raises(CommandError):
        await slot.poll(process.process_id)
    assert (await slot.run("echo usable")).text == "usable\n"


async def test_reset_twice_at_once_and_again(rig):
    index, slot = await fresh(rig)
    await slot.run("touch f; sleep 1000 &")
    await asyncio.gather(*(rig.client.reset_slot(index) for _ in range(3)), rig.client.kill_slot(index))
    assert await slot.list_dir() == []
    for number in range(8):
        await slot.run(f"touch {number}")
        await rig.client.reset_slot(index)
        assert await slot.list_dir() == []


async def test_a_wipe_asked_for_during_a_kill_is_not_lost(rig):
    index, slot = await fresh(rig)
    for delay in (0, 0.001, 0.003, 0.006, 0.01):
        await slot.run("touch f; sleep 1000 &")
        killing = asyncio.ensure_future(rig.client.kill_slot(index))
        await asyncio.sleep(delay)
        await rig.client.reset_slot(index)
        await killing
        assert await slot.list_dir() == []


async def test_commands_asked_for_during_a_reset_come_after_it(rig):
    index, slot = await fresh(rig)
    await slot.run("touch f")
    resetting = asyncio.ensure_future(rig.client.reset_slot(index))
    await asyncio.sleep(0)
    results = await asyncio.gather(*(slot.run("ls -A; echo $?") for _ in range(5)))
    await resetting
    assert {result.text for result in results} == {"0\n"}


async def test_a_slot_that_was_never_opened_runs_nothing(rig):
    with pytest.raises(InfraError):
        await rig.client.commands(199).run("true")
    with pytest.raises(InfraError):
        await rig.client.open_slot(200)
    with pytest.raises(InfraError):
        await rig.client.open_slot(-2)


# --- hostile slots --------------------------------------------------------------------------------------------------


async def test_killing_everything_is_the_slots_own_loss(own_rig):
    """`kill -9 -1` takes the slot's parent with it at `user`: a failed command, and a slot that goes on."""
    _, other = await fresh(own_rig)
    neighbour = asyncio.ensure_future(other.run("sleep 1; echo undisturbed"))
    _, slot = await fresh(own_rig)
    await slot.write_file("f", b"kept")
    background = await slot.start("sleep 1000")
    together = asyncio.ensure_future(slot.run("sleep 1000"))
    await asyncio.sleep(0.1)
    for _ in range(3):
        result = await slot.run("kill -9 -1; sleep 0.2; exit 3")
        assert result.signal == 9 or result.exit_code == 3
        assert (await slot.run("echo fine")).text == "fine\n"
    assert (await together).signal == 9
    assert (await slot.wait(background.process_id, timeout_s=5)).signal == 9
    assert (await slot.read_file("f")).data == b"kept"
    assert (await neighbour).text == "undisturbed\n"


async def test_commands_in_flight_when_the_parent_dies_all_end(own_rig):
    _, slot = await fresh(own_rig)
    for _ in range(5):
        commands = [asyncio.ensure_future(slot.run(f"sleep 0.0{n}")) for n in range(10)]
        commands.append(asyncio.ensure_future(slot.run("kill -9 -1")))
        commands += [asyncio.ensure_future(slot.run("echo x")) for _ in range(10)]
        results = await asyncio.wait_for(asyncio.gather(*commands), 20)
        assert all(result.signal in (None, 9) for result in results)
    assert (await slot.run("echo fine")).text == "fine\n"


async def test_terminating_everything_spares_the_slots_parent(own_rig):
    _, slot = await fresh(own_rig)
    parent = (await slot.run("echo $PPID")).text
    await slot.run("for s in HUP INT QUIT TERM USR1 ALRM; do kill -$s -1; kill -$s $PPID; done 2>/dev/null")
    assert (await slot.run("echo $PPID")).text == parent


@pytest.mark.full
async def test_a_stopped_parent_is_no_way_out_of_a_time_limit(own_rig):
    _, slot = await fresh(own_rig)
    began = time.monotonic()
    result = await asyncio.wait_for(slot.run("kill -STOP $PPID; sleep 1000", timeout_s=0.5), 20)
    assert result.timed_out and time.monotonic() - began < 15
    script = "while :; do kill -STOP $PPID; done"
    result = await asyncio.wait_for(slot.run(script, timeout_s=0.5), 20)
    assert result.timed_out and time.monotonic() - began < 40
    assert (await slot.run("echo fine")).text == "fine\n"


@STORMS
async def test_a_reset_ends_a_fork_storm(own_rig, program):
    """Bounded, a neighbour can work meanwhile, and a reset ends them with proof."""
    index, slot = await fresh(own_rig)
    _, other = await fresh(own_rig)
    await slot.write_file("storm.py", program.encode())
    for _ in range(6 if program is COMET else 1):
        await slot.start("python3 storm.py")
    await asyncio.sleep(0.5)
    assert (await asyncio.wait_for(other.run("echo fine"), 20)).text == "fine\n"
    began = time.monotonic()
    await own_rig.client.reset_slot(index)
    assert time.monotonic() - began < 30
    assert running(own_rig, index) == []
    await asyncio.sleep(0.2)
    assert running(own_rig, index) == []
    assert (await slot.run("echo usable; ls -A")).text == "usable\n"


@pytest.mark.full  # storms that end with their command are above
@pytest.mark.parametrize(
    "program", [pytest.param(BOMB, id="bomb", marks=pytest.mark.stress), pytest.param(COMET, id="comet")]
)
async def test_a_time_limit_ends_a_fork_storm(own_rig, program):
    index, slot = await fresh(own_rig)
    await slot.write_file("storm.py", program.encode())
    script = "trap '' TERM; python3 storm.py & python3 storm.py; sleep 1000"
    result = await asyncio.wait_for(slot.run(script, timeout_s=0.3), 30)
    assert result.timed_out
    empty = 0  # times in a row: one look can miss what forks while it looks
    for _ in range(200):
        empty = 0 if running(own_rig, index) else empty + 1
        if empty == 10:
            break
        await asyncio.sleep(0.05)
    assert empty == 10, running(own_rig, index)
    assert (await slot.run("echo usable")).text == "usable\n"


async def test_a_reset_removes_what_a_slot_left_in_common_directories(own_rig):
    index, slot = await fresh(own_rig)
    _, other = await fresh(own_rig)
    mine, theirs = (await slot.run("mktemp -p /tmp")).text.strip(), (await other.run("mktemp -p /tmp")).text.strip()
    script = (
        "mkdir -p /tmp/{0}/a/b; touch /tmp/{0}/a/b/f /dev/shm/{0} /var/tmp/{0};"
        " chmod 000 /tmp/{0}/a; ln -s /tmp/{0} /var/tmp/{0}-link"
    )
    name = f"hermes-test-{os.getpid()}-{index}"
    assert (await slot.run(script.format(name))).ok
    await own_rig.client.reset_slot(index)
    left = await slot.run(f"ls -d {mine} /tmp/{name} /dev/shm/{name} /var/tmp/{name} /var/tmp/{name}-link")
    assert left.stdout == b"", left
    assert (await other.run(["test", "-e", theirs])).ok


@pytest.mark.skipif(not ROOT, reason="a uid per slot takes root")
async def test_a_reset_in_a_shared_directory_removes_only_the_slots_own(rigs):
    """Neither is quarantined, neither keeps anything, neither loses what is its own."""
    rig = await rigs("user")
    (index, slot), (second, other) = await fresh(rig), await fresh(rig)
    common = f"/tmp/hermes-test-{os.getpid()}-{index}"
    assert (await slot.run(f"mkdir -m 777 {common}; mkdir -m 777 {common}/deep; echo a >{common}/deep/a")).ok
    assert (
        await other.run(
            f"mkdir -m 777 {common}/deep/theirs; echo b >{common}/deep/theirs/b; umask 0; echo b >{common}/b"
        )
    ).ok
    assert (await slot.run(f"echo a >{common}/deep/theirs/a; chmod 700 {common}")).ok
    await rig.client.reset_slot(index)
    owners = {entry.lstat().st_uid for entry in [Path(common), *Path(common).rglob("*")]}
    mine, theirs = rig.sandbox.uid_base + 2 + index, rig.sandbox.uid_base + 2 + second
    assert mine not in owners and theirs in owners
    assert sorted(p.name for p in Path(common).rglob("*") if p.is_file()) == ["b", "b"]
    assert (await slot.run(f"rm -rf {common}; echo c >{common}/c; echo usable")).text == "usable\n"
    await rig.client.reset_slot(second)
    await rig.client.reset_slot(index)
    assert [p for p in Path(common).rglob("*") if p.is_file()] == []
    os.system(f"rm -rf {common}")


async def test_a_deep_tree_without_rights_is_removed_by_a_reset(own_rig):
    index, slot = await fresh(own_rig)
    await slot.run(["python3", "-c", DEEP])
    began = time.monotonic()
    await own_rig.client.reset_slot(index)
    assert time.monotonic() - began < 20
    assert await slot.list_dir() == []
    trash = Path(own_rig.sandbox.workspace_base, ".slots", "trash")
    for _ in range(200):
        if not list(trash.iterdir()):
            return
        await asyncio.sleep(0.1)
    pytest.fail("the trash stays full")


async def test_the_trash_is_emptied_after_its_process_was_killed(own_rig):
    index, slot = await fresh(own_rig)
    trash = Path(own_rig.sandbox.workspace_base, ".slots", "trash")
    for _ in range(3):
        await slot.run("touch f")
        await own_rig.client.reset_slot(index)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(stat[16]) > os.nice(0) and own_rig.sandbox.id.encode() in (entry / "environ").read_bytes():
                        os.kill(int(entry.name), 9)
                except OSError:
                    continue
    await own_rig.client.reset_slot(index)
    for _ in range(600):
        if not list(trash.iterdir()):
            return
        await asyncio.sleep(0.05)
    pytest.fail("nobody empties it")


@pytest.mark.skipif(not ROOT, reason="a uid per slot takes root")
async def test_a_slot_that_cannot_be_proved_clean_is_quarantined(
    rigged, monkeypatch, host_sandbox, change_guest, isolates
):
    """A process of the slot's user that the guest can neither see nor reach, being in a pid namespace below ours."""
    change_guest("_DEATH_TIMEOUT_S = 15.0", "_DEATH_TIMEOUT_S = 3.0")
    plain = host_sandbox.open

    async def inside(sandbox, argv, *, env=None):
        argv = ["unshare", "--pid", "--fork", "--mount-proc", *argv]
        return await plain(sandbox, ["env", *argv], env=env)

    monkeypatch.setattr(host_sandbox, "open", inside)
    async with rigged("user", python="/usr/bin/env") as rig:
        index, slot = await fresh(rig)
        uid = rig.sandbox.uid_base + 2 + index
        await slot.run("true")
        ghost = await asyncio.create_subprocess_exec("sleep", "1000", user=uid, group=uid)
        try:
            with pytest.raises(SlotLost):
                await asyncio.wait_for(rig.client.reset_slot(index), 60)
        finally:
            ghost.kill()
            await ghost.wait()
        for attempt in (
            rig.client.reset_slot(index),
            rig.client.open_slot(index),
            slot.run("true"),
            slot.start("true"),
            slot.stat("."),
        ):
            with pytest.raises(SlotLost):
                await attempt
        _, other = await fresh(rig)
        assert (await other.run("echo fine")).text == "fine\n"


# --- what separates them --------------------------------------------------------------------------------------------
