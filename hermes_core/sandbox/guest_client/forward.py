"""The driver's side of a forward: a port in a slot whose connections are streams of the sandbox's channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hermes_core.aio import alongside, exits_are_errors
from hermes_core.sandbox.commands import Call, Forward, Operation, Serve
from hermes_core.sandbox.guest_client.streams import InputStream, OutputStream, SendRequest

log = logging.getLogger(__name__)

SPARE = 4
"""How many carriers wait for connections, so that these need not wait for the channel."""
LINGER_S = 2.0
"""Seconds that a program has to close its end after ours, before the connection is reset."""


@asynccontextmanager
async def forwarded(
    request: SendRequest, call: Call, index: int, serve: Serve, *, port: int, most: int
) -> AsyncIterator[Forward]:
    """Open a port of a slot during the block, and serve the connections to it; `SlotCommands.forward` has the rules.

    Args:
        call: carries out the opening, which is the operation of the slot. What follows ends with the request for it.
        port: which one; 0 is any.
    """
    async with AsyncExitStack() as stack:
        listen = partial(_listen, stack, request, {"op": "listen", "slot": index, "port": port})
        forward = await call(Operation("forward", listen))
        server = _Server(request, {"slot": index, "port": forward.port}, serve, most)
        await stack.enter_async_context(alongside(server.run()))
        yield forward


async def _listen(stack: AsyncExitStack, request: SendRequest, header: dict[str, Any]) -> Forward:
    """Have the port opened, until the stack is unwound."""
    words = OutputStream()
    listening = await stack.enter_async_context(alongside(request(header, output=words)))
    if not (port := await words.read()):
        await listening  # it says why not
    return Forward(int(port))


@dataclass(eq=False)
class ForwardedConnection:
    """A `Connection`: the two streams of the request that carries it."""

    output: OutputStream = field(default_factory=OutputStream)
    input: InputStream = field(default_factory=InputStream)

    async def read(self, n: int = 65536) -> bytes:
        """Return up to `n` bytes of what the program has sent; empty at its end."""
        data = await self.output.read(n)
        if not data and not self.output.complete:
            raise ConnectionResetError("the program broke the connection, or its forward was closed")
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the program."""
        if not await self.input.write(data):
            raise ConnectionResetError("the program takes no more, or its forward was closed")

    async def finish(self) -> None:
        """Tell the program that nothing more will be sent."""
        self.input.finish()


class _Server:
    """Serves the connections to one port."""

    def __init__(self, request: SendRequest, port: dict[str, Any], serve: Serve, most: int) -> None:
        self._request = request
        self._port = port
        self._serve = serve
        self._free = asyncio.Semaphore(most)
        self._spare = asyncio.Semaphore(SPARE)

    async def run(self) -> None:
        """Have carriers wait for connections, and serve those that come."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._spare.acquire()
                await self._free.acquire()
                tasks.create_task(self._carry())

    async def _carry(self) -> None:
        connection = ForwardedConnection()
        carry = self._request({"op": "carry", **self._port}, output=connection.output, input=connection.input)
        async with alongside(carry) as carried:
            if not await connection.output.read(1):
                return  # the forward has ended: none of the carriers is replaced then
            self._spare.release()
            try:
                with exits_are_errors():
                    await self._serve(connection)
                await _close(connection, carried)
            except ConnectionError as error:
                log.debug("a connection of a program in a slot broke: %s", error)
            except Exception:
                log.exception("a connection of a program in a slot could not be served")
            finally:
                self._free.release()


async def _close(connection: ForwardedConnection, carried: asyncio.Task[Any]) -> None:
    """Send all that was written and its end, and wait a moment for the program's."""
    connection.input.finish()
    async with alongside(_discard(connection.output)):
        if await connection.input.flush():
            await asyncio.wait([carried], timeout=LINGER_S)


async def _discard(output: OutputStream) -> None:
    while await output.read():
        pass
