"""Places on this host: never more than there are, in order, free again when their process is gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hermes_verifiers.places import Places

HOLDER = """
import asyncio, sys, time
from pathlib import Path
from hermes_verifiers.places import Places

async def main():
    async with Places(Path(sys.argv[1]), 1).one():
        print("held", flush=True)
        time.sleep(60)

asyncio.run(main())
"""


async def test_two_processes_have_no_more_places_together_than_the_host(tmp_path: Path) -> None:
    places = [Places(tmp_path / "places", 3), Places(tmp_path / "places", 3)]  # as in two processes: they share files
    held, most = 0, 0

    async def work(number: int) -> None:
        nonlocal held, most
        async with places[number % 2].one():
            held += 1
            most = max(most, held)
            await asyncio.sleep(0.02)
            held -= 1

    await asyncio.gather(*(work(number) for number in range(20)))
    assert (held, most) == (0, 3)


@pytest.mark.usefixtures("leak_check")
async def test_who_waits_for_a_place_can_be_cancelled(tmp_path: Path) -> None:
    places = Places(tmp_path, 1)
    async with places.one():
        waiting = [asyncio.create_task(_hold(places)) for _ in range(2)]
        await asyncio.sleep(0.1)
        waiting[0].cancel()
    assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[0], asyncio.CancelledError)
    await asyncio.wait_for(_hold(places), 20)


async def _hold(places: Places) -> None:
    async with places.one():
        pass


async def test_the_place_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_hold(Places(tmp_path, 1)), 0.2)
        holder.kill()
    await asyncio.wait_for(_hold(Places(tmp_path, 1)), 20)
