"""A driver in a separate process, for the check that kills a driver: it makes a slot, runs a command, and waits."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from hermes_core import Isolation, Runtime
from hermes_testing.conformance.kit import Rig


async def main(request: dict[str, Any]) -> None:
    """Print `ready` when a command runs in a slot."""
    async with Runtime() as runtime:
        rig = Rig(runtime, request["backend"], request["config"])
        config = rig.profile(slots_per_sandbox=1, min_sandboxes=1, max_sandboxes=1, reserve_slots=0)
        async with rig.tool_backend(Isolation(request["isolation"]), request["owner"], config) as tools:
            slot = await tools.acquire()
            await tools.commands(slot).start("sleep 1000")
            await tools.commands(slot).run("sleep 1000 >/dev/null 2>&1 & true")
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))
