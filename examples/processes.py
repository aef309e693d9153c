"""A server that runs in a slot while commands use it, and that ends with the slot at the latest."""

import asyncio

from hermes_core import Runtime

READ = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"


async def main() -> None:
    async with (
        Runtime() as runtime,
        runtime.tool_backend("local", isolation="user") as backend,
        backend.lease("traj-1") as slot,
    ):
        commands = backend.commands(slot)
        await commands.write_file("index.html", b"it works")
        server = await commands.start("python3 -u -m http.server --bind 127.0.0.1 0")
        log = await commands.log(server.process_id, wait_s=10)
        port = log.data.decode().split(" port ")[1].split()[0]
        page = await commands.run(["python3", "-c", READ, f"http://127.0.0.1:{port}"])
        print(page.text.strip())
        ended = await commands.kill(server.process_id)
        print("ended by signal", ended.signal)


asyncio.run(main())
