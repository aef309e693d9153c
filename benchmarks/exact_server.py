"""A server of tokens in a process of its own, for `atropos.py`: it answers at once with what standard input names.

A line of JSON: `call`, the tokens of an answer that calls a tool; `end`, those of one that does not; `turns`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def main() -> None:
    from aiohttp import web

    given = json.loads(sys.stdin.readline())
    answers = {name: [[[{str(token): -0.5}] for token in given[name]]] for name in ("call", "end")}
    mark = given["mark"]

    async def generate(request: Any) -> Any:
        prompt = (await request.json())["prompt"]["prompt_token_ids"]
        name = "call" if prompt.count(mark) < given["turns"] else "end"
        return web.json_response({"logprobs": answers[name], "finish_reasons": ["stop"]})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
