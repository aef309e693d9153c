"""The tool backend on real local sandboxes: leases, batches, time limits, loss, preparation, status."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from hermes_core.errors import (
    AcquireTimeout,
    CommandError,
    ConfigError,
    ErrorKind,
    InfraError,
    PolicyError,
    ProvisionError,
    SandboxLost,
    StaleSlotError,
    UnknownNameError,
    UsageError,
)
from hermes_core.events import Events
from hermes_core.sandbox.commands import ExecutionResult, Slot, SlotState
from hermes_core.sandbox.contract import Capabilities, Isolation, SandboxConfig
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.sandbox.pool.leases import Lease, PooledSandbox
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.base import Tool
from hermes_core.tools.registry import ToolRegistry
from tests.support.processes import listing


class NoParams(BaseModel):
    """Nothing."""


async def _stubborn(ctx: Any, params: NoParams) -> str:
    await asyncio.sleep(60)
    return "never"


async def _remember(ctx: Any, params: NoParams) -> str:
    ctx.state["calls"] = ctx.state.get("calls", 0) + 1
    return f"{ctx.state['calls']} {ctx.trajectory_id} {ctx.timeout_s}"


async def _outside(ctx: Any, params: NoParams) -> str:
    return "driver"


def registry() -> ToolRegistry:
    tools = ToolRegistry()
    tools.add(Tool("stubborn", NoParams, _stubborn, "Does not keep its time limit."))
    tools.add(Tool("remember", NoParams, _remember, "Counts."))
    tools.add(Tool("brief", NoParams, _remember, "Has a time limit of its own.", timeout_s=5))
    tools.add(Tool("outside", NoParams, _outside, "Runs in the driver.", where="driver"))
    return tools


class Watcher:
    """Listens to what happens to sandboxes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.events = Events()
        for name in ("sandbox_created", "sandbox_lost", "sandbox_terminated"):
            self.events.listen(name, getattr(self, name))

    def sandbox_created(self, *, sandbox_id: str, backend: str, profile: str) -> None:
        self.seen.append(("created", sandbox_id))

    def sandbox_lost(self, *, sandbox_id: str, backend: str, profile: str, reason: str) -> None:
        self.seen.append(("lost", sandbox_id))

    def sandbox_terminated(self, *, sandbox_id: str, backend: str, profile: str) -> None:
        self.seen.append(("terminated", sandbox_id))
        raise RuntimeError("an observer's error changes nothing")


@pytest.fixture
def local(tmp_path):
    return LocalBackend(state_dir=str(tmp_path / "sandboxes"))


@pytest.fixture
def level(local) -> Isolation:
    return Isolation.USER if Isolation.USER in local.capabilities.isolation else Isolation.SHARED


@asynccontextmanager
async def opened(local: LocalBackend, level: Isolation, **config: Any) -> AsyncIterator[ToolBackend]:
    settings = {"slots_per_sandbox": 4, "min_sandboxes": 1, "max_sandboxes": 1, "reserve_slots": 0, **config}
    profiles = {"default": LocalConfig(**settings)}
    async with ToolBackend(local, profiles=profiles, tools=registry(), isolation=level, owner="test") as backend:
        yield backend
    assert await local.list("test") == []


@pytest.fixture
async def backend(local, level):
    async with opened(local, level) as backend:
        yield backend


async def sh(backend: ToolBackend, slot: Slot, command: str, **how: Any) -> ExecutionResult:
    return await backend.execute(slot, "bash", {"command": command}, **how)


async def test_a_command_and_its_metadata(backend):
    slot = await backend.acquire("traj")
    assert (slot.state, slot.trajectory_id, slot.profile) == (SlotState.ACQUIRED, "traj", "default")
    assert backend.missing(slot) == ()
    result = await sh(backend, slot, "pwd; echo err >&2; exit 3")
    assert (result.success, result.error_kind, result.error) == (False, ErrorKind.COMMAND, "err\n")
    assert result.output.strip() == slot.workspace_dir
    assert result.metadata["exit_code"] == 3 and result.slot_id == slot.slot_id and result.execution_id
    assert (await backend.execute(slot, "write_file", {"path": "a b", "content": "ü"})).success
    assert (await backend.execute(slot, "read_file", {"path": "a b"})).output == "ü"


async def test_a_lease_has_the_variables_that_it_is_given(backend):
    slot = await backend.acquire("a", env={"OF_THE_LEASE": "a b", "AND": "more"})
    other = await backend.acquire("b")
    assert (await sh(backend, slot, "echo $OF_THE_LEASE-$AND")).output == "a b-more\n"
    commands = backend.commands(slot)
    assert (await commands.run("echo $OF_THE_LEASE-$AND", env={"AND": "less"})).text == "a b-less\n"
    process = await commands.start("echo $OF_THE_LEASE")
    await commands.wait(process.process_id)
    assert (await commands.log(process.process_id)).data == b"a b\n"
    assert (await sh(backend, other, "echo ${OF_THE_LEASE-none}")).output == "none\n"


async def test_a_lease_starts_where_it_is_told_to(backend):
    slot = await backend.acquire("a", cwd="in/it")
    commands = backend.commands(slot)
    await commands.run("mkdir -p in/it", cwd=slot.workspace_dir)
    await commands.write_file("file", b"x")
    assert [entry.path for entry in await commands.list_dir()] == ["file"]
    assert (await sh(backend, slot, "pwd; cat file")).output == f"{slot.workspace_dir}/in/it\nx"
    assert (await commands.start("pwd")).cwd.endswith("in/it")
    assert (await commands.run("pwd", cwd="..")).text.rstrip() == f"{slot.workspace_dir}/in"
    assert (await commands.run("pwd", cwd="/usr")).text == "/usr\n"
    with pytest.raises(CommandError, match="not a path"):
        await commands.stat("")
    assert backend.preparation(slot).workspace_dir != slot.workspace_dir
    await backend.release(slot, reset_workspace=True)
    again = await backend.acquire("b")
    assert (await sh(backend, again, "pwd")).output == f"{again.workspace_dir}\n"


async def test_commands_end_at_the_limit_of_the_call_or_the_profile(local, level):
    async with opened(local, level, execution_timeout_s=0.3) as backend:
        assert backend.default_timeout_s == 0.3
        slot = await backend.acquire()
        began = time.monotonic()
        result = await sh(backend, slot, "sleep 20")
        assert result.error_kind is ErrorKind.TIMEOUT and result.metadata["exit_code"] == 124
        assert 0.3 <= time.monotonic() - began < 15
        result = await sh(backend, slot, "sleep 20", timeout_s=0.5)
        assert 0.5 <= result.metadata["duration_s"] < 15
        assert (await sh(backend, slot, "exit 124")).error_kind is ErrorKind.COMMAND
        for bad in (0, -1, float("inf"), float("nan"), True, "5"):
            with pytest.raises(UsageError):
                await sh(backend, slot, "true", timeout_s=bad)
            with pytest.raises(UsageError):
                await backend.acquire(timeout_s=bad)
            with pytest.raises(UsageError):
                await backend.execute_batch([], timeout_s=bad)


async def test_a_tool_that_does_not_keep_its_limit_is_cut_off(local, level, monkeypatch):
    monkeypatch.setattr("hermes_core.tool_backend.OVERTIME_S", 0.0)
    async with opened(local, level, orphan_ttl_s=1.0) as backend:
        slot = await backend.acquire()
        result = await backend.execute(slot, "stubborn", {}, timeout_s=0.1)
        assert result.error_kind is ErrorKind.TIMEOUT and "cut off" in result.error


async def test_tools_of_the_registry_and_unknown_ones(backend):
    slot = await backend.acquire("traj")
    assert (await backend.execute(slot, "remember", {})).output == "1 traj 30.0"
    assert (await backend.execute(slot, "remember", {}, timeout_s=5)).output == "2 traj 5"
    assert (await backend.execute(slot, "brief", {})).output == "3 traj 5"
    assert (await backend.execute(slot, "brief", {}, timeout_s=2)).output == "4 traj 2"
    assert (await backend.execute(slot, "brief", {}, timeout_s=60)).output == "5 traj 5"
    await backend.release(slot)
    slot = await backend.acquire("other")
    assert (await backend.execute(slot, "remember", {})).output.startswith("1 other")
    for name, hint in (("bsh", "'bash'"), ("remembr", "'remember'"), ("outside", "driver's process, not in the slot")):
        result = await backend.execute(slot, name, {})
        assert not result.success and hint in result.error
    assert not (await backend.execute(slot, "bash", {"comand": "true"})).success
    outside = registry().get("outside")
    assert "'outside' is a driver tool" in (await backend.execute(slot, outside, {})).error


@pytest.mark.full
@pytest.mark.usefixtures("loop_lag")
@pytest.mark.loop_stall(0.25)
async def test_fifty_slots_sleep_at_once(local, level):
    async with opened(local, level, slots_per_sandbox=25, min_sandboxes=2, max_sandboxes=2) as backend:
        slots = await asyncio.gather(*(backend.acquire(f"traj-{number}") for number in range(50)))
        began = time.monotonic()
        results = await backend.execute_batch([(slot, "bash", {"command": "sleep 1; echo $$"}) for slot in slots])
        took = time.monotonic() - began
        assert all(result.success for result in results)
        assert [result.slot_id for result in results] == [slot.slot_id for slot in slots]
        assert took < 20, took
        await asyncio.gather(*(backend.release(slot, reset_workspace=True) for slot in slots))
        assert backend.get_status()["available_slots"] == 50


async def test_one_bad_request_among_good_ones(backend):
    slots = [await backend.acquire() for _ in range(4)]
    await backend.release(slots[2])
    requests = [
        (slots[0], "bash", {"command": "echo a"}),
        (slots[1], "bash", {"command": "exit 1"}),
        (slots[2], "bash", {"command": "echo stale"}),
        (slots[3], "nonsense", {}),
        (slots[0], "bash", {"command": "sleep 9"}),
        (slots[3], "read_file", {"path": "missing"}),
        (slots[0], "bash", {"command": "echo z"}),
    ]
    results = await backend.execute_batch(requests, timeout_s=0.5)
    assert [result.error_kind for result in results] == [
        None,
        ErrorKind.COMMAND,
        ErrorKind.POLICY,
        ErrorKind.COMMAND,
        ErrorKind.TIMEOUT,
        ErrorKind.COMMAND,
        None,
    ]
    assert (results[0].output, results[-1].output) == ("a\n", "z\n")


async def test_a_released_handle_is_refused_even_if_the_slot_has_a_new_owner(local, level):
    async with opened(local, level, slots_per_sandbox=1) as backend:
        old = await backend.acquire("old")
        commands = backend.commands(old)
        await backend.release(old, reset_workspace=True)
        new = await backend.acquire("new")
        assert (new.slot_id, new.generation) == (old.slot_id, old.generation + 1)
        for call in (
            sh(backend, old, "touch intruder"),
            commands.run("touch intruder"),
            commands.write_file("intruder", b""),
            backend.kill_everything(old),
            backend.prepare(old, "key", None),
        ):
            with pytest.raises(StaleSlotError):
                await call
        with pytest.raises(StaleSlotError):
            backend.commands(old)
        await backend.release(old, reset_workspace=True)  # idempotent, and not the new owner's
        assert (await sh(backend, new, "ls")).output == ""


async def test_a_lease_makes_its_commands_once_and_is_checked_once_for_each(backend, monkeypatch):
    checked, check = [], Lease.check
    monkeypatch.setattr(Lease, "check", lambda lease: (checked.append(lease), check(lease)))
    slot = await backend.acquire()
    for work in (
        sh(backend, slot, "true"),
        backend.commands(slot).write_file("file", b"x"),
        backend.commands(slot).tar_out(),
        backend.kill_everything(slot),
    ):
        await work
        assert len(checked) == 1
        checked.clear()
    assert backend.commands(slot) is backend.commands(slot)


async def test_work_cut_off_by_a_release_is_stale(backend):
    slot = await backend.acquire()
    running = asyncio.create_task(backend.commands(slot).run("sleep 30"))
    await asyncio.sleep(0.1)
    await backend.release(slot, reset_workspace=True)
    with pytest.raises(StaleSlotError):
        await running


async def test_reset_leaves_nothing_for_the_next(local, level):
    async with opened(local, level, slots_per_sandbox=1) as backend:
        async with backend.lease("first") as slot:
            await sh(backend, slot, "mkdir a; touch a/b .c ..d; echo x >$TMPDIR/e; (setsid sleep 4321 &); sleep 4321 &")
            assert slot.workspace_dir == (await sh(backend, slot, "pwd")).output.strip()
        async with backend.lease("second") as slot:
            seen = await sh(backend, slot, f"ls -A; ls -A $TMPDIR; {listing('sleep 432[1]')}")
            assert seen.output == ""


async def test_release_without_reset_keeps_files_and_kills(local, level):
    async with opened(local, level, slots_per_sandbox=1) as backend:
        slot = await backend.acquire()
        await sh(backend, slot, "echo kept >file; sleep 4322 &")
        await backend.release(slot)
        again = await backend.acquire()
        seen = await sh(backend, again, f"cat file; {listing('sleep 432[2]')}")
        assert (again.slot_id, seen.output) == (slot.slot_id, "kept\n")
        await backend.release(again)
        verifier = await backend.acquire(verification=True)
        assert (verifier.slot_id, (await sh(backend, verifier, "ls -A")).output) == (slot.slot_id, "")


async def test_kill_everything_ends_the_processes_of_one_slot(backend):
    slot, other = await backend.acquire(), await backend.acquire()
    await sh(backend, slot, "sleep 4323 & setsid sleep 4323 &")
    await sh(backend, other, "sleep 4324 &")
    await backend.kill_everything(slot)
    assert (await sh(backend, slot, listing("sleep 432[3]"))).output == ""
    assert (await sh(backend, other, listing("sleep 432[4]"))).output != ""


async def test_state_follows_the_work(backend):
    slot = await backend.acquire()
    wait = "while [ ! -e go{0} ]; do sleep 0.02; done"
    tasks = [asyncio.create_task(sh(backend, slot, wait.format(n))) for n in (1, 2)]
    for n, task in enumerate(tasks, 1):
        await backend.commands(slot).write_file(f"go{n - 1}", b"")
        assert slot.state is SlotState.EXECUTING
        await backend.commands(slot).write_file(f"go{n}", b"")
        await task
    assert slot.state is SlotState.ACQUIRED
    await backend.release(slot, reset_workspace=True)
    assert slot.state is SlotState.AVAILABLE


async def test_ten_times_more_work_than_slots_is_served_in_order(local, level):
    async with opened(local, level, slots_per_sandbox=3) as backend:
        order: list[int] = []
        async with backend.lease(), backend.lease(), backend.lease():
            pass  # every slot has been opened: that takes this one longer and that one shorter

        async def turn(number: int) -> None:
            async with backend.lease(str(number)) as slot:
                order.append(number)
                await sh(backend, slot, "true")

        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(turn(number))
                await asyncio.sleep(0)
        assert order[3:] == sorted(order[3:])
        status = backend.get_status()
        assert (status["available_slots"], status["waiting"], status["total_slots"]) == (3, 0, 3)


async def test_each_image_has_a_pool_with_the_profiles_other_settings(local, level, monkeypatch):
    monkeypatch.setattr(LocalConfig, "unsupported", ())

    class Pictured(LocalBackend):
        """A local sandbox whose image is noted, and is nothing."""

        async def create(self, spec):
            images.append(spec.config.image)
            return await super().create(replace(spec, config=spec.config.model_copy(update={"image": None})))

    images = []
    backend = Pictured(state_dir=local._state_dir)
    async with opened(backend, level, min_sandboxes=0, max_processes=99) as tools:
        async with tools.lease(image="one") as one, tools.lease(image="one") as same, tools.lease(image="two") as two:
            assert one.sandbox_id == same.sandbox_id != two.sandbox_id
            assert (one.profile, two.profile) == ("default@one", "default@two")
            async with tools.lease(profile=one.profile) as fresh:
                assert fresh.sandbox_id == one.sandbox_id
        assert images == ["one", "two"]
        assert tools._pools["default@one"].config.max_processes == 99


async def test_as_many_hold_a_processor_as_there_are(local, level):
    count = len(os.sched_getaffinity(0))
    held, most = 0, 0

    async def hold(backend: ToolBackend) -> None:
        nonlocal held, most
        async with backend.lease() as slot, backend.processor(slot):
            held += 1
            most = max(most, held)
            await asyncio.sleep(0.01)
            held -= 1

    async with opened(local, level, slots_per_sandbox=2 * count + 1) as backend:
        async with asyncio.TaskGroup() as group:
            for _ in range(4 * count):
                group.create_task(hold(backend))
        assert most == count


async def test_who_waits_for_a_processor_hears_of_a_release(backend):
    slot = await backend.acquire()
    async with AsyncExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            await stack.enter_async_context(backend.processor(slot))
        late = asyncio.create_task(stack.enter_async_context(backend.processor(slot)))
        given_up = asyncio.create_task(stack.enter_async_context(backend.processor(slot)))
        await asyncio.sleep(0)
        given_up.cancel()
        await backend.release(slot)
    with pytest.raises(StaleSlotError):
        await late
    async with backend.lease() as slot, asyncio.timeout(20), AsyncExitStack() as stack:
        for _ in os.sched_getaffinity(0):  # all of them can be had again
            await stack.enter_async_context(backend.processor(slot))


@pytest.mark.parametrize(("cpu", "turns"), [(None, 4), (1.0, 1), (1.5, 2), (64.0, 4)])
def test_the_profile_bounds_the_processors(cpu, turns):
    pooled = PooledSandbox.of(SimpleNamespace(id="box"), SimpleNamespace(processors=4), slots=1, cpu=cpu)
    assert pooled.processors._each._value == turns


async def test_acquire_gives_up_at_its_deadline(backend):
    for _ in range(4):
        await backend.acquire()
    began = time.monotonic()
    with pytest.raises(AcquireTimeout) as caught:
        await backend.acquire("late", timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 20
    assert "0 of 4 slots free" in str(caught.value)


async def test_as_many_rollouts_as_slots_all_verify(local, level):
    async with opened(local, level, slots_per_sandbox=3, max_sandboxes=2, reserve_slots=1) as backend:

        async def rollout(number: int) -> None:
            async with backend.lease(f"a{number}", group="g") as agent:
                await sh(backend, agent, "echo work >file")
                async with backend.lease(f"v{number}", group="g", verification=True) as verifier:
                    assert (await sh(backend, verifier, "ls -A")).output == ""

        async with asyncio.timeout(30):
            await asyncio.gather(*(rollout(number) for number in range(6)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 3))])
async def test_cancelling_at_random_moments_leaks_nothing(local, level, seed):
    chance = random.Random(seed)
    async with opened(local, level, slots_per_sandbox=3, max_sandboxes=2, reserve_slots=1, idle_timeout=99) as backend:

        async def life(number: int) -> None:
            async with backend.lease(f"{number}", verification=chance.random() < 0.3) as slot:
                await sh(backend, slot, f"sleep {chance.random() * 0.02:.3f}; touch file")

        tasks = []
        for number in range(40):
            tasks.append(asyncio.create_task(life(number)))
            if chance.random() < 0.6:
                asyncio.get_running_loop().call_later(chance.random() * 0.15, tasks[-1].cancel)
            await asyncio.sleep(chance.random() * 0.005)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
        async with asyncio.timeout(5):
            while True:
                status = backend.get_status()
                if status["available_slots"] == status["total_slots"] and not status["pools"]["default"]["creating"]:
                    break
                await asyncio.sleep(0.01)
        assert status["waiting"] == 0 and len(await local.list("test")) == status["sandboxes"]
        for _ in range(status["total_slots"] - 1):
            slot = await backend.acquire()
            assert (await sh(backend, slot, "ls -A")).output == ""


async def test_a_sandbox_killed_in_mid_command_is_infra_and_replaced(local, level):
    async with opened(local, level, slots_per_sandbox=1) as backend:
        slot = await backend.acquire("victim")
        running = asyncio.create_task(sh(backend, slot, "sleep 30"))
        waiting = asyncio.create_task(backend.acquire("next"))
        await asyncio.sleep(0.2)
        await local.terminate_id(slot.sandbox_id)
        with pytest.raises(InfraError) as caught:
            await running
        error = caught.value
        assert (error.sandbox_id, error.slot_id, error.trajectory_id) == (slot.sandbox_id, slot.slot_id, "victim")
        replacement = await waiting
        assert replacement.sandbox_id != slot.sandbox_id
        assert (await sh(backend, replacement, "echo ok")).output == "ok\n"
        with pytest.raises(SandboxLost):
            await sh(backend, slot, "true")
        assert slot.state is SlotState.ERROR
        await backend.release(slot, reset_workspace=True)
        [result] = await backend.execute_batch([(slot, "bash", {"command": "true"})])
        assert result.error_kind is ErrorKind.POLICY


async def test_a_sandbox_killed_while_idle_is_replaced(local, level):
    watcher = Watcher()
    profiles = {"default": LocalConfig(slots_per_sandbox=2, max_sandboxes=1)}
    async with ToolBackend(
        local, profiles=profiles, tools=registry(), isolation=level, owner="test", events=watcher.events
    ) as backend:
        [first] = await local.list("test")
        await local.terminate_id(first.sandbox_id)
        async with asyncio.timeout(10):
            while backend.get_status()["healthy_sandboxes"] == 0 or ("lost", first.sandbox_id) not in watcher.seen:
                await asyncio.sleep(0.02)
        slot = await backend.acquire("t")
        assert (await sh(backend, slot, "echo ok")).output == "ok\n"
    kinds = [kind for kind, _ in watcher.seen]
    assert kinds.count("created") == 2 and kinds.count("terminated") == 2


async def test_preparation_is_made_once_and_read_only(local, level):
    builds = []

    async def build(commands: Any, directory: str) -> None:
        builds.append(directory)
        await commands.run("sleep 0.1; echo made >file", cwd=directory)

    async with opened(local, level, slots_per_sandbox=3) as backend:
        slots = [await backend.acquire() for _ in range(3)]
        places = await asyncio.gather(*(backend.prepare(slot, "key-1", build) for slot in slots))
        assert len(set(places)) == 1 and builds == [places[0]]
        assert await backend.prepare(slots[0], "key-1", build) == places[0] and len(builds) == 1
        seen = await sh(backend, slots[1], f"cat {places[0]}/file")
        assert seen.output == "made\n", seen
        hidden = await backend.prepare(slots[0], "key-1", build, private=True)
        assert hidden != places[0] and len(builds) == 2
        assert (await backend.preparation(slots[0]).read_file(f"{hidden}/file")).data == b"made\n"
        if level >= Isolation.USER:
            tampered = await sh(backend, slots[0], f"echo no >{places[0]}/file; touch {places[0]}/more; cat {hidden}/*")
            assert not tampered.success and "made" not in tampered.output
            assert (await sh(backend, slots[2], f"cat {places[0]}/*")).output == "made\n"
        for key in ("", "../up", "a/b", ".hidden", "x" * 200, "a\0"):
            with pytest.raises(UsageError):
                await backend.prepare(slots[0], key, build)


async def test_a_failed_preparation_fails_all_and_leaves_nothing(backend):
    attempts = []

    async def build(commands: Any, directory: str) -> None:
        attempts.append(directory)
        await commands.write_file(f"{directory}/half", b"")
        await asyncio.sleep(0.05)
        if len(attempts) == 1:
            raise ValueError("broken")

    slots = [await backend.acquire() for _ in range(2)]
    outcomes = await asyncio.gather(*(backend.prepare(slot, "key", build) for slot in slots), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["broken", "broken"] and len(attempts) == 1
    assert not (await sh(backend, slots[0], f"test -e {attempts[0]}")).success
    assert await backend.prepare(slots[0], "key", build) == attempts[0] and len(attempts) == 2


async def test_whoever_waited_for_what_failed_is_named_in_an_error_of_their_own(backend):
    async def build(_commands: Any, _directory: str) -> None:
        await asyncio.sleep(0.05)
        raise ProvisionError("the mirror is down", hint="try later")

    slots = [await backend.acquire(f"t{number}") for number in range(2)]
    errors = await asyncio.gather(*(backend.prepare(slot, "key", build) for slot in slots), return_exceptions=True)
    assert [(type(error), error.message, error.hint) for error in errors] == [
        (ProvisionError, "the mirror is down", "try later")
    ] * 2
    assert [(error.slot_id, error.trajectory_id) for error in errors] == [
        (slot.slot_id, slot.trajectory_id) for slot in slots
    ]


async def test_a_preparation_outlives_the_one_who_began_it_but_not_the_last(backend):
    begun, ended = asyncio.Event(), []

    async def build(commands: Any, directory: str) -> None:
        begun.set()
        try:
            await commands.run("sleep 0.3; touch done", cwd=directory)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append("built")

    slots = [await backend.acquire() for _ in range(2)]
    first, second = (asyncio.create_task(backend.prepare(slot, "key", build)) for slot in slots)
    await begun.wait()
    first.cancel()
    assert (await sh(backend, slots[0], f"ls {await second}")).output == "done\n"
    begun.clear()
    alone = asyncio.create_task(backend.prepare(slots[0], "other", build))
    await begun.wait()
    alone.cancel()
    again = asyncio.create_task(backend.prepare(slots[1], "other", build))
    with pytest.raises(asyncio.CancelledError):
        await alone
    assert (await again).endswith("/other") and ended == ["built", "cancelled", "built"]


async def test_profiles_have_pools_of_their_own(local, level):
    profiles = {
        "default": LocalConfig(slots_per_sandbox=1, reserve_slots=0, max_sandboxes=2),
        "wide": LocalConfig(name="wide", slots_per_sandbox=3, max_sandboxes=1, execution_timeout_s=7),
    }
    async with ToolBackend(local, profiles=profiles, tools=registry(), isolation=level, owner="test") as backend:
        assert backend.get_status()["active_pools"] == ["default"]
        assert not backend.list_profiles()["wide"]["active"]
        one, two = await backend.acquire("1"), await backend.acquire("2", profile="wide")
        assert one.slot_id != two.slot_id and two.profile == "wide"
        assert (await backend.execute(two, "remember", {})).output == "1 2 7.0"
        status = backend.get_status()
        assert (status["sandboxes"], status["total_slots"], status["max_sandboxes"]) == (2, 4, 3)
        assert status["pools"]["wide"]["available_slots"] == 2
        assert backend.list_profiles()["wide"]["slots_per_sandbox"] == 3
        results = await backend.execute_batch([(slot, "bash", {"command": "pwd"}) for slot in (one, two)])
        assert all(result.success for result in results)
        with pytest.raises(UnknownNameError) as caught:
            await backend.acquire(profile="wid")
        assert "'wide'" in str(caught.value)


def test_bad_profiles_are_refused(local, level):
    def make(**profiles: SandboxConfig) -> ToolBackend:
        return ToolBackend(local, profiles=profiles, tools=registry(), isolation=level, owner="test")

    with pytest.raises(UnknownNameError):
        make(other=LocalConfig(name="other"))
    with pytest.raises(ConfigError):
        make(default=LocalConfig(name="other"))
    with pytest.raises(ConfigError):
        make(default=LocalConfig(slots_per_sandbox=1, max_sandboxes=1))


class OneEach(LocalBackend):
    """Declares nothing between directories and a sandbox for each slot."""

    capabilities = Capabilities(isolation=frozenset({Isolation.SHARED, Isolation.DEDICATED}))

    async def create(self, spec):
        return await super().create(replace(spec, isolation=Isolation.SHARED))


async def test_a_level_that_is_not_declared_becomes_the_next_stronger_one(tmp_path):
    async with opened(OneEach(state_dir=str(tmp_path)), Isolation.USER, max_sandboxes=2, min_sandboxes=0) as backend:
        slots = [await backend.acquire(f"t{number}") for number in range(2)]
        assert backend.isolation is Isolation.DEDICATED
        assert [slot.isolation for slot in slots] == ["dedicated"] * 2
        assert slots[0].sandbox_id != slots[1].sandbox_id


async def test_closing_with_work_under_way(local, level):
    backend = ToolBackend(
        local,
        profiles={"default": LocalConfig(slots_per_sandbox=1, max_sandboxes=1, reserve_slots=0)},
        tools=registry(),
        isolation=level,
        owner="test",
    )
    await backend.start()
    slot = await backend.acquire()
    tasks = [
        asyncio.create_task(sh(backend, slot, "sleep 30")),
        asyncio.create_task(backend.acquire()),
        asyncio.create_task(backend.prepare(slot, "key", lambda commands, _: commands.run("sleep 30"))),
    ]
    await asyncio.sleep(0.2)
    async with asyncio.timeout(10):
        await asyncio.gather(backend.aclose(), backend.aclose())
    for task in tasks:
        with pytest.raises((InfraError, UsageError)):
            await task
    await backend.release(slot)
    with pytest.raises(UsageError):
        await backend.acquire()
    assert await local.list("test") == [] and os.listdir(local._state_dir) == []


async def test_a_profile_that_can_not_be_served_is_of_no_matter_to_others(local, level):
    if level is not Isolation.USER:
        pytest.skip("this host grants no isolation between slots")
    profiles = {"default": LocalConfig(), "above": LocalConfig(name="above", slot_user="root")}
    asked = {"profiles": profiles, "tools": registry(), "isolation": level, "owner": "test"}
    async with ToolBackend(local, **asked) as backend:
        async with backend.lease() as slot:
            assert slot.profile == "default"
        with pytest.raises(PolicyError, match="slot_user 'root' at level 'user'"):
            await backend.acquire(profile="above")
    with pytest.raises(PolicyError, match="slot_user"):
        ToolBackend(local, default_profile="above", **asked)
