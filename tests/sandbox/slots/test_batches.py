"""Batches: many tool calls at the same time, in many slots."""

from __future__ import annotations

import asyncio
import time

import pytest
from hermes_testing.conformance.expect import expect, same
from hermes_testing.conformance.kit import Kit

from hermes_core.errors import ErrorKind

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.once]


async def test_results_are_in_order(kit: Kit) -> None:
    """The results are in the order of the requests, whoever was done first."""
    async with kit.tools(seats=2) as tools:
        slots = await asyncio.gather(tools.acquire(), tools.acquire())
        requests = [
            (slots[number % 2], "bash", {"command": f"sleep 0.{(7 * number) % 10}; echo {number}"})
            for number in range(20)
        ]
        results = await tools.execute_batch(requests, timeout_s=60)
        same([each.output for each in results], [f"{number}\n" for number in range(20)], "the outputs")
        same([each.slot_id for each in results], [request[0].slot_id for request in requests], "the slots")
        same(len({each.execution_id for each in results}), 20, "different execution ids")


async def test_a_batch_runs_at_once(kit: Kit) -> None:
    """The requests of a batch run at the same time."""
    async with kit.tools(seats=2) as tools:
        slots = await asyncio.gather(tools.acquire(), tools.acquire())
        began = time.monotonic()
        requests = [(slots[number % 2], "bash", {"command": "sleep 2"}) for number in range(16)]
        results = await tools.execute_batch(requests, timeout_s=60)
        took = time.monotonic() - began
        expect(all(each.success for each in results), "a `sleep 2` failed")
        expect(took < 16, f"16 times `sleep 2` in one batch took {took:.0f} s")


async def test_one_bad_among_good(kit: Kit) -> None:
    """A request fails by itself: by its command, its time limit, its tool, its released slot."""
    async with kit.tools(seats=2) as tools:
        slot, released = await asyncio.gather(tools.acquire(), tools.acquire())
        await tools.release(released)
        requests = [
            (slot, "bash", {"command": "echo good"}),
            (slot, "bash", {"command": "echo out; exit 3"}),
            (slot, "bash", {"command": "sleep 1000"}),
            (slot, "no-such-tool", {}),
            (slot, "bash", {"comand": "true"}),
            (released, "bash", {"command": "true"}),
            (slot, "bash", {"command": "echo good too"}),
        ]
        results = await tools.execute_batch(requests, timeout_s=2)
        kinds = [each.error_kind for each in results]
        command, timeout, policy = ErrorKind.COMMAND, ErrorKind.TIMEOUT, ErrorKind.POLICY
        same(kinds, [None, command, timeout, command, command, policy, None], "the kinds of error")
        same((results[0].output, results[-1].output), ("good\n", "good too\n"), "the good ones")
        same(results[1].metadata["exit_code"], 3, "the exit code of a bad one")


async def test_files_in_a_batch(kit: Kit) -> None:
    """The slot tools `write_file` and `read_file` work in a batch as by themselves."""
    async with kit.tools(seats=1) as tools, tools.lease() as slot:
        texts = {f"f{number}": f"content {number} €\n" for number in range(10)}
        written = await tools.execute_batch(
            [(slot, "write_file", {"path": name, "content": text}) for name, text in texts.items()]
        )
        expect(all(each.success for each in written), f"a file was not written: {[each.error for each in written]}")
        read = await tools.execute_batch([(slot, "read_file", {"path": name}) for name in texts])
        same([each.output for each in read], list(texts.values()), "what was read")


async def test_an_empty_batch(kit: Kit) -> None:
    """A batch of nothing gives nothing."""
    async with kit.tools(seats=1) as tools:
        same(await tools.execute_batch([]), [], "its results")


async def test_a_dead_sandbox_fails_its_own_requests(kit: Kit) -> None:
    """When a sandbox dies, its requests fail as `infra`, never as a command's; the others are not touched."""
    async with kit.tools(seats=2, per_sandbox=1, orphan_ttl_s=3.0) as tools:
        slot, other = await asyncio.gather(tools.acquire(), tools.acquire())
        batch = asyncio.ensure_future(
            tools.execute_batch(
                [(slot, "bash", {"command": "sleep 1000"}), (other, "bash", {"command": "sleep 1; echo fine"})],
                timeout_s=60,
            )
        )
        await asyncio.sleep(0.5)
        await kit.backend.terminate_id(slot.sandbox_id)
        lost, good = await batch
        same((lost.success, lost.error_kind), (False, ErrorKind.INFRA), "the request in the dead sandbox")
        same((good.error_kind, good.output), (None, "fine\n"), "the request in the other")
