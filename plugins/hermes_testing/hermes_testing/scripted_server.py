"""A model server on loopback that answers from a script: no model, no key, real HTTP.

It speaks OpenAI's Chat Completions and Responses, and Anthropic's Messages, whole and as streams.

def solver(prompt):                                  # a script reads like the conversation
    found = yield call("terminal", command="ls")
    yield call("write_file", path="answer.txt", content=found["output"])
    return "Done."

async with ScriptedServer(ToolScript(solver)) as server:
    agent = ModelAgent(AgentSettings(model="scripted", base_url=server.base_url))
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from hermes_agents.serving.anthropic import AnthropicDialect
from hermes_agents.serving.chat import ChatDialect
from hermes_agents.serving.dialects import BadRequest, Dialect
from hermes_agents.serving.dialects import WrittenAnswer as Written
from hermes_agents.serving.responses import ResponsesDialect

from hermes_core.agents.replies import read_reply

logger = logging.getLogger(__name__)

_MAX_HEAD = 64 * 1024
FEWEST = (1, 16)
"""The smallest values of `max_tokens` that an API accepts: 1, or 16 for Responses."""
_TICKS = 5
"""Number of rounds of the event loop that we wait for the task of an accepted connection; asyncio takes three."""
_DIALECTS: Mapping[str, Dialect] = {"/v1/messages": AnthropicDialect(), "/v1/responses": ResponsesDialect()}
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


@dataclass(frozen=True)
class ScriptedCall:
    """One tool call of a scripted reply."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    """A mapping, or text that is sent unchanged (to play a model that writes bad JSON)."""
    id: str | None = None
    """The call's id; generated if None. An empty string is sent unchanged."""


def call(tool_name: str, /, **arguments: Any) -> ScriptedCall:
    """Return a tool call, written like a function call: `call("terminal", command="ls")`."""
    return ScriptedCall(tool_name, arguments)


@dataclass(frozen=True)
class Reply:
    """One scripted answer of the model."""

    content: str | None = None
    tool_calls: Sequence[ScriptedCall] = ()
    reasoning: str | None = None
    """The reasoning, sent as `reasoning_content`."""
    finish_reason: str | None = None
    """The finish reason. None means `tool_calls` or `stop`, depending on the reply."""
    usage: tuple[int, int] = (0, 0)
    """Prompt tokens and completion tokens that the server reports."""
    usage_extra: Mapping[str, Any] = field(default_factory=dict)
    """More keys for the usage, such as `prompt_tokens_details`."""
    message_extra: Mapping[str, Any] = field(default_factory=dict)
    """More keys for the message, such as `reasoning_details`."""
    choice_extra: Mapping[str, Any] = field(default_factory=dict)
    """More keys for the choice, such as `logprobs` and `token_ids`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """More headers, such as the rate limits."""
    delay_s: float = 0.0
    """Seconds before the answer begins."""


@dataclass(frozen=True)
class Fault:
    """One scripted failure: an HTTP error, a wrong body, or a broken connection."""

    status: int = 200
    """The HTTP status. An error status comes with an error body in the form of the API unless `body` is given."""
    message: str = "scripted failure"
    code: str | None = None
    """The error body's `code`, such as `context_length_exceeded` or `insufficient_quota`. For Anthropic it is the
    `type`, such as `overloaded_error`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """More headers, such as `{"Retry-After": "1"}`."""
    body: bytes | None = None
    """The body that is sent instead of a completion."""
    cut: bool = False
    """Break the connection in the middle of the body."""
    delay_s: float = 0.0
    """Seconds before the answer begins."""


Answer = Reply | Fault
Script = Callable[[dict[str, Any]], Any] | Sequence[Answer]
"""A function that takes a request and returns an answer (or an awaitable of one), or the list of answers of one
conversation.

A list serves any number of conversations: the number of answers that a request already contains is the index of the
next answer.
"""


class ScriptedServer:
    """The server: `async with ScriptedServer(script) as server: … server.base_url …`.

    Args:
        script: the answers. A function gets each request in the form of Chat Completions, whatever the API.
        faults: failures of the first requests, one for each. For these requests, the script is not used.
        models: the models that the server has; requests for others get a 404.
        api_key: if set, requests without it get a 401.
        keep_requests: maximum number of latest request bodies in `requests`.
        port: the port to listen on; 0 is any free one.
    """

    def __init__(
        self,
        script: Script,
        *,
        faults: Sequence[Fault] = (),
        models: Sequence[str] = ("scripted",),
        api_key: str | None = None,
        keep_requests: int = 1000,
        max_request_bytes: int = 64 * 1024 * 1024,
        port: int = 0,
    ) -> None:
        self._port = port
        self.script = script
        self.faults = deque(faults)
        self.models = tuple(models)
        self.api_key = api_key
        self.requests: deque[dict[str, Any]] = deque(maxlen=keep_requests)
        """The bodies of the latest requests, including those that `faults` answered."""
        self.request_count = 0
        self.script_error: Exception | None = None
        """The first error that the script raised. It is raised again when the server is closed."""
        self.base_url = ""
        """The server's URL, ending in `/v1`; set once it listens."""
        self._max_request_bytes = max_request_bytes
        self._ids = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ScriptedServer:
        """Listen on a free port of the loopback interface."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=_MAX_HEAD, backlog=1024)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and end every connection. Raise the script's first error, such as a failed assertion."""
        if self._server is not None:
            await self._accept_no_more(self._server)
            self._server.close()
            connections = list(self._connections)
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None
        if kind is None and self.script_error is not None:
            raise self.script_error

    async def _accept_no_more(self, server: asyncio.Server) -> None:
        """Stop accepting connections, and wait until every accepted connection has its task. When the server is closed,
        asyncio forgets connections without a task, and leaves them open: their clients would wait for ever."""
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(_TICKS):
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, with any number of requests one after the other."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has gone, or does not speak HTTP
        except asyncio.CancelledError:
            pass  # `__aexit__` cancelled this task; asyncio would log a cancelled connection as an error
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request. Return whether the connection can take another."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])}
        length = int(headers.get("content-length") or 0)
        if length > self._max_request_bytes:
            fault = Fault(413, f"the request is longer than {self._max_request_bytes} bytes")
            return await self._send(writer, fault.status, _error_body(fault), fault, keep=False)
        body = await reader.readexactly(length)
        answer, status, payload = await self._respond(method, path.partition("?")[0], headers, body)
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        return await self._send(writer, status, payload, answer, keep=headers.get("connection") != "close")

    async def _respond(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, int, bytes]:
        """Return the answer, its status and its body."""
        if self.api_key not in (
            None,
            headers.get("x-api-key"),
            headers.get("authorization", "").removeprefix("Bearer "),
        ):
            return _answer_fault(Fault(401, "incorrect API key provided", "invalid_api_key"))
        if (method, path) == ("GET", "/v1/models"):
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "script"} for name in self.models]
            return Reply(), 200, json.dumps({"object": "list", "data": models}).encode()
        dialect = _DIALECTS.get(path)
        if method != "POST" or (dialect is None and path != "/v1/chat/completions"):
            return _answer_fault(Fault(404, f"there is no {method} {path} here"))
        try:
            request = json.loads(body)
        except ValueError as error:
            return _answer_fault(Fault(400, f"the request is not JSON: {error}"))
        if not isinstance(request, dict):
            return _answer_fault(Fault(400, "the request is no JSON object"))
        self.requests.append(request)
        self.request_count += 1
        if dialect is not None or request.get("stream"):
            return await self._respond_in(dialect or ChatDialect(), request)
        if not isinstance(request.get("messages"), list):
            return _answer_fault(Fault(400, "the request has no list of messages"))
        answer = await self._answer(request)
        if isinstance(answer, Fault):
            return _answer_fault(answer)
        return answer, 200, json.dumps(self._completion(request, answer)).encode()

    async def _respond_in(self, dialect: Dialect, request: dict[str, Any]) -> tuple[Answer, int, bytes]:
        """Return the answer to a request that has another form than Chat Completions, or that asks for a stream."""
        try:
            asked = dialect.read(request)
        except BadRequest as error:
            return _answer_fault(Fault(400, str(error)), dialect)
        given = {"model": asked.model, "messages": asked.messages, "max_tokens": asked.max_tokens}
        answer = await self._answer({**given, "tools": asked.tools} if asked.tools else given)
        if isinstance(answer, Fault):
            return _answer_fault(answer, dialect)
        reply = read_reply(self._completion(given, answer), 1)
        written = Written(f"s{next(self._ids)}", 0, asked.model or "", reply)
        if not asked.stream:
            return answer, 200, json.dumps(dialect.whole(written, asked)).encode()
        streamed = replace(answer, headers={"Content-Type": "text/event-stream", **answer.headers})
        return streamed, 200, dialect.stream(written, asked)

    async def _answer(self, request: dict[str, Any]) -> Answer:
        if self.faults:
            return self.faults.popleft()
        if request.get("model") not in self.models:
            return Fault(404, f"the model {request.get('model')!r} does not exist", "model_not_found")
        try:
            if callable(self.script):
                answer = self.script(request)
                if inspect.isawaitable(answer):
                    answer = await answer
                if isinstance(answer, Reply | Fault):
                    return answer
                raise TypeError(f"it gave {type(answer).__name__}, not a Reply or a Fault")
            turn = sum(message.get("role") == "assistant" for message in request["messages"])
            return self.script[turn] if turn < len(self.script) else Fault(400, f"the script has no answer {turn + 1}")
        except Exception as error:
            logger.exception("a scripted server's script failed")
            self.script_error = self.script_error or error
            return Fault(400, f"the script failed: {type(error).__name__}: {error}")

    def _completion(self, request: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, **reply.message_extra}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_s{number}_{index}" if made.id is None else made.id,
                    "type": "function",
                    "function": {"name": made.name, "arguments": _arguments_text(made.arguments)},
                }
                for index, made in enumerate(reply.tool_calls)
            ]
        finish_reason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
        prompt, completion = reply.usage
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **reply.choice_extra}],
            "usage": {
                **{"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
                **reply.usage_extra,
            },
        }

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, payload: bytes, answer: Answer, *, keep: bool
    ) -> bool:
        """Send a response. Return whether the connection can take another request."""
        cut = isinstance(answer, Fault) and answer.cut
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Scripted')}"]
        lines += [f"{key}: {value}" for key, value in {"Content-Type": "application/json", **answer.headers}.items()]
        lines += [f"Content-Length: {len(payload)}", f"Connection: {'keep-alive' if keep else 'close'}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1"))
        writer.write(payload[: len(payload) // 2] if cut else payload)
        await writer.drain()
        return keep and not cut


Step = ScriptedCall | Reply | Sequence[ScriptedCall]
Play = Callable[[str], Generator[Step, Any, str | Reply]]


class ToolScript:
    """Plays a generator function as the model: `ScriptedServer(ToolScript(play))`.

    `play(prompt)` gets the text of the prompt's last message. It yields each step: a `ScriptedCall`, a list of
    `ScriptedCall`s, or a whole `Reply`. `yield` returns the tool's answer as a decoded JSON value; after a list or a
    `Reply`, a list of answers. The return value of `play` is the model's last message.

    The server keeps no state of a conversation: each request runs the function again from its start, with the results
    in the request. So one function serves any number of conversations at once, and must depend only on its arguments
    and the results. With a request for the fewest tokens, an agent checks a key. It is answered without `play`.

    Raises:
        TypeError: at a request, if `play` is no generator function, or yields or returns something else.
    """

    def __init__(self, play: Play) -> None:
        self.play = play

    def __call__(self, request: dict[str, Any]) -> Reply:
        """Return the answer to this request."""
        if request.get("max_tokens") in FEWEST:
            return Reply("Hello")
        messages: list[dict[str, Any]] = request["messages"]
        starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        prompt = messages[: starts[0]] if starts else messages
        steps = self.play(_text(prompt[-1].get("content")) if prompt else "")
        if not isinstance(steps, Generator):
            raise TypeError(f"{self.play!r} returned {steps!r:.80}: a script yields its calls, so write `yield` in it")
        try:
            step = next(steps)
            for start, end in itertools.pairwise([*starts, len(messages)]):
                said = [_decode(message) for message in messages[start + 1 : end] if message["role"] == "tool"]
                step = steps.send((said[0] if said else None) if isinstance(step, ScriptedCall) else said)
        except StopIteration as end_of_play:
            last = end_of_play.value
            if not isinstance(last, Reply | str | None):
                raise TypeError(f"the script returned {last!r:.80}, and not a text or a Reply") from None
            return last if isinstance(last, Reply) else Reply(content=last)
        finally:
            steps.close()
        if isinstance(step, Reply):
            return step
        calls = [step] if isinstance(step, ScriptedCall) else step
        if not isinstance(calls, list | tuple) or not all(isinstance(each, ScriptedCall) for each in calls):
            raise TypeError(f"the script yielded {step!r:.80}, and not a ScriptedCall, a list of them, or a Reply")
        return Reply(tool_calls=list(calls))


def _answer_fault(fault: Fault, dialect: Dialect | None = None) -> tuple[Answer, int, bytes]:
    return fault, fault.status, _error_body(fault, dialect) if fault.body is None else fault.body


def _error_body(fault: Fault, dialect: Dialect | None = None) -> bytes:
    if isinstance(dialect, AnthropicDialect):
        error: dict[str, Any] = {"type": fault.code or "scripted", "message": fault.message}
        return json.dumps({"type": "error", "error": error}).encode()
    error = {"message": fault.message, "type": "scripted", "param": None, "code": fault.code}
    return json.dumps({"error": error}).encode()


def _arguments_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _decode(message: Mapping[str, Any]) -> Any:
    """Return a tool's answer: the decoded JSON value, or the text itself if it is not JSON."""
    text = _text(message.get("content"))
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
