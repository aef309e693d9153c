"""Checks of the backend contract itself: sandboxes without a guest, and channels into them."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

import pytest

from hermes_core import (
    CanBuild,
    CanSnapshot,
    ChannelLost,
    HermesError,
    ImageBuild,
    InfraError,
    Network,
    Sandbox,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
)
from hermes_core.sandbox.pool.profile_check import check_profile
from hermes_testing.conformance.kit import Kit, communicate
from hermes_testing.conformance.waiting import until, within

T = TypeVar("T")

MEMORY_MB = 128
"""Memory in MiB of the sandbox that tests whether `memory` is a limit."""

LATER_S = 1.0
"""Seconds after a cancelled creation in which no sandbox may appear, added to one and a half times the duration of a
creation."""

MOST_STALL, MOST_STALL_S = 0.3, 0.1
"""The share of a call, and the seconds, for which the event loop may be blocked at a time."""


async def one_creation_id_is_one_sandbox(kit: Kit) -> None:
    """`create` with the creation id of an existing sandbox returns that sandbox."""
    creation_id = uuid.uuid4().hex
    async with kit.sandbox(creation_id) as first:
        again = await kit.create(kit.spec(creation_id))
        assert again.id == first.id, "the id of the sandbox that a second `create` with one creation id gives"
        assert [info.sandbox_id for info in await kit.list_sandboxes()] == [first.id], "what `list` gives after it"


async def one_creation_id_is_one_sandbox_at_once(kit: Kit) -> None:
    """Two calls of `create` with one creation id at the same time make one sandbox."""
    creation_id = uuid.uuid4().hex
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(kit.create(kit.spec(creation_id))) for _ in range(2)]
    one, other = (task.result() for task in tasks)
    try:
        assert one.id == other.id, "the ids that two `create` with one creation id at the same time gave"
        assert len(await kit.list_sandboxes()) == 1, "sandboxes listed after it"
    finally:
        await one.terminate()
        await other.terminate()


async def list_tells_what_was_created(kit: Kit) -> None:
    """`list` returns id, owner, creation id, age and status of a sandbox, for one owner or all."""
    before = time.time()
    async with kit.sandbox() as sandbox:
        found = [info for info in await kit.backend.list() if info.sandbox_id == sandbox.id]
        assert len(found) == 1, "sandboxes of that id in the list of all"
        assert found == list(await kit.list_sandboxes()), (
            "what `list` gives for the owner, beside what it gives for all"
        )
        assert found[0].owner == kit.owner, "its owner"
        assert found[0].creation_id, "`list` gives no creation id"
        age = found[0].created - before
        assert -60 < age < 600, f"`created` is {age:.0f} s away from now: is it seconds since the epoch?"
        assert await kit.list_sandboxes("nobody-" + uuid.uuid4().hex) == [], "the sandboxes of an owner who has none"
    assert await kit.list_sandboxes() == [], "what is listed after its end"


async def status_follows_life(kit: Kit) -> None:
    """`status` is `running` until the end, and not afterwards."""
    async with kit.sandbox() as sandbox:
        assert await sandbox.status() == SandboxStatus.RUNNING, "the status of a new sandbox"
        await sandbox.terminate()
        assert await sandbox.status() != SandboxStatus.RUNNING, "an ended sandbox still has status `running`"


async def terminate_is_idempotent(kit: Kit) -> None:
    """`terminate` and `terminate_id` can be called again, at the same time, and for sandboxes that do not exist."""
    async with kit.sandbox() as sandbox:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(sandbox.terminate())
        await sandbox.terminate()
        await kit.backend.terminate_id(sandbox.id)
        assert await kit.list_sandboxes() == [], "what is listed after its end"


async def terminate_by_id(kit: Kit) -> None:
    """`terminate_id` ends a sandbox without a handle on it."""
    async with kit.sandbox() as sandbox:
        await kit.backend.terminate_id(sandbox.id)
        assert await sandbox.status() != SandboxStatus.RUNNING, "it still has status `running`"
        assert await kit.list_sandboxes() == [], "what is listed afterwards"


async def an_ended_sandbox_opens_no_channel(kit: Kit) -> None:
    """`open` in a sandbox that has ended raises `SandboxLost`, not an error that looks like a bad connection."""
    async with kit.sandbox() as sandbox:
        await sandbox.terminate()
        with pytest.raises(SandboxLost):
            await _open_channel(sandbox)


async def _open_channel(sandbox: Sandbox) -> None:
    await (await sandbox.open(["true"])).aclose()


@pytest.mark.limit(120)
async def the_watchdog_ends_the_sandbox(kit: Kit) -> None:
    """When the main process ends, the sandbox ends: without a heartbeat it is gone soon after its time."""
    async with kit.sandbox(ttl_s=1.0) as sandbox:

        async def ended() -> bool:
            return await sandbox.status() != SandboxStatus.RUNNING

        await until(ended, 60, "the watchdog had no heartbeat for 5 s, and the sandbox still runs")


async def a_program_gets_its_arguments(kit: Kit) -> None:
    """`open` starts a program with exactly these arguments and variables, without a shell."""
    words = ["", " ", "a b", "$HOME", "`id`", "'", '"', "\\", "\n", "*", "ü€"]
    async with kit.sandbox() as sandbox:
        got = await communicate(
            await sandbox.open(["sh", "-c", 'printf "%s|" "$V" "$@"', "x", *words], env={"V": "a 'b'\n$c"})
        )
        wanted = "".join(f"{word}|" for word in ["a 'b'\n$c", *words])
        got.prints(wanted.encode(), "the words as `sh` got them")


async def variables_of_the_spec_are_set(kit: Kit) -> None:
    """`SandboxSpec.environment` is in the environment of every program."""
    async with kit.sandbox() as sandbox:
        got = await communicate(await sandbox.open(["sh", "-c", 'echo "$HERMES_KIT"']))
        got.prints(b"environment of the spec\n", "the value of the variable")


async def nothing_of_the_driver_is_added(kit: Kit) -> None:
    """No variable of the driver's environment reaches a program, whether started by `open` or in a slot."""
    name = f"HERMES_KIT_{uuid.uuid4().hex}"
    # Only a variable that is really in this process's environment shows who passes it on.
    os.environ[name] = "of the driver"
    try:
        async with kit.sandbox() as sandbox:
            got = await communicate(await sandbox.open(["env"]))
        async with kit.tools(seats=1, per_sandbox=1) as tools, tools.lease() as slot:
            commands = await tools.commands(slot).run("env")
    finally:
        del os.environ[name]
    for text, where in ((got.out, "a program that `open` started"), (commands.stdout, "a command in a slot")):
        assert b"PATH=" in text, f"`env` printed no PATH in {where}"
        assert name.encode() not in text, f"a variable of the driver's environment is in that of {where}"


async def no_call_stops_the_loop(kit: Kit) -> None:
    """While the provider works on a call, the driver's event loop keeps running, so other rollouts are not delayed."""
    always: set[str] = {"create", "open", "a channel", "status", "list", "terminate"}
    stopped: dict[str, str] = {}
    for _ in range(3):  # other programs may use the machine during one attempt
        stopped = {}
        async with AsyncExitStack() as stack:
            sandbox = await _watch_loop(kit.create(kit.spec()), "create", stopped)
            stack.push_async_callback(sandbox.terminate)
            channel = await _watch_loop(sandbox.open(["true"]), "open", stopped)
            await _watch_loop(communicate(channel), "a channel", stopped)
            await _watch_loop(sandbox.status(), "status", stopped)
            await _watch_loop(kit.backend.list(kit.owner), "list", stopped)
            await _watch_loop(sandbox.terminate(), "terminate", stopped)
        always &= stopped.keys()
        if not always:
            return
    pytest.fail("the event loop stood still in " + ", ".join(stopped[name] for name in sorted(always)))


async def _watch_loop(call: Awaitable[T], name: str, stopped: dict[str, str]) -> T:
    """Return the call's result. If the call kept the event loop from running, add a text on this to `stopped`."""
    stalls = [0.0]
    ticking = asyncio.create_task(_tick(stalls))
    await asyncio.sleep(0.01)  # until the ticking has begun
    began = time.monotonic()
    try:
        return await call
    finally:
        took = time.monotonic() - began
        await asyncio.sleep(0.005)  # a call may block in its very last step
        ticking.cancel()
        if max(stalls) >= max(MOST_STALL_S, MOST_STALL * took):
            stopped[name] = f"`{name}` for {max(stalls):.2f} of {took:.2f} s"


async def _tick(stalls: list[float]) -> None:
    before = time.monotonic()
    while True:
        await asyncio.sleep(0.002)
        now = time.monotonic()
        stalls.append(now - before)
        before = now


async def an_image_is_used_or_refused(kit: Kit) -> None:
    """A profile whose `image` does not exist causes an error, not a sandbox made from something else."""
    await _is_refused(kit, kit.spec(image=f"hermes-kit-{uuid.uuid4().hex}:missing"))


async def _create(kit: Kit, spec: SandboxSpec) -> Sandbox:
    """Create a sandbox as a pool does: refuse first what the backend does not support."""
    check_profile(kit.backend, spec.isolation, spec.config, prepares=False)
    return await kit.create(spec)


async def _is_refused(kit: Kit, spec: SandboxSpec) -> None:
    try:
        sandbox = await _create(kit, spec)
    except HermesError:
        return
    await sandbox.terminate()
    pytest.fail("a sandbox was made from an image that does not exist")


@pytest.mark.limit(120)
async def memory_is_limited_or_refused(kit: Kit) -> None:
    """With `memory` set, a program can't use four times as much; or the profile is refused."""
    if not kit.rig.capabilities.memory_limit:
        pytest.skip("the backend declares that `memory` is no limit")
    spec = kit.spec(memory=MEMORY_MB)
    try:
        sandbox = await _create(kit, spec)
    except HermesError:
        return
    try:
        size = 4 * MEMORY_MB << 20
        held = f"head -c {size} /dev/zero | tail -c {size} | wc -c"  # `tail` holds what it may have to print
        got = await communicate(await sandbox.open(["sh", "-c", held]))
        assert got.out.strip() != b"%d" % size, f"a program held {4 * MEMORY_MB} MiB with memory set to {MEMORY_MB}"
    except InfraError:
        pass  # the limit killed the sandbox as well
    finally:
        await sandbox.terminate()


async def no_network_leads_nowhere(kit: Kit) -> None:
    """With `network: none`, no program in the sandbox reaches anything outside it."""
    if Network.NONE not in kit.rig.capabilities.network:
        pytest.skip("the backend does not declare network none")
    async with kit.sandbox_of(kit.spec(network="none")) as sandbox:
        await _is_cut_off(kit, sandbox)


async def a_cut_network_leads_nowhere(kit: Kit) -> None:
    """With `network: setup`, no program in the sandbox reaches anything outside it once the network is cut."""
    can = kit.rig.capabilities
    if Network.SETUP not in can.network:
        pytest.skip("the backend does not declare network setup")
    if can.snapshot:
        pytest.skip("it makes snapshots, so core makes another sandbox without network from one")
    async with kit.sandbox_of(kit.spec(network="setup")) as sandbox:
        await sandbox.cut_network()
        await _is_cut_off(kit, sandbox)


async def _is_cut_off(kit: Kit, sandbox: Sandbox) -> None:
    """Check that the sandbox has no route; or, if it has one, that it can't reach a server that others can reach."""
    header, *lines = (
        await communicate(await sandbox.open(["cat", "/proc/net/route", "/proc/net/ipv6_route"]))
    ).out.split(b"\n")
    leads = {line.split()[0 if b"\t" in line else -1] for line in lines if line} - {b"lo"}
    if header.startswith(b"Iface") and not leads:
        return
    async with _servers() as addresses:
        found = await _reach(sandbox, addresses)
        assert not found, f"a program in it reached a server of the driver's, {found}"
        if Network.OPEN in kit.rig.capabilities.network:
            async with kit.sandbox_of(kit.spec(network="open")) as other:
                if await _reach(other, addresses):
                    return
    pytest.skip("a route may lead out, and sandboxes that have a network do not reach the driver's host")


@asynccontextmanager
async def _servers() -> AsyncIterator[list[str]]:
    """Serve on all addresses of the driver's host. Yield the addresses, with the port, at which a sandbox might reach
    the server."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        hosts = ["127.0.0.1"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses the way and our address on it
            hosts.append(probe.getsockname()[0])
        yield [f"{host}:{port}" for host in hosts]


async def _reach(sandbox: Sandbox, addresses: list[str]) -> str:
    """Return the first address that a program in the sandbox can connect to; empty if there is none."""
    script = """import socket, sys
for address in sys.argv[1:]:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 3).close()
    except OSError:
        continue
    print(address)
    break
"""
    return (await communicate(await sandbox.open(["python3", "-c", script, *addresses]))).out.decode().strip()


async def exit_status_and_last_words(kit: Kit) -> None:
    """`wait` returns the program's exit status; the end of its standard error is kept, separate from its output."""
    async with kit.sandbox() as sandbox:
        for status in (0, 3, 255):
            got = await communicate(await sandbox.open(["sh", "-c", f"echo out; echo words >&2; exit {status}"]))
            ended = (got.status, got.out, got.err.strip())
            assert ended == (status, b"out\n", "words"), f"a program that exits with {status}"


async def unread_input_holds_nothing_up(kit: Kit) -> None:
    """A program that ends without reading its input ends its channel: `write` gives up, and its words are read."""
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["sh", "-c", "echo words; sleep 1; exit 3"])
        try:
            writing = asyncio.ensure_future(channel.write(bytes(8 << 20)))
            assert await within(30, channel.read(100), "its words") == b"words\n", "what it wrote"
            try:
                await within(30, writing, "writing to a program that has ended")
            except InfraError:
                pass
            try:
                assert await within(30, channel.read(100), "the end of its output") == b"", "what was read at its end"
            except InfraError:
                pass
        finally:
            await channel.aclose()


async def a_missing_program_is_told(kit: Kit) -> None:
    """A program that does not exist ends with status 126 or 127, or `open` fails; nothing hangs."""
    async with kit.sandbox() as sandbox:
        got = await within(
            30, communicate(await sandbox.open(["no-such-program-anywhere"])), "a program that does not exist"
        )
        assert got.status in (126, 127), f"its status is {got.status}, not 126 or 127"


async def a_channel_is_binary(kit: Kit) -> None:
    """All 256 byte values pass both ways unchanged: no terminal, no text mode."""
    data = bytes(range(256)) * 64
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["head", "-c", str(len(data))])
        (await communicate(channel, data)).prints(data, "what came back of all bytes, through `head`")


async def a_channel_carries_much(kit: Kit) -> None:
    """20 MB go in while they come out: neither direction waits for the other to finish."""
    data = os.urandom(1 << 20) * 20
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["head", "-c", str(len(data))])
        got = bytearray()
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(channel.write(data))
                while piece := await channel.read(1 << 20):
                    got += piece
        finally:
            await channel.aclose()
        if bytes(got) != data:
            pytest.fail(f"{len(got)} of {len(data)} bytes came back, or others than were sent")


async def small_pieces_arrive_at_once(kit: Kit) -> None:
    """Written data is sent at once: a line comes back without waiting for a full buffer."""
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["sh", "-c", 'while read -r line; do echo "got $line"; done'])
        try:
            for number in range(20):
                await channel.write(b"%d\n" % number)
                got = await within(10, channel.read(100), "the answer to a line")
                assert got == b"got %d\n" % number, "the answer"
        finally:
            await channel.aclose()


@pytest.mark.limit(120)
async def a_slow_reader_slows_the_writer(kit: Kit) -> None:
    """Unread output waits in the sandbox, not in our memory: 256 MB don't get through."""
    async with kit.sandbox() as sandbox:
        script = 'head -c 268435456 /dev/zero; echo done >"$1"'
        flag = f"{sandbox.workspace_base}/written"
        channel = await sandbox.open(["sh", "-c", script, "x", flag])
        try:
            await channel.read(1)
            await asyncio.sleep(2)
            got = await communicate(await sandbox.open(["cat", flag]))
            assert got.status != 0, "256 MB were taken from a program, and nobody had read them"
        finally:
            await channel.aclose()


async def channels_are_independent(kit: Kit) -> None:
    """Eight channels work at the same time; a stalled one does not delay the others."""
    async with kit.sandbox() as sandbox:
        stalled = await sandbox.open(["sh", "-c", "yes | head -c 50000000"])
        try:
            await stalled.read(1)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_echo(sandbox, number)) for number in range(8)]
            assert [task.result() for task in tasks] == [b"%d\n" % number for number in range(8)], (
                "what eight channels gave"
            )
        finally:
            await stalled.aclose()


async def _echo(sandbox: Sandbox, number: int) -> bytes:
    return (await communicate(await sandbox.open(["sh", "-c", f"sleep 0.1; echo {number}"]))).out


async def a_cancelled_read_loses_nothing(kit: Kit) -> None:
    """A cancelled `read` loses no bytes."""
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["sh", "-c", "i=0; while [ $i -lt 40 ]; do echo $i; i=$((i+1)); sleep 0.02; done"])
        got = b""
        try:
            while True:
                reading = asyncio.ensure_future(channel.read(1000))
                await asyncio.sleep(0.013)
                reading.cancel()
                try:
                    piece = await reading
                except asyncio.CancelledError:
                    continue
                if not piece:
                    break
                got += piece
        finally:
            await channel.aclose()
        assert got == b"".join(b"%d\n" % n for n in range(40)), "what was read, a few milliseconds at a time"


async def closing_is_idempotent(kit: Kit) -> None:
    """`aclose` can be called twice, and after the sandbox's end; nothing is read or written afterwards."""
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["sh", "-c", "sleep 1000"])
        await within(10, channel.aclose(), "closing a channel")
        await within(10, channel.aclose(), "closing it again")
        with pytest.raises(ChannelLost):
            await channel.write(b"x")
        other = await sandbox.open(["sh", "-c", "sleep 1000"])
        await sandbox.terminate()
        await within(10, other.aclose(), "closing a channel of a sandbox that has ended")


async def a_channel_ends_with_its_sandbox(kit: Kit) -> None:
    """When the sandbox ends, its readers soon get the end of the stream or `ChannelLost`."""
    async with kit.sandbox() as sandbox:
        channel = await sandbox.open(["sh", "-c", "echo in; sleep 1000"])
        try:
            assert await channel.read(100) == b"in\n", "its first line"
            reading = asyncio.ensure_future(channel.read(100))
            await asyncio.sleep(0)
            await sandbox.terminate()
            try:
                assert await within(30, reading, "reading while the sandbox ends") == b"", "what was read"
            except InfraError:
                pass
        finally:
            await channel.aclose()


async def a_program_outlives_its_channel(kit: Kit) -> None:
    """A daemon lives on when its channel is closed, as the guest must when a connection is lost."""
    async with kit.sandbox() as sandbox:
        daemon = 'trap "" HUP; (sleep 1; echo alive >"$1") </dev/null >/dev/null 2>&1 & echo begun'
        proof = f"{sandbox.workspace_base}/proof"
        channel = await sandbox.open(["sh", "-c", daemon, "x", proof])
        assert await channel.read(100) == b"begun\n", "its first line"
        await channel.aclose()

        async def alive() -> bool:
            return (await communicate(await sandbox.open(["cat", proof]))).out == b"alive\n"

        await until(alive, 20, "a process that ignores HUP was ended with its channel")


async def attaching(kit: Kit) -> None:
    """`attach` returns a handle on a running sandbox, and raises `SandboxLost` for one that does not run."""
    attach = getattr(kit.backend, "attach", None)
    if not kit.rig.capabilities.attach:
        pytest.skip("the backend does not declare `attach`")
    assert attach is not None, "it declares `attach` and has no such method"
    async with kit.sandbox() as sandbox:
        again: Sandbox = await attach(sandbox.id)
        assert again.id == sandbox.id, "the id of what was attached to"
        (await communicate(await again.open(["sh", "-c", "echo x"]))).prints(b"x\n", "what `sh` prints in it")
        await again.terminate()
        assert await sandbox.status() != SandboxStatus.RUNNING, "ended by the second handle, it still runs"
        with pytest.raises(SandboxLost):
            await attach(sandbox.id)


@pytest.mark.limit(300)
async def a_snapshot_keeps_files(kit: Kit) -> None:
    """A sandbox made from a snapshot has the files as they were when it was made, and the first one goes on."""
    if not kit.rig.capabilities.snapshot:
        pytest.skip("the backend does not declare `snapshot`")
    backend = cast(CanSnapshot, kit.backend)
    async with kit.sandbox() as first:
        path = f"{first.workspace_base}/kept"
        write = 'mkdir -p "$1"; echo "$2" >"$1/file"'
        await communicate(await first.open(["sh", "-c", write, "x", path, "before"]))
        snapshot_id = await backend.snapshot(first)
        await communicate(await first.open(["sh", "-c", write, "x", path, "after"]))
        (await communicate(await first.open(["cat", f"{path}/file"]))).prints(
            b"after\n", "the file in the first sandbox"
        )
    second = await backend.restore(kit.spec(), snapshot_id)
    try:
        (await communicate(await second.open(["cat", f"{path}/file"]))).prints(
            b"before\n", "the file in the second sandbox"
        )
    finally:
        await second.terminate()


@pytest.mark.limit(300)
async def an_image_is_built(kit: Kit) -> None:
    """`prepare_image` builds a folder with a Dockerfile, and the sandbox made from it has what was built."""
    if not kit.rig.capabilities.builds:
        pytest.skip("the backend does not declare `builds`")
    config = kit.rig.profile()
    if config.image is None:
        pytest.skip("the profile under test names no `image` to begin from")
    with tempfile.TemporaryDirectory(prefix="hermes-kit-") as folder:
        image = await cast(CanBuild, kit.backend).prepare_image(_build_on(config.image, Path(folder)), config)
    async with kit.sandbox_of(kit.spec(image=image)) as sandbox:
        (await communicate(await sandbox.open(["cat", "/built-by-the-kit"]))).prints(
            b"built\n", "the file that was built"
        )


def _build_on(image: str, folder: Path) -> ImageBuild:
    (folder / "Dockerfile").write_text(f"FROM {image}\nRUN echo built >/built-by-the-kit\n")
    return ImageBuild(folder)


@pytest.mark.limit(240)
async def a_cancelled_creation_leaves_nothing(kit: Kit) -> None:
    """`create` cancelled at any moment, followed by `terminate_id` of what is listed, leaves nothing, also later."""
    began = time.monotonic()
    async with kit.sandbox():
        took = time.monotonic() - began
    for delay in (0.0, 0.01, 0.05, 0.2, took / 2):
        creating = asyncio.ensure_future(kit.create(kit.spec()))
        await asyncio.sleep(delay)
        creating.cancel()
        try:
            await (await creating).terminate()
        except asyncio.CancelledError:
            pass
        for info in await kit.list_sandboxes():
            await kit.backend.terminate_id(info.sandbox_id)
    assert await kit.list_sandboxes() == [], "what is listed after five cancelled creations"
    end = time.monotonic() + LATER_S + 1.5 * took
    while time.monotonic() < end:  # a call of the provider that nobody awaits may have an effect only now
        await asyncio.sleep(0.2)
        assert await kit.list_sandboxes() == [], "what is listed some time after five cancelled creations"


async def the_diagnosis_says_something(kit: Kit) -> None:
    """`check` says in a sentence whether the backend can be used."""
    found = await kit.backend.check()
    assert found.usable and found.summary.strip(), (
        "it is usable here, and its diagnosis is empty or says that it is not"
    )
