"""A gateway on a port of the loopback, as a slot's program finds it, with a model that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hermes_agents.serving.bounds import Bounds
from hermes_agents.serving.conversations import Conversations
from hermes_agents.serving.gateway import Gateway

from hermes_core.agents.base import AgentSettings, AgentTask
from hermes_core.agents.replies import ModelReply, ToolCall, decode_arguments

TASK = "Fix the bug in calc.py."


def call(name: str, arguments: str, identifier: str = "srv_1") -> ToolCall:
    return ToolCall(identifier, name, arguments, *decode_arguments(arguments))


def reply(
    content: str = "", *calls: ToolCall, thinking: str | None = None, end: str | None = None, **more: Any
) -> ModelReply:
    reason = end or ("tool_calls" if calls else "stop")
    counts = {"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 30, "reasoning_tokens": 5}
    return ModelReply(content, calls, thinking, None, reason, **{**counts, **more})


Answer = ModelReply | Exception | Callable[[Any], Awaitable[ModelReply]]


@dataclass
class Model:
    """A `ChatServer` that gives one answer after the other, the last one again and again."""

    answers: Sequence[Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def chat_completion(self, **request: Any) -> ModelReply:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, ModelReply) else await answer(request)


@dataclass(eq=False)
class TcpConnection:
    """A connection of a port of the loopback as a `Connection`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self, n: int = 65536) -> bytes:
        return await self.reader.read(n)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def finish(self) -> None:
        with suppress(OSError):
            self.writer.write_eof()


@asynccontextmanager
async def port_of(gateway: Gateway) -> AsyncIterator[str]:
    """Yield the URL at which the gateway answers, without /v1."""
    tasks: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            await gateway.serve(TcpConnection(reader, writer))
        except (ConnectionError, asyncio.CancelledError):  # a cancelled handler is logged by `asyncio`
            writer.transport.abort()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2048)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def task_of(**more: Any) -> AgentTask:
    async def nothing(*_: Any) -> Any:
        return None

    own = {"trajectory_id": "t", "messages": [{"role": "user", "content": TASK}], "tool_schemas": []}
    return AgentTask(**{**own, "tool_handler": nothing, "solve": nothing, **more})


@asynccontextmanager
async def slot(
    *answers: Answer,
    bounds: Bounds | None = None,
    task: AgentTask | None = None,
    model: Any = None,
    conversations: Conversations | None = None,
    **settings: Any,
) -> AsyncIterator[Slot]:
    model = model or Model(answers)
    task = task or task_of()
    gateway = Gateway(model, task, AgentSettings(model="ours", **settings), conversations=conversations, bounds=bounds)
    async with gateway, port_of(gateway) as url:
        yield Slot(gateway, model, task, url)


@dataclass(frozen=True)
class Slot:
    gateway: Gateway
    model: Any
    task: AgentTask
    url: str
