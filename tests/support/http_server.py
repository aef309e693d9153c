"""An HTTP server for a test: some paths, and a function of aiohttp's kind for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def listening(routes: dict[str, Callable[[Any], Awaitable[Any]]]) -> AsyncIterator[str]:
    """Serve the routes, each named like `POST /generate`, and yield the base URL, which ends in `/v1`."""
    from aiohttp import web

    app = web.Application(client_max_size=64 << 20)
    for name, answer in routes.items():
        app.router.add_route(*name.split(), answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
