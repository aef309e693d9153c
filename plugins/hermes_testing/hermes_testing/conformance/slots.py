"""Checks of slots: leases, verified reset, quarantine, killing, preparation."""

from __future__ import annotations

import asyncio

import pytest

from hermes_core import Isolation, SlotCommands, StaleSlotError
from hermes_testing.conformance.kit import Kit, communicate
from hermes_testing.conformance.running import BOMB, PROOF, TICKER, ticks, wait_for_ticks
from hermes_testing.conformance.waiting import within

COMMON = ("/tmp", "/var/tmp", "/dev/shm")


async def a_slot_says_what_it_is(kit: Kit) -> None:
    """A slot's handle names its sandbox, profile and workspace, and a level that is at least the requested one."""
    slot = await kit.lease()
    tools = await kit.common_tools()
    assert Isolation.parse(slot.isolation) >= kit.level, f"asked for {kit.level.label}, granted {slot.isolation}"
    assert slot.profile == "default", "its profile"
    assert slot.slot_id and slot.sandbox_id, "it has no id"
    assert (await tools.commands(slot).run("pwd")).text.strip() == slot.workspace_dir, "its workspace"


@pytest.mark.levels
async def a_slots_user_has_a_name(kit: Kit) -> None:
    """The user and the group that commands run as have names."""
    if kit.direct:
        pytest.skip("without a guest, commands run as the sandbox's own user, whom only the image can name")
    said = await (await kit.slot()).run("id -un && id -gn")
    if said.ok:
        return
    # In a system that is not the sandbox's own, or can't be written to, users can't be given names.
    async with kit.sandbox() as sandbox:
        writable = (
            sandbox.own_system and (await communicate(await sandbox.open(["sh", "-c", "test -w /etc"]))).status == 0
        )
    if not writable:
        pytest.skip("documented as open: the sandbox has no /etc of its own that can be written to")
    pytest.fail(f"the slot's user has no name: {said.error_text.strip()}")


async def a_released_handle_is_refused(kit: Kit) -> None:
    """After its release a handle is refused, even if its slot has a new owner."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        commands = tools.commands(slot)
        await tools.release(slot, reset_workspace=True)
        with pytest.raises(StaleSlotError):
            await commands.run("true")
        async with tools.lease() as other:
            await tools.commands(other).write_file("f", b"theirs")
            with pytest.raises(StaleSlotError):
                await commands.run("echo x >f")
            with pytest.raises(StaleSlotError):
                await tools.execute(slot, "bash", {"command": "true"})
            assert (await tools.commands(other).read_file("f")).data == b"theirs", "the new owner's file"


async def releasing_twice_does_no_harm(kit: Kit) -> None:
    """`release` is idempotent, and a second one does not touch the next lease."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        await asyncio.gather(*(tools.release(slot, reset_workspace=True) for _ in range(3)))
        async with tools.lease() as other:
            await tools.commands(other).write_file("f", b"x")
            await tools.release(slot, reset_workspace=True)
            assert (await tools.commands(other).read_file("f")).data == b"x", "the next lease's file"


@pytest.mark.levels
async def reset_leaves_no_file(kit: Kit) -> None:
    """After a reset the slot is empty: workspace, home, temporary files, odd names, files without permissions."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        script = (
            "mkdir -p d/e -- -rf ..x; touch .hidden ..x/f d/e/f; ln -s / root; chmod 000 d; "
            'echo planted >"$HOME/planted"; echo planted >"$TMPDIR/planted"; echo planted >planted'
        )
        assert (await tools.commands(slot).run(script)).ok, "the files could not be made"
        await tools.release(slot, reset_workspace=True)
        async with tools.lease() as other:
            commands = tools.commands(other)
            assert [entry.path for entry in await commands.list_dir()] == [], "the next lease's workspace"
            found = await commands.run('cat "$HOME/planted" "$TMPDIR/planted" planted 2>/dev/null; true')
            assert found.text == "", "what the next lease finds in its home and TMPDIR"


@pytest.mark.levels
async def reset_leaves_no_process(kit: Kit) -> None:
    """After a reset nothing of the slot runs: not in the background, in its own session, or ignoring TERM."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        commands = tools.commands(slot)
        await _leave_tickers(commands)
        before = (slot.sandbox_id, slot.generation)
        await within(60, tools.release(slot, reset_workspace=True), "a release with a reset")
        async with tools.lease() as other:
            assert (other.sandbox_id, other.generation) != before, "the same lease was given again"
            for _ in range(3):
                assert [entry.path for entry in await tools.commands(other).list_dir()] == [], (
                    "the next lease's workspace"
                )
                await asyncio.sleep(0.2)


async def _leave_tickers(commands: SlotCommands) -> None:
    """Start writers that go on in the workspace even if their parents die or the workspace is removed."""
    writer = 'while :; do mkdir -p "$1"; echo x >>"$1/ticks"; sleep 0.05; done'
    for prefix in ("", "setsid "):
        await commands.run(f"trap '' TERM HUP; ( {prefix}sh -c '{writer}' x \"$PWD\" >/dev/null 2>&1 & ) ; true")
    await wait_for_ticks(commands)


@pytest.mark.levels
async def reset_leaves_no_background_process(kit: Kit) -> None:
    """After a reset, the next lease lists no background processes: those of the last lease are gone."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        await tools.commands(slot).start("sleep 1000")
        await tools.release(slot, reset_workspace=True)
        async with tools.lease() as other:
            assert list(await tools.commands(other).processes()) == [], "the next lease's background processes"


@pytest.mark.levels(documented={Isolation.SHARED: "shared has one /tmp, and whose a file is nobody can say"})
async def reset_empties_common_directories(kit: Kit) -> None:
    """A slot's files in /tmp, /var/tmp and /dev/shm are gone after its reset; a neighbour's are not."""
    async with kit.tools(seats=2) as tools:
        slot, other = await tools.acquire(group="g"), await tools.acquire(group="g")
        names = [f"{place}/hermes-kit-{kit.owner}" for place in COMMON]
        for each, suffix in ((slot, "a"), (other, "b")):
            await tools.commands(each).run(
                f"for p in {' '.join(names)}; do mkdir -p $p-{suffix}/deep; done 2>/dev/null"
            )
        theirs = (await tools.commands(other).run(f"ls -d {'-b '.join(names)}-b 2>/dev/null")).text
        await tools.release(slot, reset_workspace=True)
        async with tools.lease(group="g") as again:
            looks = f"ls -d {'-a '.join(names)}-a 2>/dev/null; true"
            assert (await tools.commands(again).run(looks)).text == "", "what the next lease finds there"
        still = (await tools.commands(other).run(f"ls -d {'-b '.join(names)}-b 2>/dev/null")).text
        assert still == theirs, "what the neighbour has there"


@pytest.mark.levels
async def reset_spares_the_neighbours(kit: Kit) -> None:
    """A neighbour's files and processes are not touched by a slot's reset."""
    async with kit.tools(seats=2) as tools:
        slot, other = await tools.acquire(group="g"), await tools.acquire(group="g")
        neighbour = tools.commands(other)
        await neighbour.write_file("f", b"mine")
        process = await neighbour.start("sleep 1000")
        command = asyncio.ensure_future(neighbour.run("sleep 1; echo undisturbed"))
        await tools.commands(slot).run("sleep 1000 & true")
        await tools.release(slot, reset_workspace=True)
        assert (await command).text == "undisturbed\n", "a neighbour's command during the reset"
        assert (await neighbour.poll(process.process_id)).running, "a neighbour's background process was ended"
        assert (await neighbour.read_file("f")).data == b"mine", "a neighbour's file"


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(PROOF)
@pytest.mark.limit(120)
async def reset_ends_a_fork_bomb(kit: Kit) -> None:
    """A slot full of forking processes is reset and verified, or replaced: the next lease works."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        await tools.commands(slot).start(BOMB)
        await asyncio.sleep(1)
        await within(90, tools.release(slot, reset_workspace=True), "a release with a reset")
        async with tools.lease() as other:
            assert (await tools.commands(other).run("ls -A; echo fine")).text == "fine\n", "the next lease"


@pytest.mark.limit(150)
async def what_can_not_be_proved_clean_is_replaced(kit: Kit) -> None:
    """A slot whose guest does not answer is quarantined: its sandbox gets no other lease, and is replaced."""
    async with kit.tools(seats=1, per_sandbox=1, orphan_ttl_s=3.0) as tools:
        slot = await tools.acquire()
        await tools.commands(slot).run("true")
        await kit.backend.terminate_id(slot.sandbox_id)
        await within(90, tools.release(slot, reset_workspace=True), "the release of a slot whose sandbox is gone")
        async with tools.lease() as other:
            assert other.sandbox_id != slot.sandbox_id, "the next lease is on a sandbox that is gone"
            assert (await tools.commands(other).run("echo fine")).text == "fine\n", "the next lease"


async def killing_keeps_files(kit: Kit) -> None:
    """`kill_everything` ends the slot's processes and keeps its files and its lease."""
    slot = await kit.lease()
    tools = await kit.common_tools()
    commands = tools.commands(slot)
    await commands.write_file("kept", b"x")
    process = await commands.start(TICKER)
    await commands.run(f"({TICKER}) >/dev/null 2>&1 & true")
    await asyncio.sleep(0.3)
    await within(30, tools.kill_everything(slot), "kill_everything")
    before = await ticks(commands)
    await asyncio.sleep(0.4)
    assert await ticks(commands) == before, "ticks of what was killed, 0.4 s later"
    assert (await commands.read_file("kept")).data == b"x", "the file"
    running = [each.process_id for each in await commands.processes() if each.running]
    assert running == [], f"background processes that run (one was {process.process_id})"


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(PROOF)
async def a_slot_that_kills_everything_harms_itself_only(kit: Kit) -> None:
    """`kill -9 -1` is that command's failure, never the infrastructure's; the neighbour is not affected."""
    if kit.is_dedicated:
        pytest.skip("in a sandbox of its own a slot may be root, and end it")
    slot, other = await kit.neighbours()
    neighbour = asyncio.ensure_future(other.run("sleep 1; echo undisturbed"))
    for _ in range(3):
        result = await slot.run("kill -9 -1; sleep 0.2; exit 3")
        assert result.signal == 9 or result.exit_code == 3, f"it ended with {result.exit_code}, signal {result.signal}"
        assert (await slot.run("echo fine")).text == "fine\n", "the next command"
    assert (await neighbour).text == "undisturbed\n", "the neighbour's command"


async def a_release_without_reset_keeps_files(kit: Kit) -> None:
    """After a release without a reset, a slot keeps its files, but no process; verification gets a pristine one."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        await tools.commands(slot).write_file("f", b"kept")
        await tools.commands(slot).run(f"({TICKER}) >/dev/null 2>&1 & true")
        await tools.release(slot)
        async with tools.lease(verification=True) as other:
            assert [entry.path for entry in await tools.commands(other).list_dir()] == [], "a slot for verification"


@pytest.mark.needs("a preparation user apart")
async def preparation_is_read_only(kit: Kit) -> None:
    """Slots can read what was prepared for their sandbox, but not change it; they can't read what is private."""
    slot = await kit.lease()
    tools = await kit.common_tools()
    builds = []

    async def build(commands: SlotCommands, directory: str) -> None:
        builds.append(directory)
        await commands.write_file(f"{directory}/file", b"prepared")

    key = kit.owner
    shared = await asyncio.gather(*(tools.prepare(each, key, build) for each in (slot, slot)))
    assert (len(set(shared)), len(builds)) == (1, 1), "directories and builds of one key"
    assert (await tools.commands(slot).read_file(f"{shared[0]}/file")).data == b"prepared", "what a slot reads"
    private = await tools.prepare(slot, key + "-private", build, private=True)
    if kit.level < Isolation.USER:
        return
    for attempt in (
        f"echo x >>{shared[0]}/file",
        f"touch {shared[0]}/new",
        f"rm -rf {shared[0]}",
        f"cat {private}/file",
    ):
        await tools.commands(slot).run(attempt)
    assert (await tools.commands(slot).run(f"ls {shared[0]}; cat {shared[0]}/file")).text == "file\nprepared", (
        "afterwards"
    )
    assert not (await tools.commands(slot).run(f"cat {private}/file")).ok, "a slot reads what is private"
    await tools.preparation(slot).remove(private, recursive=True)
