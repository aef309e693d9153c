"""Batches: many tool calls at the same time, in many slots."""

from __future__ import annotations

import asyncio

import pytest
from hermes_testing.conformance.kit import Kit

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
        assert [each.output for each in results] == [f"{number}\n" for number in range(20)], "the outputs"
        assert [each.slot_id for each in results] == [request[0].slot_id for request in requests], "the slots"
        assert len({each.execution_id for each in results}) == 20, "different execution ids"


async def test_files_in_a_batch(kit: Kit) -> None:
    """The slot tools `write_file` and `read_file` work in a batch as by themselves."""
    async with kit.tools(seats=1) as tools, tools.lease() as slot:
        texts = {f"f{number}": f"content {number} €\n" for number in range(10)}
        written = await tools.execute_batch(
            [(slot, "write_file", {"path": name, "content": text}) for name, text in texts.items()]
        )
        assert all(each.success for each in written), f"a file was not written: {[each.error for each in written]}"
        read = await tools.execute_batch([(slot, "read_file", {"path": name}) for name in texts])
        assert [each.output for each in read] == list(texts.values()), "what was read"


async def test_an_empty_batch(kit: Kit) -> None:
    """A batch of nothing gives nothing."""
    async with kit.tools(seats=1) as tools:
        assert await tools.execute_batch([]) == [], "its results"
