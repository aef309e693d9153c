"""The driver's side of a forward: a port in a slot, whose connections are carried over the sandbox's channel."""

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
"""The number of carrier requests that wait in the guest, so that a new connection needs no round trip first."""
LINGER_S = 2.0
"""How long a program may take to close its end after we closed ours. Then, the connection is reset."""


@asynccontextmanager
async def open_forward(
    request: SendRequest, call: Call, index: int, serve: Serve, *, port: int, most: int
) -> AsyncIterator[Forward]:
    """Open a port of a slot during the block, and serve its connections. See `SlotCommands.forward`.

    Args:
        call: carries out the operation that opens the port.
        port: the number of the port. 0 is any free port.
    """
    async with AsyncExitStack() as stack:
        listen = partial(_listen, stack, request, {"op": "listen", "slot": index, "port": port})
        forward = await call(Operation("forward", listen))
        server = _Server(request, {"slot": index, "port": forward.port}, serve, most)
        await stack.enter_async_context(alongside(server.run()))
        yield forward


async def _listen(stack: AsyncExitStack, request: SendRequest, header: dict[str, Any]) -> Forward:
    """Open the port until the stack is unwound."""
    output = OutputStream()
    listening = await stack.enter_async_context(alongside(request(header, output=output)))
    if not (port := await output.read()):
        await listening  # raises the reason
    return Forward(int(port), listening)


@dataclass(eq=False)
class ForwardedConnection:
    """A `Connection` over the two streams of a carrier request."""

    output: OutputStream = field(default_factory=OutputStream)
    input: InputStream = field(default_factory=InputStream)

    async def read(self, n: int = 65536) -> bytes:
        """Return up to `n` bytes from the program; empty at the end."""
        data = await self.output.read(n)
        if not data and not self.output.complete:
            raise ConnectionResetError("the program broke the connection, or its forward was closed")
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the program."""
        if not await self.input.write(data):
            raise ConnectionResetError("the program takes no more, or its forward was closed")

    async def finish(self) -> None:
        """Send the end of our data to the program."""
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
        """Keep carrier requests waiting in the guest, and serve each connection."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._spare.acquire()
                await self._free.acquire()
                tasks.create_task(self._carry())

    async def _carry(self) -> None:
        connection = ForwardedConnection()
        carry = self._request({"op": "carry", **self._port}, output=connection.output, input=connection.input)
        async with alongside(carry) as carrier:
            if not await connection.output.read(1):
                return  # the forward has ended; `_spare` is not released, so no carrier follows
            self._spare.release()
            try:
                with exits_are_errors():
                    await self._serve(connection)
                await _close(connection, carrier)
            except ConnectionError as error:
                log.debug("a connection of a program in a slot broke: %s", error)
            except Exception:
                log.exception("a connection of a program in a slot could not be served")
            finally:
                self._free.release()


async def _close(connection: ForwardedConnection, carrier: asyncio.Task[Any]) -> None:
    """Send all data and its end, and wait for a moment until the program closes its end."""
    connection.input.finish()
    async with alongside(_discard(connection.output)):
        if await connection.input.flush():
            await asyncio.wait([carrier], timeout=LINGER_S)


async def _discard(output: OutputStream) -> None:
    while await output.read():
        pass
