"""The direct mode on real shells: commands, limits, files, kill and reset, heartbeat, loss."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_core.errors import CommandError, PolicyError, SandboxLost, SlotLost
from hermes_core.sandbox.channels.blocking import AsyncioStreamChannel
from hermes_core.sandbox.commands import WindowSize
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxStatus
from hermes_core.sandbox.direct.client import DirectClient
from hermes_core.sandbox.guest_client.connection import GuestSettings
from hermes_core.tools.base import CallContext
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.terminal import TERMINAL
from tests.support.processes import runs

OTHERS = [["bash", "--posix"], *([["busybox", "sh"]] if shutil.which("busybox") else [])]
SHELLS = [["sh"], *(pytest.param(argv, marks=pytest.mark.full) for argv in OTHERS)]


class DirectorySandbox(Sandbox):
    """A directory of this machine and the processes that its channels lead to."""

    def __init__(self, root: Path, sh: list[str]) -> None:
        self.id = root.name
        self.root, self.sh = root, sh
        self.workspace_base = str(root / "data")
        self.state_dir = str(root / "data/.hermes")
        self.alive = True
        self.channels: list[AsyncioStreamChannel] = []

    async def open(self, argv, *, env=None):
        if not self.alive:
            raise SandboxLost("it has ended", sandbox_id=self.id)
        argv = self.sh + list(argv)[1:] if argv[0] == "sh" else argv
        channel = await AsyncioStreamChannel.spawn(argv, env={"PATH": os.environ["PATH"], **(env or {})})
        self.channels.append(channel)
        return channel

    async def status(self):
        return SandboxStatus.RUNNING if self.alive else SandboxStatus.GONE

    async def terminate(self):
        self.alive = False
        for channel in self.channels:
            await channel.aclose()


def settings_for(sandbox: Sandbox, slots: int = 2, isolation: Isolation = Isolation.SHARED) -> GuestSettings:
    return GuestSettings(
        creation_id="creation",
        driver_id="driver",
        isolation=isolation,
        slots=slots,
        workspace_base=sandbox.workspace_base,
        state_dir=sandbox.state_dir,
        orphan_ttl_s=2.0,
        env={"FROM_PROFILE": "yes"},
    )


async def test_secrets_that_nothing_could_mask_are_refused(tmp_path):
    sandbox = DirectorySandbox(tmp_path / "sandbox", ["sh"])
    with pytest.raises(PolicyError, match="masks"):
        await DirectClient.start(sandbox, replace(settings_for(sandbox), has_secrets=True))
    await sandbox.terminate()


async def test_a_limit_of_memory_that_nothing_would_keep_is_refused(tmp_path):
    sandbox = DirectorySandbox(tmp_path / "sandbox", SHELLS[0])
    with pytest.raises(PolicyError, match="process_memory"):
        await DirectClient.start(sandbox, replace(settings_for(sandbox), process_memory=512))
    await sandbox.terminate()


@pytest.fixture(params=SHELLS, ids=lambda argv: argv[0])
async def client(request, tmp_path):
    sandbox = DirectorySandbox(tmp_path / "sandbox", request.param)
    client = await DirectClient.start(sandbox, settings_for(sandbox))
    yield client
    for index in (0, 1):
        if not client.lost.is_set():
            await client.kill_slot(index)
    await client.aclose()
    await sandbox.terminate()


@pytest.fixture
async def slot(client):
    await client.open_slot(0)
    return client.commands(0)


async def gone(pattern: str) -> bool:
    for _ in range(100):
        if not runs(pattern):
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_program_is_answered_while_it_runs(slot):
    said = asyncio.Queue()

    async def lines():
        for word in (b"one", b"two"):
            yield word + b"\n"
            assert await asyncio.wait_for(said.get(), 20) == b"<" + word + b">\n"

    talks = 'echo begun >&2; while read -r line; do echo "<$line>"; done; exit 3'
    result = await slot.run(talks, stdin=lines(), stdout=said.put)
    assert (result.exit_code, result.stdout, result.stdout_bytes, result.stderr) == (3, b"", 12, b"begun\n")
    assert not result.truncated


async def test_input_in_pieces(slot):
    data = bytes(range(256)) * 3000

    async def pieces(sizes=(1, 0, 70_000, 10, 200_000, 768_000)):
        start = 0
        for size in sizes:
            yield data[start : start + size]
            start += size

    assert (await slot.run("cat", stdin=pieces())).stdout == data
    assert (await slot.run("cat", stdin=pieces(()))).stdout == b""


async def test_input_that_nobody_reads(slot):
    async def endless():
        while True:
            yield b"y" * 100_000

    for command in ("true", "head -c 5", "exec <&-; sleep 0.2"):
        assert (await asyncio.wait_for(slot.run(command, stdin=endless()), 30)).ok
    limited = await slot.run("sleep 345", stdin=endless(), timeout_s=0.5)
    assert limited.timed_out and await gone("sleep 345")
    with pytest.raises(CommandError) as caught:
        await slot.run(["no-such-program"], stdin=endless())
    assert caught.value.code == "not_found"


async def test_a_sink_or_an_input_that_fails_ends_the_command(slot):
    async def full(piece):
        raise OSError("the disk is full")

    async def broken():
        yield b"one\n"
        raise OSError("no more")

    with pytest.raises(OSError, match="full"):
        await slot.run("echo out; sleep 346", stdout=full)
    with pytest.raises(OSError, match="no more"):
        await slot.run("sleep 347", stdin=broken())
    assert await gone("sleep 34[67]")


async def test_a_slow_sink_holds_the_command_up(slot):
    sizes, go = [], asyncio.Event()

    async def slow(piece):
        sizes.append(len(piece))
        await go.wait()

    async with asyncio.TaskGroup() as group:
        command = group.create_task(slot.run("head -c 3000000 /dev/zero; touch written", stdout=slow))
        async with asyncio.timeout(30):
            while not sizes:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert len(sizes) == 1 and (await slot.run("ls")).text == ""
        go.set()
        assert (await command).stdout_bytes == sum(sizes) == 3_000_000


async def test_what_can_not_be_started_is_an_error(slot):
    await slot.run("echo '#!/bin/sh' >script; mkdir dir")
    for command, code in (
        (["no-such-program"], "not_found"),
        (["cd"], "not_found"),  # of the shell, and no program
        ([""], "not_found"),
        (["./nothing"], "not_found"),
        (["./script"], "permission"),
        (["./dir"], "permission"),
    ):
        for attempt in (slot.run(command), slot.run(command, merge_stderr=True), slot.start(command)):
            with pytest.raises(CommandError) as caught:
                await attempt
            assert caught.value.code == code, caught.value
            assert command[0] in str(caught.value)
    assert await slot.processes() == []
    assert (await slot.run("no-such-program")).exit_code == 127
    for status in (126, 127):
        assert (await slot.run(["sh", "-c", f"exit {status}"])).exit_code == status
    assert (await slot.run(["sh", "-c", "echo $PATH"], stdin=b"x" * 100_000)).ok


async def test_environment_and_directory(slot):
    result = await slot.run('echo "$FROM_PROFILE $MINE $HOME $TMPDIR"; pwd', env={"MINE": "a $b"}, cwd=".")
    first, second = result.text.splitlines()
    assert first.startswith("yes a $b /") and second == slot.workspace_dir
    assert not Path(first.split()[-1]).is_relative_to(slot.workspace_dir)
    assert "HERMES_DIRECT_HELPER" not in (await slot.run("env")).text


async def test_a_directory_that_may_not_be_entered(ordinary):
    assert (await ordinary.run("mkdir -m 0 locked")).ok
    with pytest.raises(CommandError) as caught:
        await ordinary.run("true", cwd="locked")
    assert caught.value.code == "cwd_permission"
    await ordinary.run("chmod 700 locked")


async def test_a_process_that_keeps_the_output_open_does_not_hold_the_command(slot):
    began = time.monotonic()
    assert (await slot.run("echo started; sleep 987.2 &")).stdout == b"started\n"
    assert time.monotonic() - began < 20
    assert runs("sleep 987[.]2")


async def test_there_is_no_terminal_and_it_says_so(slot, client):
    assert any("pty" in sentence for sentence in client.missing)
    status = await slot.start("sleep 987.2")
    for attempt in (
        slot.run("true", pty=WindowSize()),
        slot.start("true", pty=WindowSize()),
        slot.resize(status.process_id, WindowSize()),
    ):
        with pytest.raises(CommandError) as caught:
            await attempt
        assert caught.value.code == "no_pty"
    await slot.kill(status.process_id, grace_s=0.2)


async def test_a_full_disk_leaves_the_old_file_as_it_was(client, slot, tmp_path):
    """Where the file is changed in place, too: what is there is written over once there is room for the rest."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = Path(slot.workspace_dir) / "small"
    await slot.run("mkdir small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    try:
        await slot.run("echo old >one; ln one two; echo old >three", cwd="small")
        for name, append in (("one", False), ("one", True), ("three", False), ("three", True)):
            with pytest.raises(CommandError) as caught:
                await slot.write_file(f"small/{name}", b"x" * 200_000, append=append)
            assert caught.value.code == "no_space" and "hermes-" not in caught.value.message, caught.value
            assert (await slot.read_file(f"small/{name}")).data == b"old\n"
        assert (await slot.run("ls -A", cwd="small")).text.split() == ["one", "three", "two"]
        assert (await slot.run("ls -A", cwd=f"{place.parent.parent}/.direct/slot_0/run")).text == ""
    finally:
        subprocess.run(["umount", place], check=True)


AS_NOBODY = 65534


@pytest.fixture(params=SHELLS, ids=lambda argv: argv[0])
async def ordinary(request, tmp_path_factory):
    """A slot of an ordinary user's, whom rights stop."""
    if os.geteuid() == 0:
        root = Path(tempfile.mkdtemp(prefix="hermes-direct-", dir="/tmp"))
        os.chown(root, AS_NOBODY, AS_NOBODY)
        become = ["setpriv", f"--reuid={AS_NOBODY}", f"--regid={AS_NOBODY}", "--clear-groups"]
    else:
        root, become = tmp_path_factory.mktemp("sandbox"), []
    sandbox = DirectorySandbox(root, [*become, *request.param])
    client = await DirectClient.start(sandbox, settings_for(sandbox))
    await client.open_slot(0)
    yield client.commands(0)
    await client.aclose()
    await sandbox.terminate()
    shutil.rmtree(root)


async def test_a_file_in_a_directory_that_is_not_writable_can_be(ordinary):
    assert (await ordinary.run("mkdir d; echo old >d/f; echo old >d/closed; chmod 400 d/closed; chmod 500 d")).ok
    await ordinary.write_file("d/f", b"new and longer\n")
    assert (await ordinary.read_file("d/f")).data == b"new and longer\n"
    for name in ("d/g", "d/closed"):
        with pytest.raises(CommandError) as caught:
            await ordinary.write_file(name, b"x")
        assert caught.value.code == "permission"
        assert name in str(caught.value) and "hermes-" not in caught.value.message
    assert (await ordinary.run("chmod 700 d; ls -A d")).text.split() == ["closed", "f"]
    with pytest.raises(CommandError) as caught:
        await ordinary.write_file("d/closed", b"x")
    assert caught.value.code == "permission"


async def test_reset_kills_and_empties_one_slot_only(client, slot):
    await client.open_slot(1)
    other = client.commands(1)
    await other.write_file("mine", b"")
    await other.run("sleep 987.5 &")
    await slot.run("(sleep 987.6 &) ; setsid sleep 987.6 & mkdir -p a/b; touch a/b/c .hidden ..odd; chmod 000 a")
    await slot.start("sleep 987.6")
    await client.reset_slot(0)
    assert not runs("sleep 987[.]6")
    assert await slot.list_dir() == [] and await slot.processes() == []
    assert runs("sleep 987[.]5")
    assert [entry.path for entry in await other.list_dir()] == ["mine"]
    assert (await slot.run("pwd")).text.strip() == slot.workspace_dir


async def test_only_shared_or_dedicated_is_granted(tmp_path):
    sandbox = DirectorySandbox(tmp_path / "sandbox", ["sh"])
    with pytest.raises(PolicyError):
        await DirectClient.start(sandbox, settings_for(sandbox, slots=2, isolation=Isolation.USER))
    client = await DirectClient.start(sandbox, settings_for(sandbox, slots=1, isolation=Isolation.DEDICATED))
    assert client.granted is Isolation.DEDICATED and client.missing
    await client.open_slot(0)
    await client.reset_slot(0)  # never used: still clean
    await client.commands(0).run("true")
    with pytest.raises(SlotLost):
        await client.reset_slot(0)
    await client.aclose()


async def test_the_heartbeat_beats_until_the_end(client):
    path = Path(client.settings.state_dir) / "heartbeat"
    seen = set()
    async with asyncio.timeout(30):
        while len(seen - {""}) < 3:
            seen.add(path.read_text() if path.exists() else "")
            await asyncio.sleep(0.02)
    await client.aclose(end_sandbox=True)
    assert path.read_text() == "end\n"


async def test_a_lost_heartbeat_channel_is_opened_again(client):
    path = Path(client.settings.state_dir) / "heartbeat"
    while not path.exists():
        await asyncio.sleep(0.02)
    for channel in client.sandbox.channels:
        await channel.aclose()
    before = path.read_text()
    async with asyncio.timeout(30):
        while path.read_text() == before:
            await asyncio.sleep(0.05)
    assert not client.lost.is_set()


@pytest.mark.usefixtures("slot")
@pytest.mark.parametrize("end", [DirectClient.kill_slot, DirectClient.reset_slot])
async def test_the_end_of_a_lease_in_which_nothing_was_run_tells_that_the_sandbox_has_ended(client, end):
    client.sandbox.alive = False
    with pytest.raises(SandboxLost):
        await end(client, 0)
    assert client.lost.is_set()


async def test_a_sandbox_that_ends_is_lost_for_commands_and_for_its_pool(client, slot):
    task = asyncio.create_task(slot.run("sleep 348"))
    while not runs("sleep 34[8]"):
        await asyncio.sleep(0.02)
    await client.sandbox.terminate()
    with pytest.raises(SandboxLost):
        await task
    async with asyncio.timeout(30):
        await client.lost.wait()
    with pytest.raises(SandboxLost):
        await slot.run("true")


async def test_a_model_is_told_that_there_is_no_terminal(slot):
    tools = ToolRegistry()
    context = CallContext(timeout_s=20, commands=slot)
    for background in (False, True):
        args = {"command": "touch ran", "pty": True, "background": background}
        answer = (await tools.call(TERMINAL, context, args)).to_tool_result()
        assert answer["exit_code"] == -1 and "no terminal" in answer["error"] and "leave out pty" in answer["error"]
    assert (await slot.run("ls")).text == ""
