"""Four slots of one sandbox, and one batch of commands: each slot has a workspace and a user of its own."""

import asyncio

from hermes_core import Runtime


async def main() -> None:
    async with Runtime() as runtime, runtime.tool_backend("local", isolation="user") as backend:
        slots = [await backend.acquire(f"traj-{i}") for i in range(4)]
        results = await backend.execute_batch([(slot, "bash", {"command": "pwd"}) for slot in slots])
        for result in results:
            print(result.success, result.output)
        for slot in slots:
            await backend.release(slot, reset_workspace=True)


asyncio.run(main())
