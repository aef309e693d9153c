"""A client of a scripted server, as the tests of an endpoint use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hermes_testing.scripted_server import ScriptedServer

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.model import OpenAIServer
from hermes_core.errors import ModelError

HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client_of(server: ScriptedServer, **fields: Any) -> AsyncIterator[OpenAIServer]:
    """Open a client with these settings."""
    client = OpenAIServer(AgentSettings(**{"model": "scripted", "base_url": server.base_url, **fields}))
    try:
        yield client
    finally:
        await client.aclose()


async def ask(client: OpenAIServer, **body: Any) -> Any:
    """Return the text of an answer, or the error."""
    try:
        return (await client.chat_completion(messages=HELLO, **body)).choices[0].message.content
    except ModelError as error:
        return error


def warnings_in(caplog: Any) -> list[str]:
    """Return the warnings that were logged."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
