"""What a vLLM server was asked and what it said, written down by itself.

HERMES_TEST_RECORD=record.jsonl vllm serve MODEL --middleware tests.vllm.record.Record
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.token_server import Given

FILE = "HERMES_TEST_RECORD"
"""The variable that names the file with a line for each completion."""

PATH = "/v1/completions"


class Record:
    """Middleware in the form of ASGI."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != PATH:
            await self._app(scope, receive, send)
            return
        asked, said = bytearray(), bytearray()

        async def read() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def write(message: Any) -> None:
            said.extend(message.get("body", b""))
            await send(message)

        await self._app(scope, read, write)
        with open(os.environ[FILE], "a") as file:
            print(json.dumps([json.loads(asked), json.loads(said)]), file=file)


def completions(path: Path) -> Iterator[Given]:
    """Yield what was sampled."""
    for line in path.read_text().splitlines():
        asked, said = json.loads(line)
        for choice in said.get("choices", ()):
            logprobs = choice["logprobs"]["token_logprobs"]
            yield Given(tuple(asked["prompt"]), tuple(choice["token_ids"]), tuple(logprobs), choice["finish_reason"])
