"""Pools: who gets which slot when, and that nothing is lost or leaked however creation, opening or reset go.

The provider and the client are doubles here, so that every failure and every order can be brought about; the tests of
the tool backend run the same on real sandboxes.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from hermes_core.errors import (
    AcquireTimeout,
    ChannelLost,
    ConfigError,
    InfraError,
    PolicyError,
    ProvisionError,
    SandboxLost,
    SlotLost,
    SlotUnclean,
    UsageError,
)
from hermes_core.events import Events
from hermes_core.sandbox.contract import (
    Backend,
    Capabilities,
    Channel,
    Diagnosis,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxStatus,
)
from hermes_core.sandbox.pool import cost, provision
from hermes_core.sandbox.pool.cost import CostLimitReached, Meter
from hermes_core.sandbox.pool.leases import Lease, Turns
from hermes_core.sandbox.pool.pool import LEAVING_BESIDE, Pool
from hermes_core.sandbox.pool.profile_check import check_profile
from hermes_core.sandbox.pool.provision import Provisioner


class Box(Sandbox):
    """A sandbox in name only."""

    def __init__(self, provider: Provider, number: int) -> None:
        self.id = f"box/{number}"
        self.provider = provider

    async def open(self, argv: Any, *, env: Any = None) -> Any:
        raise NotImplementedError

    async def status(self) -> SandboxStatus:
        return SandboxStatus.RUNNING

    async def terminate(self) -> None:
        await asyncio.sleep(self.provider.end_delay)
        self.provider.living.pop(self.id, None)


class Provider(Backend):
    """Makes boxes, with the failures that a test asks for."""

    name = "provider"
    capabilities = Capabilities(isolation=frozenset({Isolation.USER, Isolation.DEDICATED}))

    def __init__(self) -> None:
        self.living: dict[str, str] = {}
        self.creation_ids: list[str] = []
        self.made = 0
        self.most = 0
        self.creating = 0
        self.most_creating = 0
        self.before: Callable[[], Any] = lambda: None
        self.after: Callable[[], Any] = lambda: None
        self.delay = 0.0
        self.end_delay = 0.0

    async def create(self, spec: Any) -> Sandbox:
        self.creation_ids.append(spec.creation_id)
        self.creating += 1
        self.most_creating = max(self.most_creating, self.creating)
        try:
            await asyncio.sleep(self.delay)
            self.before()
            for sandbox_id, creation_id in self.living.items():
                if creation_id == spec.creation_id:
                    return Box(self, int(sandbox_id.partition("/")[2]))
            self.made += 1
            box = Box(self, self.made)
            self.living[box.id] = spec.creation_id
            self.most = max(self.most, len(self.living))
            await asyncio.sleep(0)
            self.after()
            return box
        finally:
            self.creating -= 1

    async def list(self, owner: str | None = None) -> list[SandboxInfo]:
        return [SandboxInfo(each, "me", made, 0.0, SandboxStatus.RUNNING) for each, made in self.living.items()]

    async def terminate_id(self, sandbox_id: str) -> None:
        await asyncio.sleep(self.end_delay)
        self.living.pop(sandbox_id, None)

    async def check(self) -> Diagnosis:
        return Diagnosis(True, "")


class Idle:
    """A client whose slots do nothing."""

    granted = Isolation.USER
    processors = 1

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.lost = asyncio.Event()
        self.opened: list[int] = []
        self.resets: list[int] = []
        self.closed = False
        self.closing: asyncio.Event | None = None
        self.trouble: dict[str, Exception] = {}
        self.pause = 0.0

    async def _do(self, what: str) -> None:
        await asyncio.sleep(self.pause)
        if what in self.trouble:
            raise self.trouble[what]

    async def open_slot(self, index: int) -> str:
        await self._do("open")
        self.opened.append(index)
        return f"/data/slot_{index}"

    def commands(self, index: int, *_: object) -> Any:
        return None

    async def kill_slot(self, index: int, *, forget: bool = False) -> None:
        await self._do("kill")

    async def reset_slot(self, index: int) -> None:
        await self._do("reset")
        self.resets.append(index)

    async def aclose(self, *, end_sandbox: bool = False) -> None:
        self.closed = True
        if self.closing is not None and end_sandbox:
            await self.closing.wait()


class World:
    """A provider, the clients of its boxes, and pools on it."""

    def __init__(self) -> None:
        self.provider = Provider()
        self.clients: list[Idle] = []
        self.pools: list[Pool] = []
        self.trouble_at_start: list[Exception] = []

    async def client(self, sandbox: Sandbox, settings: Any) -> Idle:
        await asyncio.sleep(0)
        if self.trouble_at_start:
            raise self.trouble_at_start.pop(0)
        self.clients.append(Idle(settings))
        return self.clients[-1]

    def pool(self, isolation: Isolation = Isolation.USER, max_creating: int = 4, **config: Any) -> Pool:
        provisioner = Provisioner(
            self.provider, isolation=isolation, owner="me", max_creating=max_creating, start_client=self.client
        )
        settings = {"slots_per_sandbox": 2, "min_sandboxes": 1, "max_sandboxes": 2, "reserve_slots": 0, **config}
        self.pools.append(Pool(SandboxConfig(**settings), provisioner, Events()))
        return self.pools[-1]


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(provision, "FIRST_PAUSE_S", 0.005)
    world = World()
    yield world
    for pool in world.pools:
        await pool.aclose()
        assert len(pool._tasks) == 0
    assert world.provider.living == {}
    assert all(client.closed for client in world.clients)


async def take(pool: Pool, name: str = "t", **how: Any) -> Lease:
    return await pool.acquire(name, **{"group": None, "verification": False, "timeout_s": 2.0, **how})


def counts(pool: Pool) -> tuple[int, int, int]:
    status = pool.status()
    return status["healthy_sandboxes"], status["available_slots"], status["waiting"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


# --- growth and retirement --------------------------------------------------------------------------------------------


async def test_start_warms_to_the_minimum_in_parallel_within_the_limit(world):
    world.provider.delay = 0.02
    pool = world.pool(min_sandboxes=6, max_sandboxes=6, max_creating=3)
    await pool.start()
    assert counts(pool) == (6, 12, 0)
    assert world.provider.most_creating == 3


async def test_nothing_is_made_before_a_pool_is_asked_for(world):
    pool = world.pool()
    await asyncio.sleep(0.01)
    assert world.provider.creation_ids == [] and not pool.begun
    lease = await take(pool)
    assert pool.begun and counts(pool) == (1, 1, 0)
    assert lease.slot.workspace_dir == "/data/slot_0"


async def test_growth_follows_demand_and_no_further(world):
    pool = world.pool(min_sandboxes=0, max_sandboxes=5, slots_per_sandbox=4)
    leases = await asyncio.gather(*(take(pool, str(number)) for number in range(9)))
    assert len(world.provider.creation_ids) == 3
    assert len({lease.slot.slot_id for lease in leases}) == 9
    assert all("/" not in lease.slot.slot_id for lease in leases)


async def test_the_maximum_is_never_passed(world):
    pool = world.pool(max_sandboxes=3)
    await asyncio.gather(*(one_turn(pool, number) for number in range(60)))
    assert world.provider.most <= 3
    assert counts(pool)[2] == 0


async def one_turn(pool: Pool, number: int) -> int:
    lease = await take(pool, str(number))
    await asyncio.sleep(0)
    await pool.release(lease, reset=True)
    return number


async def test_idle_sandboxes_above_the_minimum_are_retired(world):
    pool = world.pool(max_sandboxes=3, idle_timeout=0.05)
    leases = [await take(pool) for _ in range(6)]
    assert counts(pool)[0] == 3
    released = time.monotonic()
    for lease in leases:
        await pool.release(lease, reset=True)
    await until(lambda: counts(pool)[0] < 3)
    assert time.monotonic() - released > 0.045, "one was idle for a shorter time"
    await until(lambda: len(world.provider.living) == 1)
    assert counts(pool) == (1, 2, 0)


async def test_a_busy_sandbox_is_not_retired(world):
    pool = world.pool(min_sandboxes=0, idle_timeout=0.02)
    await take(pool)
    await asyncio.sleep(0.06)
    assert counts(pool) == (1, 1, 0)


async def test_a_decision_says_what_is_to_be_done_and_begins_none_of_it(world):
    pool = world.pool(min_sandboxes=2, max_sandboxes=3)
    pool.begun = True
    decision = pool._decide(now=0.0)
    assert (decision.missing, decision.served, decision.ended, decision.due) == (2, [], [], math.inf)
    assert counts(pool) == (0, 0, 0) and len(pool._tasks) == 0
    await pool.start()
    lease, later = await take(pool), asyncio.get_running_loop().time() + 2 * pool.config.idle_timeout
    pool.config = pool.config.model_copy(update={"min_sandboxes": 0})
    decision = pool._decide(now=later)
    assert [pooled.leases for pooled in decision.ended] == [set()] and lease.pooled not in decision.ended
    assert counts(pool)[0] == len(world.provider.living) == 2


# --- order and deadlines ----------------------------------------------------------------------------------------------


async def test_first_come_first_served_under_tenfold_demand(world):
    pool = world.pool(slots_per_sandbox=2, max_sandboxes=2, min_sandboxes=2)
    await pool.start()
    order: list[int] = []

    async def turn(number: int) -> None:
        lease = await take(pool, str(number))
        order.append(number)
        await asyncio.sleep(random.random() * 0.003)
        await pool.release(lease, reset=True)

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(turn(number))
            await asyncio.sleep(0)
    # A slot that is opened for the first time is handed out a moment later than one that is ready.
    assert order[4:] == sorted(order[4:]) and set(order[:4]) == set(range(4))


async def test_a_deadline_says_how_things_stand(world):
    pool = world.pool(max_sandboxes=1, acquire_timeout_s=9)
    held = [await take(pool) for _ in range(2)]
    with pytest.raises(AcquireTimeout) as caught:
        await take(pool, timeout_s=0.05)
    assert "0 of 2 slots free" in str(caught.value) and "0 others waiting" in str(caught.value)
    assert counts(pool) == (1, 0, 0)
    await pool.release(held[0], reset=True)
    assert (await take(pool)).slot.slot_id == held[0].slot.slot_id


async def test_a_waiter_that_leaves_does_not_hold_those_behind(world):
    pool = world.pool(max_sandboxes=1, slots_per_sandbox=1)
    held = await take(pool)
    first = asyncio.create_task(take(pool, "first"))
    second = asyncio.create_task(take(pool, "second"))
    await asyncio.sleep(0)
    first.cancel()
    await pool.release(held, reset=True)
    assert (await second).slot.trajectory_id == "second"


async def test_a_slot_that_falls_free_in_the_turn_in_which_its_waiter_is_cancelled_goes_to_the_next(world):
    pool = world.pool(max_sandboxes=1, slots_per_sandbox=1)
    held = await take(pool)
    first = asyncio.create_task(take(pool, "first"))
    second = asyncio.create_task(take(pool, "second"))
    await asyncio.sleep(0)
    released = pool.release(held, reset=False)
    pump = pool.pump
    pool.pump = lambda: (first.cancel(), pump())
    await released
    pool.pump = pump
    assert (await second).slot.trajectory_id == "second" and first.cancelled()


async def test_a_lease_given_in_the_turn_in_which_its_waiter_is_cancelled_goes_on(world, monkeypatch):
    pool = world.pool(max_sandboxes=1, slots_per_sandbox=1)
    held = await take(pool)
    first = asyncio.create_task(take(pool, "first"))
    await asyncio.sleep(0)
    hand_out = pool._hand_out
    monkeypatch.setattr(pool, "_hand_out", lambda *served: (hand_out(*served), first.cancel()))
    pool.release(held, reset=True)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert counts(pool) == (1, 1, 0)
    assert (await take(pool, timeout_s=0.5)).slot.generation == 3


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 8))])
async def test_cancelling_at_random_moments_leaks_nothing(world, seed):
    chance = random.Random(seed)
    pool = world.pool(slots_per_sandbox=3, max_sandboxes=3, reserve_slots=1, idle_timeout=60)
    world.provider.delay = 0.004

    async def life() -> None:
        lease = await take(pool, verification=chance.random() < 0.3, group=chance.choice([None, "a", "b"]))
        try:
            await asyncio.sleep(chance.random() * 0.004)
        finally:
            await asyncio.shield(pool.release(lease, reset=chance.random() < 0.7))

    tasks = []
    for _ in range(80):
        tasks.append(asyncio.create_task(life()))
        if chance.random() < 0.5:
            asyncio.get_running_loop().call_later(chance.random() * 0.01, tasks[-1].cancel)
        await asyncio.sleep(chance.random() * 0.001)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
    await until(lambda: not pool._creations and all(not pooled.leases for pooled in pool._existing()))
    healthy, available, waiting = counts(pool)
    assert available == healthy * 3 and waiting == 0 and healthy == len(world.provider.living)
    # and every slot can be had again, but for the reserve
    most = pool.config.max_sandboxes * 3 - 1
    again = await asyncio.gather(*(take(pool) for _ in range(most)))
    assert len({lease.slot.slot_id for lease in again}) == most


# --- groups and the reserve -------------------------------------------------------------------------------------------


async def test_a_group_shares_a_sandbox_where_it_fits(world):
    pool = world.pool(slots_per_sandbox=4, max_sandboxes=3, min_sandboxes=3)
    await pool.start()
    placed: dict[str, set[str]] = {}
    for _ in range(4):
        for group in ("a", "b", "c"):
            lease = await take(pool, group=group)
            placed.setdefault(group, set()).add(lease.slot.sandbox_id)
    assert all(len(sandboxes) == 1 for sandboxes in placed.values()), placed


async def test_a_group_comes_back_to_its_sandbox(world):
    pool = world.pool(slots_per_sandbox=2, max_sandboxes=2, min_sandboxes=2)
    await pool.start()
    first = await take(pool, group="a")
    other = await take(pool, group="b")
    await pool.release(first, reset=True)
    await pool.release(other, reset=True)
    assert (await take(pool, group="b")).slot.sandbox_id == other.slot.sandbox_id
    assert (await take(pool, group="a")).slot.sandbox_id == first.slot.sandbox_id


async def test_without_a_group_slots_are_packed(world):
    pool = world.pool(slots_per_sandbox=3, max_sandboxes=2, min_sandboxes=2)
    await pool.start()
    assert len({(await take(pool)).slot.sandbox_id for _ in range(3)}) == 1


async def test_rollouts_never_take_the_reserve(world):
    pool = world.pool(slots_per_sandbox=3, max_sandboxes=1, reserve_slots=1)
    agents = [await take(pool) for _ in range(2)]
    with pytest.raises(AcquireTimeout):
        await take(pool, timeout_s=0.05)
    verifier = await take(pool, verification=True)
    with pytest.raises(AcquireTimeout):
        await take(pool, verification=True, timeout_s=0.05)
    await pool.release(agents[0], reset=True)
    second = await take(pool, verification=True)  # an ordinary one that is free
    await pool.release(verifier, reset=True)
    assert await take(pool)
    assert second.slot.slot_id == agents[0].slot.slot_id


async def test_verification_passes_the_rollouts_that_wait(world):
    pool = world.pool(slots_per_sandbox=2, max_sandboxes=1, reserve_slots=1)
    agent = await take(pool)
    waiting = asyncio.create_task(take(pool))
    await asyncio.sleep(0.01)
    assert await take(pool, verification=True)
    assert not waiting.done()
    await pool.release(agent, reset=True)
    assert await waiting


@pytest.mark.parametrize("slots", [2, 3, 5])
async def test_as_many_rollouts_as_slots_all_verify(world, slots):
    pool = world.pool(slots_per_sandbox=slots, max_sandboxes=2, reserve_slots=1)

    async def rollout(number: int) -> None:
        agent = await take(pool, str(number))
        await asyncio.sleep(0.001)
        verifier = await take(pool, str(number), verification=True)
        await asyncio.sleep(0.001)
        await pool.release(verifier, reset=True)
        await pool.release(agent, reset=True)

    async with asyncio.timeout(3):
        await asyncio.gather(*(rollout(number) for number in range(slots * 2)))


async def test_the_reserve_must_leave_something(world):
    with pytest.raises(ConfigError) as caught:
        world.pool(slots_per_sandbox=1, max_sandboxes=2, reserve_slots=2)
    assert caught.value.hint
    with pytest.raises(ConfigError):
        world.pool(min_sandboxes=3, max_sandboxes=2)


async def test_dedicated_is_one_slot_per_sandbox(world):
    pool = world.pool(isolation=Isolation.DEDICATED, slots_per_sandbox=10, max_sandboxes=2, reserve_slots=1)
    agent = await take(pool)
    verifier = await take(pool, verification=True)
    assert agent.slot.sandbox_id != verifier.slot.sandbox_id
    assert world.clients[0].settings.slots == 1


async def test_what_the_backend_does_not_declare_is_refused(world):
    with pytest.raises(PolicyError):
        world.pool(network=Network.NONE)
    world.provider.capabilities = Capabilities(isolation=frozenset({Isolation.SHARED}))
    with pytest.raises(PolicyError):
        world.pool(isolation=Isolation.USER)


# --- trouble ----------------------------------------------------------------------------------------------------------


def failing(times: int, error: Callable[[], Exception]) -> Callable[[], None]:
    left = [times]

    def fail() -> None:
        if left[0] > 0:
            left[0] -= 1
            raise error()

    return fail


async def test_a_create_that_may_pass_is_tried_again(world):
    world.provider.before = failing(3, lambda: ProvisionError("busy"))
    pool = world.pool(min_sandboxes=0)
    assert await take(pool)
    assert len(set(world.provider.creation_ids)) == 1  # a create whose answer was lost would be found


async def test_a_create_whose_answer_was_lost_is_adopted(world):
    world.provider.after = failing(1, lambda: ProvisionError("the connection broke"))
    pool = world.pool(min_sandboxes=0)
    assert await take(pool)
    assert len(world.provider.living) == 1 and len(world.provider.creation_ids) == 2


async def test_waiters_time_out_on_a_provider_that_stays_down(world):
    world.provider.before = failing(10**6, lambda: ProvisionError("quota used up"))
    pool = world.pool(min_sandboxes=0)
    with pytest.raises(AcquireTimeout) as caught:
        await take(pool, timeout_s=0.1)
    assert "quota used up" in str(caught.value) and isinstance(caught.value.__cause__, ProvisionError)


def permanent() -> Exception:
    error = ProvisionError("no such image", hint="check its name")
    error.retryable = False
    return error


async def test_a_create_that_cannot_pass_fails_its_waiters_at_once(world):
    world.provider.before = failing(1, permanent)
    pool = world.pool(min_sandboxes=0)
    outcomes = await asyncio.gather(take(pool), take(pool), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ProvisionError, ProvisionError]
    assert "no such image" in str(outcomes[0]) and outcomes[0] is not outcomes[1]
    assert isinstance(outcomes[0].__cause__, ProvisionError)
    assert await take(pool)  # asked again, it is tried again


async def test_a_policy_refusal_stays_one(world):
    world.trouble_at_start = [PolicyError("no user namespaces here")]
    pool = world.pool(min_sandboxes=0)
    with pytest.raises(PolicyError):
        await take(pool)
    assert world.provider.living == {}


async def test_waiters_who_can_be_served_wait_on(world):
    pool = world.pool(slots_per_sandbox=1, max_sandboxes=2)
    held = await take(pool)
    world.provider.before = failing(10**6, permanent)
    waiting = asyncio.create_task(take(pool))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await pool.release(held, reset=True)
    assert await waiting


async def test_who_waits_is_served_elsewhere_once_the_sandbox_gets_no_new_leases(world, monkeypatch):
    monkeypatch.setattr(Box, "lifetime_s", 0.4)
    pool = world.pool(slots_per_sandbox=1, max_sandboxes=2)
    held = await take(pool)
    monkeypatch.setattr(Box, "lifetime_s", None)
    world.provider.before = failing(1, permanent)
    assert (await take(pool)).pooled is not held.pooled


async def test_start_fails_after_a_few_attempts_says_why_once_and_leaves_nothing(world, caplog):
    world.provider.before = failing(10**6, lambda: ProvisionError("daemon down"))
    pool = world.pool()
    with pytest.raises(ProvisionError) as caught:
        await pool.start()
    assert "daemon down" in str(caught.value)
    assert [record.levelname for record in caplog.records if "daemon down" in record.getMessage()].count("WARNING") == 1
    await pool.aclose()
    assert world.provider.living == {}


async def test_a_bug_of_the_backend_is_told_as_one(world, caplog):
    world.provider.before = failing(10**6, lambda: RuntimeError("no key"))
    with pytest.raises(ProvisionError) as caught:
        await world.pool().start()
    assert "Provider.create() raised RuntimeError: no key" in str(caught.value)
    assert "a bug in the plugin: `hermes-rl --traceback" in str(caught.value)
    assert len([each for each in caplog.records if "no key" in each.getMessage()]) <= 1


async def test_a_create_that_returns_no_sandbox_is_told_as_a_bug(world, monkeypatch):
    async def forgets_to_return(spec: Any) -> None:
        return

    monkeypatch.setattr(world.provider, "create", forgets_to_return)
    with pytest.raises(ProvisionError, match=r"Provider\.create\(\) returned None, which is not a Sandbox.*a bug"):
        await world.pool().start()


async def test_a_creation_that_takes_long_is_told_now_and_then(world, monkeypatch, caplog):
    monkeypatch.setattr(provision, "SLOW_S", 0.05)
    world.provider.delay = 0.3
    await world.pool().start()
    told = caplog.text.count("s in `create` for profile default")
    assert 2 <= told <= 6
    await asyncio.sleep(0.3)
    assert caplog.text.count("in `create`") == told


async def test_a_bug_of_a_sandbox_is_told_as_one_and_once(world, caplog):
    provisioner = Provisioner(world.provider, isolation=Isolation.USER, owner="me")
    world.pools.append(Pool(SandboxConfig(slots_per_sandbox=2, max_sandboxes=2), provisioner, Events()))
    with pytest.raises(ProvisionError, match=r"Box\.open\(\) raised NotImplementedError.*a bug in the plugin"):
        await world.pools[-1].start()
    assert "guest client failed" not in caplog.text


class TextChannel(Channel):
    """A channel in text mode."""

    async def read(self, n: int) -> Any:
        return "text"

    async def write(self, data: bytes) -> None: ...

    async def wait(self) -> int:
        return 0

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("opened", "told"),
    [
        (None, r"Box\.open\(\) returned None, which is not a Channel"),
        (TextChannel(), r"TextChannel\.read\(\) returned 'text', which is not bytes"),
    ],
)
async def test_a_wrong_answer_of_a_sandbox_or_channel_is_told_as_a_bug(world, monkeypatch, opened, told):
    async def open_it(self: Any, argv: Any, *, env: Any = None) -> Any:
        return opened

    monkeypatch.setattr(Box, "open", open_it)
    provisioner = Provisioner(world.provider, isolation=Isolation.USER, owner="me")
    world.pools.append(Pool(SandboxConfig(slots_per_sandbox=2, max_sandboxes=2), provisioner, Events()))
    with pytest.raises(ProvisionError, match=f"{told}.*a bug in the plugin"):
        await world.pools[-1].start()


async def test_a_guest_that_does_not_start_takes_its_sandbox_with_it(world):
    world.trouble_at_start = [SandboxLost("it died at once")]
    pool = world.pool(min_sandboxes=0)
    assert await take(pool)
    assert len(set(world.provider.creation_ids)) == 2 and len(world.provider.living) == 1


async def test_closing_waits_for_the_sandboxes_of_a_failed_start(world):
    world.provider.end_delay = 0.3
    world.trouble_at_start += [InfraError("no guest")] * 20
    pool = world.pool()
    with pytest.raises(ProvisionError, match="no guest"):
        await pool.start()
    assert world.provider.living, "the last one is still being ended"
    await asyncio.gather(pool.aclose(), pool.aclose())
    assert world.provider.living == {}


async def test_a_creation_cancelled_midway_ends_its_sandbox_though_closed_twice(world):
    world.provider.end_delay = 0.2

    def pause() -> None:
        raise ChannelLost("the answer was lost")

    world.provider.after = pause
    pool = world.pool()
    starting = asyncio.create_task(pool.start())
    await until(lambda: bool(world.provider.living))
    closing = asyncio.create_task(pool.aclose())
    await asyncio.sleep(0.05)
    await pool.aclose()
    await closing
    assert world.provider.living == {}
    with pytest.raises(UsageError):
        await starting


async def test_a_slot_that_cannot_be_opened_is_not_handed_out(world):
    pool = world.pool(min_sandboxes=1, max_sandboxes=2)
    await pool.start()
    world.clients[0].trouble["open"] = SlotLost("no")
    lease = await take(pool)
    assert lease.slot.sandbox_id != "box/1"
    await until(lambda: "box/1" not in world.provider.living)


async def test_who_was_offered_a_slot_that_could_not_be_opened_keeps_their_place(world):
    pool = world.pool(slots_per_sandbox=1, max_sandboxes=1)
    await pool.start()
    world.clients[0].trouble["open"] = SlotLost("no")
    first = asyncio.create_task(take(pool, "first"))
    second = asyncio.create_task(take(pool, "second"))
    assert (await first).slot.sandbox_id == "box/2" and not second.done()
    await pool.release(await first, reset=True)
    assert (await second).slot.trajectory_id == "second"


async def spoil(world, pool, lease) -> None:
    """Release a slot that can't be proved clean."""
    client = world.clients[int(lease.slot.sandbox_id.partition("/")[2]) - 1]
    client.trouble["reset"] = SlotUnclean("something is alive")
    await pool.release(lease, reset=True)
    del client.trouble["reset"]


async def test_a_slot_that_cannot_be_proved_clean_takes_its_sandbox_out(world):
    pool = world.pool(slots_per_sandbox=3, max_sandboxes=1)
    bad, other = await take(pool), await take(pool)
    await spoil(world, pool, bad)
    assert counts(pool) == (0, 0, 0) and len(world.provider.living) == 1
    assert (await take(pool)).slot.sandbox_id != bad.slot.sandbox_id  # a maximum of one does not mean to wait for it
    other.check()
    assert len(world.provider.living) == 2
    await pool.release(other, reset=True)
    await until(lambda: len(world.provider.living) == 1)


async def test_what_dies_slowly_does_not_stop_a_pool_of_one_and_does_not_fill_the_host(world):
    pool = world.pool(slots_per_sandbox=1, max_sandboxes=1)
    for number in range(1, LEAVING_BESIDE + 1):
        lease = await take(pool)
        assert lease.slot.sandbox_id == f"box/{number}"
        world.clients[-1].closing = asyncio.Event()
        await spoil(world, pool, lease)
    last = await take(pool)
    world.clients[-1].closing = asyncio.Event()
    await spoil(world, pool, last)
    waiting = asyncio.create_task(take(pool))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert len(world.provider.living) == LEAVING_BESIDE + 1
    world.clients[0].closing.set()
    assert (await waiting).slot.sandbox_id == f"box/{LEAVING_BESIDE + 2}"
    for client in world.clients[:-1]:
        client.closing.set()
    await until(lambda: len(world.provider.living) == 1)


async def test_a_check_that_is_repeated_comes_to_another_sandbox_if_one_has_room(world):
    pool = world.pool(slots_per_sandbox=2, min_sandboxes=2, max_sandboxes=2)
    await pool.start()
    first = await take(pool, verification=True)
    place = first.slot.sandbox_id
    elsewhere = [await take(pool, verification=True, apart_from=place) for _ in range(3)]
    assert [lease.slot.sandbox_id == place for lease in elsewhere] == [False, False, True]


async def test_one_that_is_alone_has_every_turn_and_two_of_them_do_not_wait_for_each_other():
    turns, running, most = Turns(3), 0, []

    async def work(alone):
        nonlocal running
        async with turns.hold(alone=alone):
            running += 1
            for _ in range(3):
                await asyncio.sleep(0)
                if alone:
                    assert running == 1
                most.append(running)
            running -= 1

    async with asyncio.timeout(5):
        await asyncio.gather(*(work(number % 4 == 1) for number in range(20)))
    assert max(most) == 3


async def test_a_lost_sandbox_is_replaced_and_its_waiters_served(world):
    pool = world.pool(max_sandboxes=1)
    held = [await take(pool), await take(pool)]
    waiting = [asyncio.create_task(take(pool)) for _ in range(2)]
    await asyncio.sleep(0)
    world.clients[0].lost.set()
    for lease in await asyncio.gather(*waiting):
        assert lease.slot.sandbox_id == "box/2"
    for lease in held:
        with pytest.raises(SandboxLost) as caught:
            lease.check()
        assert caught.value.slot_id == lease.slot.slot_id
        await pool.release(lease, reset=True)
    await until(lambda: list(world.provider.living) == ["box/2"])


async def test_a_sandbox_lost_while_idle_is_replaced(world):
    pool = world.pool()
    await pool.start()
    world.clients[0].lost.set()
    await until(lambda: counts(pool) == (1, 2, 0) and list(world.provider.living) == ["box/2"])


async def test_one_lost_while_a_slot_is_opened_or_reset(world):
    pool = world.pool(max_sandboxes=1)
    held = await take(pool)
    world.clients[0].pause = 0.02
    world.clients[0].trouble = {"open": SandboxLost("gone"), "reset": SandboxLost("gone")}
    opening = asyncio.create_task(take(pool))
    release = pool.release(held, reset=True)
    await asyncio.sleep(0.005)
    world.clients[0].lost.set()
    assert (await opening).slot.sandbox_id == "box/2"
    await release
    await until(lambda: counts(pool) == (1, 1, 0))


async def test_a_dirty_slot_is_cleaned_for_a_verification(world):
    pool = world.pool(max_sandboxes=1, slots_per_sandbox=1)
    await pool.release(await take(pool), reset=False)
    await pool.release(await take(pool), reset=False)
    assert world.clients[0].resets == []
    await take(pool, verification=True)
    assert world.clients[0].resets == [0]


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_closing_fails_waiters_and_ends_what_is_being_made(world):
    pool = world.pool(min_sandboxes=0, max_sandboxes=2, slots_per_sandbox=1)
    await take(pool)
    world.provider.delay = 30
    waiting = asyncio.create_task(take(pool))
    await asyncio.sleep(0.01)
    assert pool.status()["creating"] == 1
    async with asyncio.timeout(15):
        await pool.aclose()
    with pytest.raises(UsageError):
        await waiting
    with pytest.raises(UsageError):
        await take(pool)
    assert world.provider.living == {}


async def test_a_create_cut_off_after_the_provider_made_the_sandbox_is_swept(world):
    made = asyncio.Event()
    create = world.provider.create

    async def slow_answer(spec: Any) -> Sandbox:
        await create(spec)
        made.set()
        await asyncio.sleep(30)
        raise AssertionError

    world.provider.create = slow_answer
    pool = world.pool()
    starting = asyncio.create_task(pool.start())
    await made.wait()
    assert len(world.provider.living) == 1
    await pool.aclose()
    assert world.provider.living == {}
    with pytest.raises(UsageError):
        await starting


async def test_a_create_in_flight_when_its_waiter_leaves_is_adopted(world):
    world.provider.delay = 0.03
    pool = world.pool(min_sandboxes=0)
    waiting = asyncio.create_task(take(pool))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await until(lambda: counts(pool) == (1, 2, 0))
    assert len(world.provider.creation_ids) == 1


async def test_release_goes_on_when_its_caller_is_cancelled_and_happens_once(world):
    pool = world.pool(max_sandboxes=1, slots_per_sandbox=1)
    lease = await take(pool)
    world.clients[0].pause = 0.02

    async def caller() -> None:
        await asyncio.shield(pool.release(lease, reset=True))

    task = asyncio.create_task(caller())
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.release(lease, reset=False) is pool.release(lease, reset=True)
    await pool.release(lease, reset=True)
    assert world.clients[0].resets == [0] and counts(pool) == (1, 1, 0)


async def test_a_sandbox_near_the_end_of_its_life_is_replaced(world, monkeypatch):
    monkeypatch.setattr(Box, "lifetime_s", 0.4)
    pool = world.pool(slots_per_sandbox=2, min_sandboxes=1, max_sandboxes=3)
    await pool.start()
    first = await take(pool)
    monkeypatch.setattr(Box, "lifetime_s", None)
    await asyncio.sleep(0.35)
    second = await take(pool)
    assert second.pooled is not first.pooled, "what has little time left is not handed out"
    assert first.slot.sandbox_id in world.provider.living, "a lease on it may go on"
    await pool.release(first, reset=True)
    await until(lambda: first.slot.sandbox_id not in world.provider.living)
    await pool.release(second, reset=True)
    assert counts(pool)[0] == 1


# --- what it costs ----------------------------------------------------------------------------------------------------

DEAR = {"sandbox": 3600.0 * 100}
"""A hundred a second for each sandbox."""


async def test_seconds_are_counted_from_creation_to_end(world):
    pool = world.pool(min_sandboxes=2)
    await pool.start()
    await asyncio.sleep(0.05)
    running = pool.meter.usage()
    assert running.sandbox_s >= 0.1 and running.cost is None
    await pool.aclose()
    ended = pool.meter.usage().sandbox_s
    await asyncio.sleep(0.02)
    assert pool.meter.usage().sandbox_s == ended >= running.sandbox_s


async def test_the_price_of_a_sandbox():
    prices = {"sandbox": 1.0, "cpu": 0.5, "memory": 0.25, "gpu": 2.0}
    assert SandboxConfig(cpu=4, memory=2048, prices=prices).price_per_hour == 1 + 2 + 0.5
    assert SandboxConfig(prices={"sandbox": 1.0}).price_per_hour == 1.0
    for wrong, said in (
        ({"max_cost": 1.0}, "no price"),
        ({"prices": {"cpu": 1.0}}, r"prices\.cpu is set, and cpu is not"),
        ({"prices": {"cpus": 1.0}}, "cpus"),
    ):
        with pytest.raises(ValueError, match=said):
            SandboxConfig(**wrong)


async def test_growth_stops_before_the_leases_do(world, monkeypatch):
    monkeypatch.setattr(cost, "GROWTH_PART", 0.05)
    pool = world.pool(min_sandboxes=0, max_sandboxes=3, slots_per_sandbox=1, prices=DEAR, max_cost=300.0)
    first = await take(pool)
    await until(lambda: not pool.meter.may_grow)
    assert not pool.meter.is_spent
    queued = asyncio.create_task(take(pool))
    await asyncio.sleep(0.01)
    assert world.provider.made == 1 and not queued.done(), "it waits for the slot that there is"
    await pool.release(first, reset=True)
    again = await queued
    await until(lambda: pool.meter.is_spent)
    with pytest.raises(CostLimitReached, match=r"of its max_cost 300, and no slot is given any more"):
        await take(pool)
    await pool.release(again, reset=True)
    await until(lambda: world.provider.living == {})


async def test_who_waits_is_told_when_the_money_is_spent(world):
    pool = world.pool(min_sandboxes=0, max_sandboxes=1, slots_per_sandbox=1, prices=DEAR, max_cost=20.0)
    await take(pool)
    with pytest.raises(CostLimitReached):
        await take(pool)


async def test_who_has_nothing_to_wait_for_is_told_when_growth_stops(world, monkeypatch):
    monkeypatch.setattr(cost, "GROWTH_PART", 0.05)
    pool = world.pool(min_sandboxes=0, max_sandboxes=1, slots_per_sandbox=1, prices=DEAR, max_cost=2000.0)
    await take(pool)
    await until(lambda: not pool.meter.may_grow)
    queued = asyncio.create_task(take(pool))
    await asyncio.sleep(0)
    world.clients[-1].lost.set()
    with pytest.raises(CostLimitReached, match="no further sandbox is made"):
        await queued


async def test_a_verification_gets_its_slot_whatever_was_spent(world):
    pool = world.pool(min_sandboxes=0, max_sandboxes=1, reserve_slots=1, prices=DEAR, max_cost=10.0)
    agent = await take(pool)
    await until(lambda: pool.meter.is_spent)
    check = await take(pool, verification=True)
    await pool.release(check, reset=True)
    assert counts(pool)[0] == 1, "the agent still works there"
    await pool.release(agent, reset=True)
    await until(lambda: world.provider.living == {})


# --- what was left ----------------------------------------------------------------------------------------------------


async def test_what_an_earlier_driver_left_is_looked_up_once_also_when_the_one_who_began_is_cancelled(world):
    class Listing(Provider):
        capabilities = Capabilities(isolation=frozenset({Isolation.USER}), attach=True)
        looked = 0

        async def list(self, owner: str | None = None) -> list[SandboxInfo]:
            self.looked += 1
            await asyncio.sleep(0.02)
            return await super().list(owner)

    world.provider = Listing()
    provisioner = Provisioner(
        world.provider, isolation=Isolation.USER, owner="me", start_client=world.client, take_over=True
    )
    config, meter = SandboxConfig(), Meter("default", None, None)
    first, *others = (asyncio.create_task(provisioner.make(config, meter, lambda error: False)) for _ in range(3))
    await until(lambda: world.provider.looked == 1)
    first.cancel()
    for pooled in await asyncio.gather(*others):
        await provisioner.end(pooled, meter)
    assert first.cancelled() and world.provider.looked == 1


# --- snapshots --------------------------------------------------------------------------------------------------------


class Keeping(Provider):
    """One that can make snapshots."""

    capabilities = Capabilities(isolation=frozenset({Isolation.USER}), snapshot=True)

    async def snapshot(self, sandbox: Sandbox) -> str:
        return f"of {sandbox.id}"

    async def restore(self, spec: Any, snapshot_id: str) -> Sandbox:
        return await self.create(spec)


class Preparing:
    """Prepares sandboxes once a test lets it, after the failures that are left."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = [*failures]
        self.times = 0
        self.go = asyncio.Event()

    async def __call__(self, sandbox: Any) -> None:
        self.times += 1
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def keeping(world):
    """A world whose provider makes snapshots."""
    world.provider = Keeping()
    return world


def maker(world: World, prepare: Preparing) -> Callable[..., asyncio.Task[Any]]:
    """Begins the creation of a sandbox of a profile with a snapshot."""
    provisioner = Provisioner(
        world.provider, isolation=Isolation.USER, owner="me", start_client=world.client, prepare=prepare
    )
    config = SandboxConfig(name="kept", snapshot=True)
    meter = Meter("kept", None, None)

    async def make(keep_trying: Callable[[Exception], bool]) -> None:
        await provisioner.end(await provisioner.make(config, meter, keep_trying), meter)

    return lambda keep_trying=lambda error: False: asyncio.create_task(make(keep_trying))


async def test_a_snapshot_is_made_for_all_who_want_it_also_when_the_one_who_began_is_cancelled(keeping):
    prepare = Preparing()
    make = maker(keeping, prepare)
    first, second, third = (make() for _ in range(3))
    await until(lambda: prepare.times == 1)
    first.cancel()
    await asyncio.sleep(0.01)
    prepare.go.set()
    await asyncio.gather(second, third)
    await make()
    assert first.cancelled() and prepare.times == 1 and keeping.provider.made == 4


async def test_a_snapshot_that_nobody_wants_any_more_leaves_no_sandbox(keeping):
    prepare = Preparing()
    make = maker(keeping, prepare)
    tasks = [make(), make()]
    await until(lambda: prepare.times == 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert keeping.provider.living == {} and keeping.clients[0].closed


async def test_a_snapshot_is_tried_for_as_long_as_one_of_those_who_wait_keeps_trying(keeping):
    prepare = Preparing(ProvisionError("no"), ProvisionError("no"))
    make = maker(keeping, prepare)
    tasks = [make(lambda error: False), make(lambda error: True)]
    await until(lambda: prepare.times == 1)
    prepare.go.set()
    await asyncio.gather(*tasks)
    assert prepare.times == 3
    keen = Preparing(*(ProvisionError("no") for _ in range(9)))
    make = maker(keeping, keen)
    left, tried = make(lambda error: True), []
    tasks = [make(lambda error: bool(tried.append(error)))]
    await until(lambda: keen.times == 1)
    left.cancel()
    keen.go.set()
    with pytest.raises(ProvisionError):
        await tasks[0]
    assert len(tried) == 1 and keen.times == 1, "the one who has left has no say"


async def test_a_failed_snapshot_counts_once_however_many_sandboxes_wait_for_it(keeping):
    prepare = Preparing(ProvisionError("no"), ProvisionError("no"))
    prepare.go.set()
    provisioner = Provisioner(
        keeping.provider, isolation=Isolation.USER, owner="me", start_client=keeping.client, prepare=prepare
    )
    config = SandboxConfig(snapshot=True, min_sandboxes=3, max_sandboxes=3, slots_per_sandbox=1, reserve_slots=0)
    keeping.pools.append(Pool(config, provisioner, Events()))
    await keeping.pools[0].start()
    assert prepare.times == 3 and counts(keeping.pools[0]) == (3, 3, 0)


def test_a_level_that_a_profile_leaves_out_is_refused() -> None:
    class Sometimes(Provider):
        def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
            return frozenset({Isolation.USER})

    config = SandboxConfig()
    check_profile(Sometimes(), Isolation.USER, config, prepares=False)
    with pytest.raises(PolicyError, match="can't grant isolation 'dedicated' here with profile 'default'") as refused:
        check_profile(Sometimes(), Isolation.DEDICATED, config, prepares=False)
    assert "settings allow only: user; `hermes-rl backends provider`" in str(refused.value)
    assert "doctor" not in str(refused.value), "it does not know the profile"


def test_a_level_that_no_profile_can_have_is_not_blamed_on_the_profile() -> None:
    class Sometimes(Provider):
        capabilities = Capabilities(isolation=frozenset({Isolation.SHARED, Isolation.USER}))

        def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
            return frozenset({Isolation.SHARED})

    with pytest.raises(PolicyError, match=r"'dedicated' here \(it grants: shared; `hermes-rl doctor` says"):
        check_profile(Sometimes(), Isolation.DEDICATED, SandboxConfig(), prepares=False)
