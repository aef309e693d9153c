"""The model server for one slot: the rollout's own model answers the calls of the slot's programs, within bounds."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

from hermes_agents.serving.anthropic import AnthropicDialect
from hermes_agents.serving.bounds import Bounds
from hermes_agents.serving.call_log import CallLog
from hermes_agents.serving.chat import ChatDialect
from hermes_agents.serving.conversations import AnswerDetails, Conversations, task_text
from hermes_agents.serving.dialects import Aim, Dialect, ModelRequest, RequestRefusal, WrittenAnswer
from hermes_agents.serving.gemini import GeminiDialect
from hermes_agents.serving.http import ConnectionPace, Exchange, Handle, Room, UnreadableRequest, serve_http
from hermes_agents.serving.requests import GivenCall, Request, read_request
from hermes_agents.serving.responses import ResponsesDialect
from hermes_agents.serving.sampling import Sampling
from hermes_agents.serving.shared_time import SharedTime
from hermes_agents.serving.upstream import Upstream
from hermes_core import (
    AgentSettings,
    AgentTask,
    BrokenOff,
    ChatServer,
    Connection,
    ContextLengthExceeded,
    ConversationRefused,
    EndpointDown,
    ModelError,
    ModelReply,
    ResponseTooLarge,
    SingleFlight,
    StopReason,
    TaskSet,
    Usage,
    UsageError,
    as_model_error,
    cancel,
    together,
)
from hermes_core.agents.endpoint.request import count_waits

logger = logging.getLogger(__name__)

_CHAT = ChatDialect()
_DIALECTS: Sequence[Dialect] = (AnthropicDialect(), GeminiDialect(), ResponsesDialect(), _CHAT)
_VERSION = re.compile(r"(?:/v1(?:beta|alpha)?(?![^/]))+")
"""Matches the API's version at the beginning of a path, which has it twice if both the base URL and the agent add
it."""
_JSON = {"content-type": "application/json"}
_BEARER = re.compile(r"^bearer ", re.IGNORECASE)
_FOR_GOOD = {"x-should-retry": "false"}
_PIECE = 256 << 10
_SHORT = 256 << 10
"""Maximum size in bytes of a request that is read on the event loop. Larger requests are read in a thread."""
_LOGGED = 4000
"""Maximum number of calls in the log. Further calls are only counted."""
_WORDS = 200
"""Maximum number of characters of a name or a path in the log."""
_CHARACTERS_PER_TOKEN = 4
GRACE_S = 10.0
"""Seconds that the agent has to end by itself after its model has failed. Some agents would retry for minutes."""

_ENDS: Mapping[type[Exception], StopReason] = {
    ContextLengthExceeded: StopReason.CONTEXT_LENGTH,
    ConversationRefused: StopReason.REFUSED,
    ResponseTooLarge: StopReason.LENGTH,
}
"""Errors that end a conversation after its first answer, and that are not failures of the server."""


_TIME_IS_UP = RequestRefusal("the rollout has ended: it has waited for the model for as long as it may")


class _Crowded(Exception):
    """Too many calls are waiting for their turn."""


class Gateway:
    """Answers the model calls of the programs in one slot. `serve` is the `Serve` of a forward.

    Each answer is sampled completely, and only then written, as a stream if the agent wants one. A request that is
    repeated while it is being answered, or because the answer was lost, gets the same answer. After temporary failures
    of the endpoint, the gateway retries. A permanent failure becomes a refusal with status 400, after which every agent
    ends.

    Args:
        server: answers the calls; the caller closes it. An `Upstream` gets the calls unchanged.
        task: `result` is filled after each answer, and `waiting` is entered while calls are sampled.
        settings: the model and how to sample. The agent's sampling settings only count if calls are passed on.
        conversations: distinguishes the agent's own conversation from others; None makes it from the task's messages.
        bounds: the limits for the slot.
        routes: handlers for other paths. Requests to them need the key, too.
    """

    def __init__(
        self,
        server: ChatServer | Upstream,
        task: AgentTask,
        settings: AgentSettings,
        *,
        conversations: Conversations | None = None,
        bounds: Bounds | None = None,
        routes: Mapping[str, Handle] = MappingProxyType({}),
    ) -> None:
        self.bounds = bounds or Bounds()
        self.key = secrets.token_urlsafe(24)
        """The key that a program must send to be answered. It is worth nothing outside of the slot, and after
        `aclose`."""
        self.failure: ModelError | None = None
        """Set if the endpoint failed. Then the rollout has no result, whatever the agent does afterwards."""
        self._over = asyncio.Event()
        self.last_call_failed = False
        """Whether the last call that may be the agent's own was refused or failed."""
        self.log: list[CallLog] = []
        self._counts: Counter[str] = Counter()
        self.conversations = conversations or Conversations(task_text(task.messages))
        self._sampling = Sampling(server, settings, task)
        self._routes = routes
        self._task = task
        self._model = settings.model or "model"
        self._work = TaskSet()
        self._answers: SingleFlight[WrittenAnswer | RequestRefusal] = SingleFlight(
            "a model call", keep=True, go_on=True
        )
        self._places = asyncio.Semaphore(self.bounds.concurrent)
        self._room = Room(2 * self.bounds.http.body_bytes)
        self._time = SharedTime(task, self._work)
        self._given: dict[str, GivenCall] = {}
        """The calls that agents were given, by the ids that agents got for them."""
        self._usage = Usage()
        self._waited_s = 0.0
        self._connections = self._waiting = self._number = self._kept_bytes = self._open_bytes = self._read_bytes = 0
        self._end: StopReason | None = None
        self._pace = ConnectionPace(self.bounds.at_once, self.bounds.a_second)
        self._reading = asyncio.Lock()
        """Held while a thread reads a long request, so that one slot keeps at most one thread busy."""
        self._characters = self._tokens = 0
        task.result.model = settings.model

    async def __aenter__(self) -> Gateway:
        """Return the gateway, which is closed at the end of the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the gateway."""
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse all further requests, and cancel the calls that are being sampled. Idempotent."""
        await self._work.aclose()

    @property
    def stop_reason(self) -> StopReason:
        """Return why the agent's own conversation has ended, as far as the gateway has seen it."""
        result = self._task.result
        if self.failure is not None:
            return StopReason.MODEL_ERROR
        if self.last_call_failed and self._end is not None:
            return self._end
        if not result.turns or result.turns[-1].message != len(result.messages) - 1:
            return StopReason.INTERRUPTED
        reason = result.turns[-1].stop_reason
        if reason == "content_filter":
            return StopReason.CONTENT_FILTER
        if reason == "length":
            return StopReason.LENGTH
        return StopReason.FINISHED if result.messages[-1]["content"].strip() else StopReason.EMPTY_RESPONSE

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of calls by their outcome, and by their place in their conversation."""
        return {**self._counts, **{str(place): count for place, count in self.conversations.places.items()}}

    async def while_it_answers(self, work: Coroutine[Any, Any, None]) -> None:
        """Await the agent's work. If the endpoint fails, the agent has `GRACE_S` seconds to end by itself.

        Raises:
            ModelError: the endpoint failed, and the work did not end.
        """
        async with together() as tasks:
            watch = tasks.create_task(self._give_up())
            await work
            watch.cancel()

    async def _give_up(self) -> None:
        await self._over.wait()
        await self._time.measure(asyncio.sleep(GRACE_S))  # a time limit would end the wait with a result
        assert self.failure is not None
        raise self.failure

    async def serve(self, connection: Connection) -> None:
        """Serve one connection of a program to its end.

        Raises:
            ConnectionError: an answer could not be completed.
        """
        if self._connections >= self.bounds.connections:
            self._counts["connections_refused"] += 1
            await self._pace.turn()
            await connection.finish()
            return
        self._connections += 1
        try:
            await self._pace.turn()
            await serve_http(connection, self._handle, self.bounds.http)
        except ConnectionError:
            raise
        except Exception as error:
            logger.warning("trajectory %s: a request broke the gateway", self._task.trajectory_id, exc_info=True)
            raise ConnectionResetError("the request can't be answered") from error
        finally:
            self._connections -= 1

    async def _handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        await self._pace.turn()
        named = exchange.path.rstrip("/")
        version = _VERSION.match(named)
        path = named[version.end() :] if version else named
        dialect, aim = _aim(exchange, path)
        if not path and exchange.method in ("HEAD", "GET"):
            await exchange.answer(200, b"{}", _JSON)
        elif not self._knows(exchange.headers):
            self._counts["wrong_key"] += 1
            await _refuse(exchange, dialect, RequestRefusal("the API key is not valid here", "key"))
        elif self._work.closing:
            await _refuse(exchange, dialect, RequestRefusal("the rollout has ended"))
        elif aim is not None and aim.counted is not None:
            await self._count_tokens(exchange, dialect, aim, aim.counted)
        elif aim is not None:
            await self._call(exchange, dialect, aim)
        elif path in self._routes:
            await self._routes[path](exchange)
        elif (path == "/models" or path.startswith("/models/")) and exchange.method in ("GET", "HEAD"):
            await exchange.answer(200, _bytes(dialect.models(self._model, one=path != "/models")), _JSON)
        else:
            self._counts["unknown_paths"] += 1
            unknown = f"there is no {exchange.method} {path[:_WORDS]} here"
            await _refuse(exchange, dialect, RequestRefusal(unknown, "unknown_path"))

    def _knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request has the key."""
        named = (_BEARER.sub("", headers.get(dialect.headers[0], "")).strip() for dialect in _DIALECTS)
        return any(hmac.compare_digest(each.encode("utf-8", "replace"), self.key.encode()) for each in named)

    async def _count_tokens(
        self, exchange: Exchange, dialect: Dialect, aim: Aim, counted: Callable[[int], dict[str, Any]]
    ) -> None:
        """Answer with an estimate of the prompt's tokens, from the endpoint's count for the last prompt."""
        request = await self._read(exchange, dialect, aim)
        if isinstance(request, RequestRefusal):
            await _refuse(exchange, dialect, request)
            return
        per_token = self._characters / self._tokens if self._tokens else _CHARACTERS_PER_TOKEN
        await exchange.answer(200, _bytes(counted(max(1, int(request.characters / per_token)))), _JSON)

    async def _read(self, exchange: Exchange, dialect: Dialect, aim: Aim) -> Request | RequestRefusal:
        """Return the request that was read, in which calls have the server's own ids; or a refusal."""
        if self._read_bytes >= self.bounds.read_bytes:
            return RequestRefusal("the rollout has ended: its requests were too long together")
        try:
            async with exchange.body(self._room) as body:
                self._read_bytes += len(body)
                passing = self._sampling.passing(exchange, dialect)
                read = partial(read_request, body, aim.said, dialect, self._given, passing)
                if len(body) <= _SHORT:
                    return read()
                async with self._reading:
                    return await asyncio.to_thread(read)
        except UnreadableRequest as refused:
            return RequestRefusal(refused.message, "too_large" if refused.status == 413 else "invalid")

    async def _call(self, exchange: Exchange, dialect: Dialect, aim: Aim) -> None:
        """Answer a model call."""
        request = await self._read(exchange, dialect, aim)
        if isinstance(request, RequestRefusal):
            nothing = ModelRequest()
            await self._refuse(self._note(exchange, dialect, nothing), exchange, dialect, request, nothing)
            return
        asked = request.asked
        call = self._note(exchange, dialect, asked)
        call.own, call.place = self.conversations.is_own(request.forms), self.conversations.place(request.forms)
        with self._open(request):
            outcome = await self._outcome(call, request, exchange, dialect)
        if isinstance(outcome, RequestRefusal):
            self._hear(call, request)
            await self._refuse(call, exchange, dialect, outcome, asked)
            return
        call.ended = time.time()
        call.outcome = "answered" if call.outcome == "open" else call.outcome
        call.stop_reason = outcome.reply.finish_reason
        self._counts[call.outcome] += 1
        if not asked.stream:
            await exchange.answer(200, outcome.written or _bytes(dialect.whole(outcome, asked)), _JSON)
        else:
            if not exchange.begun:
                await _begin(exchange, asked)
            await _send(exchange, outcome.written or dialect.stream(outcome, asked))
        call.delivered = True
        self._answers.kept.pop(request.digest, None)  # an agent that asks again has no use for this answer

    @contextmanager
    def _open(self, request: Request) -> Iterator[None]:
        """Count a request as open during the block. Its sampling may outlive its connection."""
        self._open_bytes += request.size
        try:
            yield
        finally:
            self._open_bytes -= request.size

    async def _outcome(
        self, call: CallLog, request: Request, exchange: Exchange, dialect: Dialect
    ) -> WrittenAnswer | RequestRefusal:
        """Wait for the answer or the refusal of a call, and return it. Meanwhile, keep the agent's stream alive.

        Raises:
            ConnectionError: the agent is gone. The sampling goes on, because the agent may repeat the request.
        """
        if (refusal := self._refuse_excess()) is not None:
            return refusal
        again = request.digest in self._answers.kept
        begun = False

        async def begin() -> WrittenAnswer | RequestRefusal:
            nonlocal begun
            begun = True
            with self._open(request):
                return await self._sample(call, request)

        waiter = asyncio.ensure_future(self._answers.get(self._work, begin, request.digest))
        try:
            pause_s = self.bounds.quiet_s
            while not (await asyncio.wait({waiter}, timeout=pause_s))[0]:
                if not request.asked.stream:
                    continue
                if not exchange.begun:
                    await _begin(exchange, request.asked)
                await exchange.send(dialect.keep_alive(request.asked))
                pause_s = self.bounds.keep_alive_s
            outcome = waiter.result()
        except BrokenOff:
            return RequestRefusal("the rollout has ended")
        except _Crowded:
            return RequestRefusal(f"more than {self.bounds.waiting} model calls are waiting")
        finally:
            if not waiter.done():
                await cancel([waiter])
        if again or not begun:
            call.outcome = "replayed"
        return outcome

    def _refuse_excess(self) -> RequestRefusal | None:
        """Return the refusal for a further call if the slot has reached a bound; else None."""
        bounds = self.bounds
        if self.failure is not None:
            return RequestRefusal("the rollout has ended: its model can't be reached")
        if self._end is StopReason.TIME_LIMIT:
            return _TIME_IS_UP
        if self._number > bounds.calls:
            self._end = StopReason.MAX_TURNS
            return RequestRefusal(f"the rollout has ended: it had {bounds.calls} model calls")
        used = self._usage.prompt_tokens + self._usage.completion_tokens
        if bounds.tokens is not None and used >= bounds.tokens:
            self._end = StopReason.MAX_TURNS
            return RequestRefusal(f"the rollout has ended: it had {used} tokens")
        if self._kept_bytes >= bounds.kept_bytes:
            self._end = StopReason.MAX_TURNS
            return RequestRefusal("the rollout has ended: its conversations are too long")
        if self._open_bytes > bounds.open_bytes:
            return RequestRefusal("the requests that are being answered are too long together")
        return None

    async def _sample(self, call: CallLog, request: Request) -> WrittenAnswer | RequestRefusal:
        """Have the server answer, and record the answer or the failure.

        Raises:
            _Crowded: too many calls are waiting already.
        """
        if self._places.locked() and self._waiting >= self.bounds.waiting:
            raise _Crowded
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            with count_waits() as waits:
                try:
                    reply, written = await self._time.measure(self._sampling.ask(request, call.number + 1))
                finally:
                    self._note_wait(call, sum(waits, 0.0))
            return self._record(call, request, reply, written)
        except Exception as error:
            return self._record_failure(call, error)
        finally:
            self._places.release()

    def _note_wait(self, call: CallLog, seconds: float) -> None:
        call.waited_s = round(seconds, 6)
        if call.own:
            self._waited_s += seconds
            self._task.result.waited_s = self._waited_s

    def _record(self, call: CallLog, request: Request, reply: ModelReply, written: bytes | None) -> WrittenAnswer:
        """Add an answer to the record, and return it in the form for the agent."""
        asked = request.asked
        answer = WrittenAnswer(secrets.token_hex(12), int(time.time()), self._model, reply, written)
        for index, made in enumerate(reply.calls):
            self._given[answer.call_id(index)] = GivenCall(len(self._given), made)
        call.prompt_tokens, call.completion_tokens = reply.prompt_tokens, reply.completion_tokens
        cost = self._sampling.cost(reply)
        self._usage.add(Usage(1, reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens or 0, cost))
        about = {
            "started": call.started,
            "ended": time.time(),
            "model": reply.model or self._task.result.model,
            "waited_s": call.waited_s,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "cached_tokens": reply.cached_tokens,
            "reasoning_tokens": reply.reasoning_tokens,
            "cost": cost,
            "sampling": reply.sampling or {},
            "stop_reason": reply.finish_reason,
            "weight_version": reply.weight_version,
            "parts": reply.parts,
        }
        offered = frozenset(tool["function"]["name"] for tool in asked.tools)
        valid = sum(made.error is None and not made.repaired and made.name in offered for made in reply.calls)
        sampled = AnswerDetails(call.number, offered, about, valid, asked.tools, reply.number)
        call.place = self.conversations.add(
            *(asked.messages, request.forms, reply.as_message(), sampled),
            heard_at=call.started,
            failed=frozenset(asked.failed),
        )
        if self.conversations.ends_with(call.number):  # and not with a summary, after which it may fail
            self.last_call_failed = False
        self._kept_bytes += 0 if call.place == "continues" else request.size
        if reply.prompt_tokens:
            self._characters, self._tokens = request.characters, reply.prompt_tokens
        self._fill_result()
        return answer

    def _hear(self, call: CallLog, request: Request) -> None:
        """Record the results of the agent's own tool calls that are in a request without an answer."""
        if call.own and call.place == "continues" and self._kept_bytes < self.bounds.kept_bytes:
            self._kept_bytes += request.size
            failed = frozenset(request.asked.failed)
            self.conversations.hear(request.asked.messages, request.forms, heard_at=call.started, failed=failed)
            self._fill_result()

    def _fill_result(self) -> None:
        result = self._task.result
        self.conversations.fill(result)
        result.usage = replace(self._usage)
        result.managed_state = self._sampling.managed_state()

    def _record_failure(self, call: CallLog, error: Exception) -> RequestRefusal:
        """Record why a call failed, and return the refusal for the agent.

        After the conversation's first answer, an error that the model can cause with its own text is no failure of the
        endpoint. Otherwise, a model could have its bad rollouts discarded.
        """
        call.outcome = "failed"
        begun = bool(self._task.result.turns_used)
        if begun and error is self._time.up and 2 * self._waited_s < self._time.seconds:
            self._end = StopReason.TIME_LIMIT  # the program itself made so many calls
            return _TIME_IS_UP
        if isinstance(error, UsageError):
            failure: ModelError = ConversationRefused(error.message, hint=error.hint)
        elif isinstance(error, RecursionError):
            failure = ConversationRefused("the conversation is nested too deeply to be sent")
        else:
            failure = as_model_error(error)
        if not isinstance(error, ModelError | UsageError):
            logger.warning("trajectory %s: a model call failed", self._task.trajectory_id, exc_info=error)
        end = next((reason for kind, reason in _ENDS.items() if isinstance(failure, kind)), None)
        # If the endpoint fails for other calls, too, the agent's next call shows it.
        others = begun and not call.own and not isinstance(failure, EndpointDown)
        if not others and (end is None or (call.own and not begun)):
            self._fail(failure)
        elif call.own:
            self._end = end
        if isinstance(failure, ContextLengthExceeded):
            return RequestRefusal("the conversation has more tokens than the model takes", "too_long")
        return RequestRefusal(
            "the model can't answer this conversation" if end or others else "the model can't be reached"
        )

    def _fail(self, failure: ModelError) -> None:
        if self.failure is None:
            failure.result = self._task.result
            failure.trajectory_id = failure.trajectory_id or self._task.trajectory_id
            self._task.result.stop(StopReason.MODEL_ERROR)
            self.failure = failure
            self._over.set()

    def _note(self, exchange: Exchange, dialect: Dialect, asked: ModelRequest) -> CallLog:
        """Begin a call's entry in the log."""
        self._number += 1
        self._counts["calls"] += 1
        overridden = self._sampling.overridden(asked)
        call = CallLog(
            number=self._number - 1,
            dialect=dialect.name,
            path=exchange.path[:_WORDS],
            model=asked.model[:_WORDS] if asked.model else None,
            streamed=asked.stream,
            started=time.time(),
            overridden=overridden,
            dropped_tools=[each[:_WORDS] for each in asked.dropped[:32]],
            unknown=dict(asked.unknown.most_common(32)),
        )
        self._counts["overridden"] += len(overridden)
        self._counts["dropped_tools"] += len(asked.dropped)
        self._counts["unknown_blocks"] += asked.unknown.total()
        if len(self.log) < _LOGGED:
            self.log.append(call)
        return call

    async def _refuse(
        self, call: CallLog, exchange: Exchange, dialect: Dialect, refusal: RequestRefusal, asked: ModelRequest
    ) -> None:
        """Refuse a model call permanently, and record the refusal."""
        call.ended, call.refusal = time.time(), refusal.message
        call.outcome = "failed" if call.outcome == "failed" else "refused"
        self._counts[call.outcome] += 1
        self.last_call_failed = self.last_call_failed or call.own
        if exchange.begun:
            await _send(exchange, dialect.late_refusal(refusal, asked))
        else:
            await _refuse(exchange, dialect, refusal)
        call.delivered = True


def _aim(exchange: Exchange, path: str) -> tuple[Dialect, Aim | None]:
    """Return the dialect of a request, and the aim of its address, which is None if the request is no model call."""
    if exchange.method == "POST":
        for dialect in _DIALECTS:
            if (aim := dialect.aim(path, exchange.query)) is not None:
                return dialect, aim
    marked = (dialect for dialect in _DIALECTS if not exchange.headers.keys().isdisjoint(dialect.headers))
    return next(marked, _CHAT), None


async def _begin(exchange: Exchange, asked: ModelRequest) -> None:
    await exchange.begin({"content-type": asked.stream_type, "cache-control": "no-cache"})


async def _refuse(exchange: Exchange, dialect: Dialect, refusal: RequestRefusal) -> None:
    await exchange.answer(refusal.status, _bytes(dialect.refusal(refusal)), {**_JSON, **_FOR_GOOD})


async def _send(exchange: Exchange, stream: bytes) -> None:
    for begin in range(0, len(stream), _PIECE):
        await exchange.send(stream[begin : begin + _PIECE])
    await exchange.end()


def _bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
