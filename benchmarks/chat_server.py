"""A chat endpoint in a process of its own, for `agent_programs.py`: it answers at once, whole or as a stream.

Standard input says in a line how many calls of a tool each conversation has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

COMMAND = "cat notes.txt 2>/dev/null | tail -n 3; echo one more line of some length >>notes.txt; wc -c notes.txt"


async def main() -> None:
    turns = int(sys.stdin.readline())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                body = await reader.readexactly(int(length[15:]))
                done = body.count(b'"assistant"')  # as JSON it is in no text, since its quotes are escaped there
                answer, kind = _answer(done, len(body) // 4, last=done >= turns), "application/json"
                if b'"stream":true' in body or b'"stream": true' in body:
                    answer, kind = _streamed(answer), "text/event-stream"
                writer.write(
                    f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(answer)}\r\n\r\n".encode()
                )
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def _answer(number: int, tokens: int, *, last: bool) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "I look at what there is, and then go on. " * 4}
    if not last:
        function = {"name": "bash", "arguments": json.dumps({"command": COMMAND})}
        message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": "stop" if last else "tool_calls"}
    usage = {"prompt_tokens": tokens, "completion_tokens": 80, "total_tokens": tokens + 80}
    about = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": "scripted"}
    return json.dumps({**about, "choices": [choice], "usage": usage}).encode()


def _streamed(answer: bytes) -> bytes:
    whole = json.loads(answer)
    [choice] = whole["choices"]
    delta = choice.pop("message")
    delta["tool_calls"] = [{"index": 0, **call} for call in delta.get("tool_calls", ())]
    chunk = {**whole, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()


if __name__ == "__main__":
    asyncio.run(main())
