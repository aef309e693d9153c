"""Slots of Modal sandboxes beside one `exec` of Modal's SDK for each command: both on the emulator, in one run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.host import acquire_all
from benchmarks.measure import Row, Rows, Target, alternate, p50, percentile, span, timed, watch_stalls
from hermes_core.sandbox.commands import Slot
from hermes_core.sandbox.contract import Isolation
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from hermes_modal.backend import ModalBackend

SANDBOXES, SLOTS = 5, 50
COMMANDS = 1000
_BATCH, _STALL, _RATE, _ONE = (
    f"{SLOTS} slots x `sleep 1` on {SANDBOXES} sandboxes, one batch",
    "longest stall of the event loop in that batch",
    f"{COMMANDS} x `true`, {SLOTS} at a time",
    "p50 of `true`, one at a time",
)


async def rows(quick: bool) -> Rows:
    """A batch that sleeps, many commands at a time, and one at a time."""
    with _emulator() as mode:
        if mode is None:
            for case, unit in ((_BATCH, "s"), (_STALL, "ms"), (_RATE, "/s"), (_ONE, "ms")):
                yield Row("modal", case, None, None, unit, None, ("hermes-rl-modal is not installed here",))
            return
        from hermes_modal.backend import ModalBackend

        backend = ModalBackend()
        try:
            async for row in _measured(backend, mode, 1 if quick else 5):
                yield row
        finally:
            await backend.aclose()


@contextlib.contextmanager
def _emulator() -> Iterator[str | None]:
    """The SDK pointed at an emulator; its mode, or None without the plugin."""
    try:
        from hermes_modal_emulator import ModalEmulator
    except ModuleNotFoundError:
        yield None
        return
    with ModalEmulator() as emulator:
        before = {name: os.environ.get(name) for name in emulator.environment}
        os.environ.update(emulator.environment)
        try:
            yield emulator.mode
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


async def _measured(backend: ModalBackend, mode: str, rounds: int) -> Rows:
    async with _slots(backend) as (tools, slots), _sandboxes() as sandboxes:
        note = f"emulator in mode {mode}; isolation {slots[0].isolation}"
        async with watch_stalls() as stalls:
            await _sleep(tools, slots)
        batch, naive = await alternate(
            timed(partial(_sleep, tools, slots)), timed(partial(_sdk_sleep, sandboxes)), rounds, warm_up=0
        )
        about = (span(batch, "s"), note)
        yield Row("modal", _BATCH, p50(batch), p50(naive), "s", Target(2.0), about)
        by_clock = f"by the clock {stalls.elapsed_s * 1e3:.0f} ms"
        yield Row("modal", _STALL, stalls.longest_s * 1e3, None, "ms", Target(50.0), (by_clock,))
        ours, theirs = await alternate(
            timed(partial(_many, [partial(_ours, tools, slot) for slot in slots])),
            timed(partial(_many, [partial(_sdk, sandboxes[n % SANDBOXES]) for n in range(SLOTS)])),
            rounds,
        )
        target = Target(2.0, of_reference=True, at_least=True)
        yield Row("modal", _RATE, COMMANDS / p50(ours), COMMANDS / p50(theirs), "/s", target, (note,))
        slot, sandbox = timed(partial(_ours, tools, slots[0])), timed(partial(_sdk, sandboxes[0]))
        turns = await alternate(partial(_in_a_row, slot), partial(_in_a_row, sandbox), 2 * rounds)
        one, sdk = ([each for row in taken for each in row] for taken in turns)
        p95 = f"p95: ours {percentile(one, 0.95) * 1e3:.2f}, the SDK's {percentile(sdk, 0.95) * 1e3:.2f} ms"
        yield Row("modal", _ONE, p50(one) * 1e3, p50(sdk) * 1e3, "ms", Target(1 / 1.8, of_reference=True), (p95,))


@contextlib.asynccontextmanager
async def _slots(backend: ModalBackend) -> AsyncIterator[tuple[ToolBackend, Sequence[Slot]]]:
    from hermes_modal.config import ModalSandboxConfig

    config = ModalSandboxConfig(
        slots_per_sandbox=SLOTS // SANDBOXES, min_sandboxes=SANDBOXES, max_sandboxes=SANDBOXES, reserve_slots=0
    )
    level = Isolation.USER if os.geteuid() == 0 else Isolation.SHARED
    owner = f"bench-{uuid.uuid4().hex[:8]}"
    profiles = {"default": config}
    async with ToolBackend(backend, profiles=profiles, tools=ToolRegistry(), isolation=level, owner=owner) as tools:
        slots = await acquire_all(tools, SLOTS)
        assert len({slot.sandbox_id for slot in slots}) == SANDBOXES
        yield tools, slots


@contextlib.asynccontextmanager
async def _sandboxes() -> AsyncIterator[list[Any]]:
    """As many sandboxes for the SDK alone."""
    import modal

    client = await modal.Client.from_credentials.aio(os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"])
    app = await modal.App.lookup.aio("bench", client=client, create_if_missing=True)
    made = [await modal.Sandbox.create.aio(app=app, client=client, timeout=3600) for _ in range(SANDBOXES)]
    try:
        yield made
    finally:
        for sandbox in made:
            await sandbox.terminate.aio()
        await client.close.aio()


async def _sleep(tools: ToolBackend, slots: Sequence[Slot]) -> None:
    results = await tools.execute_batch([(slot, "bash", {"command": "sleep 1"}) for slot in slots], timeout_s=30)
    assert all(result.success for result in results), [result.error for result in results]


async def _sdk_sleep(sandboxes: Sequence[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(SLOTS):
            group.create_task(_sdk(sandboxes[number % SANDBOXES], "sleep 1"))


async def _many(runs: Sequence[Any]) -> None:
    """`COMMANDS` of them, each runner one at a time."""
    left = iter(range(COMMANDS))

    async def work(run: Any) -> None:
        for _ in left:
            await run()

    async with asyncio.TaskGroup() as group:
        for run in runs:
            group.create_task(work(run))


async def _in_a_row(work: Callable[[], Awaitable[float]]) -> list[float]:
    """Each of a few runs. One of the SDK's leaves it work (streams to end) that would be on the next one's bill."""
    return [await work() for _ in range(20)]


async def _ours(tools: ToolBackend, slot: Slot) -> None:
    result = await tools.execute(slot, "bash", {"command": "true"})
    assert result.success, result.error


async def _sdk(sandbox: Any, command: str = "true") -> None:
    process = await sandbox.exec.aio("bash", "-c", command)
    await process.stdout.read.aio()
    assert await process.wait.aio() == 0
