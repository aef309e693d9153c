"""What the emulator guesses about E2B, held against E2B: each test that fails there names a guess to fix.

`E2B_LIVE=1` runs them with the account of E2B_API_KEY; they cost cents. `E2B_LIVE=emulator` runs them on the emulator,
to see that the tests themselves are right.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from tests.e2b.conftest import E2bEmulator

Create = Callable[..., Any]


@pytest.fixture(scope="module")
def live_e2b() -> Iterator[str]:
    """Which E2B it is."""
    way = os.environ.get("E2B_LIVE", "")
    if way not in ("1", "emulator"):
        pytest.skip("E2B_LIVE=1 runs this on the real E2B, with your key and at your cost")
    if way == "1":
        yield way
        return
    emulator = E2bEmulator()
    before = {name: os.environ.get(name) for name in emulator.environment}
    os.environ.update(emulator.environment)
    yield way
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    emulator.close()


@pytest.fixture
async def backend(live_e2b: str) -> AsyncIterator[Any]:
    from hermes_e2b.backend import E2bBackend

    made = E2bBackend()
    yield made
    await made.aclose()


@pytest.fixture
async def create(backend: Any) -> AsyncIterator[Create]:
    """Makes sandboxes, which end with the test."""
    from hermes_e2b.config import E2bConfig

    owner = f"live-{uuid.uuid4().hex[:8]}"

    async def make(**config: Any) -> Sandbox:
        config = {"orphan_ttl_s": 120, **config}
        spec = SandboxSpec(uuid.uuid4().hex, owner, E2bConfig(**config), Isolation.USER, {"OF_THE_SPEC": "yes"})
        sandbox: Sandbox = await backend.create(spec)
        return sandbox

    yield make
    for info in await backend.list(owner):
        await backend.terminate_id(info.sandbox_id)


async def run(sandbox: Sandbox, *argv: str) -> tuple[bytes, int]:
    channel = await sandbox.open(argv)
    output = b""
    while piece := await channel.read(1 << 16):
        output += piece
    try:
        return output, await channel.wait()
    finally:
        await channel.aclose()


async def until_gone(sandbox: Sandbox, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while await sandbox.status() is SandboxStatus.RUNNING:
            await asyncio.sleep(0.5)


async def test_statuses_of_programs(create: Create) -> None:
    sandbox = await create()
    assert (await run(sandbox, "sh", "-c", "exit 7"))[1] == 7
    assert (await run(sandbox, "sh", "-c", "kill -9 $$"))[1] == 137
    assert (await run(sandbox, "no-such-program-here"))[1] in (126, 127)


async def test_programs_are_roots_and_have_the_variables_of_the_creation(create: Create, backend: Any) -> None:
    sandbox = await create()
    assert (await run(sandbox, "sh", "-c", "id -u; echo $OF_THE_SPEC; pwd"))[0] == b"0\nyes\n/\n"
    again = await backend.attach(sandbox.id)
    assert (await run(again, "sh", "-c", "echo $OF_THE_SPEC"))[0] == b"yes\n"


async def test_a_program_goes_on_when_nobody_listens(create: Create) -> None:
    """Its input ends, and its output does not stop it."""
    sandbox = await create()
    channel = await sandbox.open(["sh", "-c", "echo on; cat >/dev/null; head -c 50000000 /dev/zero; echo >/tmp/proof"])
    assert await channel.read(10) == b"on\n"
    await channel.aclose()
    async with asyncio.timeout(30):
        while (await run(sandbox, "test", "-e", "/tmp/proof"))[1]:
            await asyncio.sleep(0.2)


async def test_input_has_no_size_and_waits_for_its_reader(create: Create) -> None:
    """The proxies between take pieces of 1 MiB, and hold a call for as long as the program does not read."""
    sandbox = await create()
    channel = await sandbox.open(["sh", "-c", "sleep 5; wc -c"])
    began = time.monotonic()
    await channel.write(bytes(5_000_000))
    assert time.monotonic() - began > 3
    await channel.aclose()


async def test_a_sandbox_is_found_as_soon_as_it_is_there(create: Create, backend: Any) -> None:
    """A creation whose answer was lost is looked for by its metadata."""
    sandbox = await create()
    [info] = [each for each in await backend.list() if each.sandbox_id == sandbox.id]
    assert await backend._running(info.creation_id) == [sandbox.id]
    await sandbox.terminate()
    assert await backend._running(info.creation_id) == []


async def test_a_reboot_ends_the_sandbox(create: Create) -> None:
    """So a watchdog that no driver speaks to ends its machine. Otherwise, only E2B's timeout does."""
    await until_gone(await create(orphan_ttl_s=1), 50)


async def test_a_sandbox_that_nobody_keeps_alive_ends(create: Create, backend: Any) -> None:
    sandbox = await create()
    await backend._api.extend(sandbox.id, 10)
    backend._keep_alive.drop(sandbox.id)
    await until_gone(sandbox, 60)


async def test_a_machine_has_one_kernel_to_itself(create: Create, live_e2b: str) -> None:
    """Root may make namespaces and change user ids, so slots of the levels `user` and `namespace` work."""
    sandbox = await create()
    assert (await run(sandbox, "unshare", "--mount", "--pid", "--ipc", "--net", "--fork", "true"))[1] == 0
    script = "import os; os.setgroups([]); os.setresuid(1900000001, 1900000001, 0); print(os.geteuid())"
    assert await run(sandbox, "python3", "-c", script) == (b"1900000001\n", 0)


async def test_no_network_leads_nowhere(create: Create) -> None:
    script = "import socket; socket.create_connection(('1.1.1.1', 443), 5)"
    assert (await run(await create(network="none"), "python3", "-c", script))[1] != 0
