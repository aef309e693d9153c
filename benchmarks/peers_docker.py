"""Slots of the `docker` backend beside `docker exec`, the SDK's `exec_run` and SWE-ReX, in containers of one image."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from benchmarks.host import acquire_all, shell
from benchmarks.measure import Rows, p50, percentile, take_turns
from benchmarks.peers import (
    OUTPUT_BYTES,
    WORKERS,
    Case,
    Party,
    Place,
    Table,
    Wanted,
    Workers,
    captured,
    cli_party,
    listing,
    times_faster,
)
from benchmarks.swerex import NotThere, SweRexParty, open_swerex
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Slot
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend

IMAGE = "hermes-test-python:bookworm"
EXEC, SDK, SESSION, EXECUTE = "docker exec", "SDK exec_run", "SWE-ReX session", "SWE-ReX execute"
TABLE = Table(
    "docker",
    {EXEC: Wanted(latency=25, rate=40), SDK: Wanted(latency=20), SESSION: Wanted(), EXECUTE: Wanted()},
)
RUN = Case("docker", "a slot's first command is done: docker run", "ms", times_faster(30))
DEPLOY = Case("docker", "a slot's first command is done: SWE-ReX start", "ms")


async def rows(quick: bool) -> Rows:
    """Every figure of the table, or the reason why this host has none."""
    reason = await missing()
    if reason is not None:
        for row in [*TABLE.left_out(reason), RUN.left_out(reason), DEPLOY.left_out(reason)]:
            yield row
        return
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(docker_backend())
        slots = await acquire_all(backend, WORKERS)
        container = await stack.enter_async_context(running(IMAGE))
        peers: dict[str, Party | str] = {EXEC: _docker_exec(container)}
        peers[SDK] = await stack.enter_async_context(_exec_run(container))
        where = {"ours": place(slots[0].sandbox_id), EXEC: place(container), SDK: place(container)}
        start_s: float | str
        try:
            swerex = await stack.enter_async_context(open_swerex(IMAGE))
            start_s = swerex.start_s
            for name, how in ((SESSION, "session"), (EXECUTE, "execute")):
                peers[name], where[name] = SweRexParty(swerex, how), place(swerex.container)
        except (NotThere, TimeoutError) as error:
            start_s = str(error) or "SWE-ReX did not start in time"
            peers |= dict.fromkeys((SESSION, EXECUTE), start_s)
        ours = Workers([partial(run, backend, slot) for slot in slots], partial(time_out, backend, slots[0]))
        async for row in TABLE.speed(ours, peers, 1 if quick else 4, 0.3 if quick else 1.0):
            yield row
        async for row in TABLE.output(ours, peers, 1 if quick else 5, 3.0 if quick else 20.0):
            yield row
        async for row in TABLE.left(ours, peers, where):
            yield row
        async for row in _ready(backend, 3 if quick else 20, start_s):
            yield row
        for slot in slots:
            await backend.release(slot)


async def missing() -> str | None:
    """Why there can be no figures here; None if nothing is missing."""
    if shutil.which("docker") is None:
        return "there is no docker command here"
    if await docker("version", check=False) != 0:
        return "no Docker daemon answers: `.ci/docker` starts one"
    if await docker("image", "inspect", IMAGE, check=False) != 0:
        return f"the daemon has no image {IMAGE}: `.ci/docker` builds it"
    return None


async def _ready(backend: ToolBackend, rounds: int, swerex_s: float | str) -> Rows:
    """From asking for a sandbox to the end of its first command, on a warm pool and by `docker run`."""
    taken = await take_turns((partial(_first, backend), _docker_run), rounds)
    slots, runs = ([first for first, _ in side] for side in taken)
    resets = [reset for _, reset in taken[0]]
    mine, theirs = p50(slots), p50(runs)
    yield RUN.row(
        mine * 1e3,
        theirs * 1e3,
        f"{theirs / mine:.1f} times as fast, asked for: 30; the slot's reset takes {p50(resets) * 1e3:.2f} ms",
        f"p95: ours {percentile(slots, 0.95) * 1e3:.2f}, the peer's {percentile(runs, 0.95) * 1e3:.2f} ms",
    )
    if isinstance(swerex_s, str):
        yield DEPLOY.left_out(swerex_s)
    else:
        yield DEPLOY.row(mine * 1e3, swerex_s * 1e3, "the peer once, its packages mounted and nothing installed")


async def _first(backend: ToolBackend) -> tuple[float, float]:
    """Seconds to a slot's first command, and for its reset."""
    began = time.perf_counter()
    slot = await backend.acquire()
    await shell(backend, slot, "true")
    done = time.perf_counter()
    await backend.release(slot, reset_workspace=True)
    return done - began, time.perf_counter() - done


async def _docker_run() -> tuple[float, float]:
    """Seconds to a container's only command, and for its removal."""
    name = f"hermes-bench-{uuid.uuid4().hex[:12]}"
    began = time.perf_counter()
    try:
        await docker("run", "--init", "--name", name, IMAGE, "bash", "-c", "true")
        done = time.perf_counter()
    finally:
        await docker("rm", "-f", name)
    return done - began, time.perf_counter() - done


# --- ours -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def docker_backend() -> AsyncIterator[ToolBackend]:
    """A started backend with one container: a slot for each worker, one to lease, one in reserve."""
    config = {
        "image": IMAGE,
        "slots_per_sandbox": WORKERS + 2,
        "reserve_slots": 1,
        "min_sandboxes": 1,
        "max_sandboxes": 1,
    }
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(Settings(plugins=("docker",))))
        yield await stack.enter_async_context(runtime.tool_backend("docker", profiles={}, config=config))


async def run(backend: ToolBackend, slot: Slot, command: str) -> int:
    """A command by the tool that models call; what prints much by the slot's commands, which keep all of it."""
    if command == "true":
        await shell(backend, slot, command)
        return 0
    done = await backend.commands(slot).run(command, timeout_s=60, output_limit=2 * OUTPUT_BYTES)
    assert done.ok, done.error_text
    return len(done.stdout)


async def time_out(backend: ToolBackend, slot: Slot, command: str, limit_s: float) -> None:
    """With the time limit of a tool call."""
    result = await backend.execute(slot, "bash", {"command": command}, timeout_s=limit_s)
    assert result.metadata["timed_out"], dict(result.metadata)


# --- the peers --------------------------------------------------------------------------------------------------------


def _docker_exec(container: str) -> Party:
    return cli_party([["docker", "exec", container, "bash", "-c"]] * WORKERS)


@asynccontextmanager
async def _exec_run(container: str) -> AsyncIterator[Party]:
    """The SDK in threads. It has no time limit of its own, so the caller stops waiting."""
    import docker as sdk

    client = await asyncio.to_thread(partial(sdk.from_env, max_pool_size=WORKERS))
    found = await asyncio.to_thread(client.containers.get, container)
    threads = ThreadPoolExecutor(WORKERS + 1)

    async def run(command: str) -> int:
        argv = ["bash", "-c", command]
        status, output = await asyncio.get_running_loop().run_in_executor(threads, found.exec_run, argv)
        assert status == 0, f"{command!r} ended with status {status}"
        assert isinstance(output, bytes), "a stream was not asked for"
        return len(output)

    async def time_out(command: str, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await run(command)
        except TimeoutError:
            return

    try:
        yield Workers([run] * WORKERS, time_out)
    finally:
        threads.shutdown(wait=False)  # one may still read what was timed out, until its container goes
        await asyncio.to_thread(client.close)


def place(container: str) -> Place:
    """What runs in a container, by the ids that it has in there."""

    async def processes() -> Mapping[int, str]:
        status, listed = await captured("docker", "exec", "-u", "0", container, "ps", "-ww", "-eo", "pid=,args=")
        assert status == 0, listed
        return listing(listed)

    async def kill(pids: Sequence[int]) -> None:
        await docker("exec", "-u", "0", container, "kill", "-9", *map(str, pids), check=False)

    return Place(processes, kill)


@asynccontextmanager
async def running(image: str, *options: str) -> AsyncIterator[str]:
    """A container that waits to be used; removed at the end."""
    name = f"hermes-bench-{uuid.uuid4().hex[:12]}"
    try:
        await docker("run", "-d", "--init", "--name", name, *options, image, "sleep", "infinity")
        yield name
    finally:
        await docker("rm", "-f", name, check=False)


async def docker(*arguments: str, check: bool = True) -> int:
    """A command of Docker's client; its status."""
    status, output = await captured("docker", *arguments)
    assert status == 0 or not check, f"docker {' '.join(arguments)}: {output[-1000:].decode(errors='replace')}"
    return status
