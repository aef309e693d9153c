"""Agents that speak the Agent Client Protocol (ACP): programs in the slot that the driver prompts over their standard
streams."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from hermes_agents.program import CommandAgent, CommandSettings, RunningProgram, prompt_of
from hermes_core import (
    AgentTask,
    Flooded,
    HermesError,
    LineCutter,
    ProgramEnded,
    SetupFailed,
    SlotCommands,
    SlotProgram,
    StopReason,
    __version__,
    alongside,
)
from hermes_core.agents.replies import sayable

VERSION = 1
"""The version of the protocol."""

MAX_LINES = 300_000
MAX_BYTES = 1 << 30
"""Maximum number of lines, and of bytes, that a program may write."""

MAX_LINE = 16 << 20
"""Maximum number of bytes of one line."""

MAX_READ = 4 << 20
MAX_OBJECTS = 30_000
"""Maximum number of bytes, and of objects and lists, of a line that is parsed. Longer lines only repeat the output of a
command, and parsing them would block the event loop."""

CANCEL_S = 2.0
"""Seconds that a program has to stop after `session/cancel`."""

_WORDS = 300
_KINDS = 32
_METHOD_NOT_FOUND = -32601
_ALLOWING = ("allow_always", "allow_once")

_STOPS = {
    "end_turn": StopReason.FINISHED,
    "max_tokens": StopReason.LENGTH,
    "max_turn_requests": StopReason.MAX_TURNS,
    "refusal": StopReason.CONTENT_FILTER,
}
"""Our stop reason for each stop reason of ACP. It is used if the driver itself has seen no end of the conversation."""


class AcpFailed(Exception):
    """The program refused a request, or no longer answers. The message says what the program did."""


class Peer:
    """Speaks JSON-RPC 2.0 with a program, one message on each line, while `receive` runs.

    A request for permission is granted. All other requests of the program are refused, and its notifications are only
    counted.

    Args:
        counts: counts the updates of each kind, the requests, and the useless lines.
    """

    def __init__(self, program: SlotProgram, counts: Counter[str]) -> None:
        self.junk = ""
        """The beginning of the first line that is no message."""
        self.read_bytes = 0
        self.cancelled = False
        """Whether the session was cancelled, so that no further permission is granted."""
        self._program = program
        self._counts = counts
        self._lines = LineCutter(MAX_LINE)
        self._read_lines = 0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._over: Exception | None = None

    async def receive(self) -> None:
        """Handle the program's messages until the program ends. Then requests without an answer fail."""
        over: Exception = AcpFailed("ended")
        try:
            while data := await self._program.read():
                await self._feed(data)
        except Flooded as error:
            over = AcpFailed(f"wrote too much: {error}")
        except ProgramEnded:
            pass
        except Exception as error:  # an error in our code must not look like an error of the program
            over = error
        finally:
            self._over = over
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(over)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request, and return its answer. There is no time limit: the wait ends when the program ends.

        Raises:
            AcpFailed: the program refused the request, or has ended.
        """
        if self._over is not None:
            raise self._over
        number = next(self._numbers)
        self._waiting[number] = waiting = asyncio.get_running_loop().create_future()
        try:
            await self.send(id=number, method=method, params=params)
            answer = await waiting
        except ProgramEnded:
            raise AcpFailed("ended") from None
        finally:
            del self._waiting[number]
        if (error := answer.get("error")) is not None:
            said = error.get("message") if isinstance(error, dict) else error
            raise AcpFailed(f"refused {method}: {_words(said)}")
        result = answer.get("result")
        return result if isinstance(result, dict) else {}

    async def send(self, **message: Any) -> None:
        """Write a message, and wait while the program does not read.

        Raises:
            ProgramEnded: the program has ended.
        """
        await self._program.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def _feed(self, data: bytes) -> None:
        lines = self._lines.feed(data)
        self.read_bytes += len(data)
        self._read_lines += len(lines)
        if self._read_lines > MAX_LINES or self.read_bytes > MAX_BYTES:
            raise Flooded(f"more than {MAX_LINES} lines or {MAX_BYTES >> 20} MiB")
        for line in lines:
            if line.strip():
                await self._take(line)

    async def _take(self, line: bytes) -> None:
        """Handle one line: an answer, a request, or a notification."""
        message = _message(line)
        if message is None:
            self._counts["not_read"] += 1
            self.junk = self.junk or _words(line[:_WORDS].decode("utf-8", "replace"))
            return
        method, number = message.get("method"), message.get("id")
        if not isinstance(method, str):
            waiting = self._waiting.get(number) if type(number) is int else None
            if waiting is None or waiting.done():
                self._counts["not_asked"] += 1
            else:
                waiting.set_result(message)
        elif "id" in message:
            self._counts["requests"] += 1
            await self.send(id=number, **self._reply(method, _object(message.get("params"))))
        else:
            kind = _object(_object(message.get("params")).get("update")).get("sessionUpdate")
            kind = kind[:_KINDS] if isinstance(kind, str) else "other"
            self._counts[kind if kind in self._counts or len(self._counts) < _KINDS else "other"] += 1

    def _reply(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request of the program."""
        if method != "session/request_permission":
            return {"error": {"code": _METHOD_NOT_FOUND, "message": "Method not found"}}
        options = params.get("options")
        offered = [each for each in options if isinstance(each, dict)] if isinstance(options, list) else []
        by_kind = {each["kind"]: each for each in reversed(offered) if isinstance(each.get("kind"), str)}
        chosen = next((by_kind[kind] for kind in _ALLOWING if kind in by_kind), offered[0] if offered else None)
        if chosen is None or self.cancelled:
            return {"result": {"outcome": {"outcome": "cancelled"}}}
        return {"result": {"outcome": {"outcome": "selected", "optionId": chosen.get("optionId")}}}


class AcpSettings(CommandSettings):
    """Settings of the agent `acp`."""

    command: str = ""
    """Command line that starts the program, such as `my-agent acp`. It is split into words like a shell's and not run
    by one; `{model}`, `{url}`, `{key}` and `{folder}` (a place for its own files) are replaced."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """Time limit in seconds for the start of the program, until it has opened a session."""
    auth_method: str | None = None
    """The way to authenticate that the program is told, by its name for it. None tells it none."""


@dataclass
class _Session:
    """The state of a session. It is kept when the program ends, because the program may be started again."""

    cwd: str
    id: str = ""
    loadable: bool = False
    """Whether the program can load the session when it is started again."""
    agent: str = ""
    """The name that the program gives itself."""
    stops: list[str] = field(default_factory=list)
    """The stop reasons that the program has named."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of the program's messages, by kind."""


class AcpAgent(CommandAgent):
    """Runs any program that speaks the Agent Client Protocol. The user's later messages go to the same session.

    If an environment ends the slot's processes between two messages, the program is started again and loads its
    session. If the program can't load sessions, the user's further messages are left out.
    """

    config_class = AcpSettings
    called = "acp"
    settings: AcpSettings

    async def work(self, running: RunningProgram, task: AgentTask, prompt: str) -> None:
        """Prompt the program with the task, and then with each further message of the user.

        Raises:
            CommandError, SetupFailed: the program can't be run, or failed before its first model call.
            ModelError: the model failed.
        """
        session = _Session(await _directory(running.slot.commands))
        said: str | None = prompt
        while said is not None and (not session.id or session.loadable):
            said = await self._talk(running, task, session, said)

    async def _talk(self, running: RunningProgram, task: AgentTask, session: _Session, said: str) -> str | None:
        """Run the program until the user has no further message, and return None. If the program was ended before it
        got a message of the user, return this message.

        Raises:
            CommandError, SetupFailed, ModelError: as by `work`.
        """
        program, calls = SlotProgram(running.slot.commands), running.calls
        peer, failed, left = Peer(program, session.counts), None, None
        async with running.prepare(running.program.argv, said) as (line, env, url):
            try:
                async with program.run(line, env), alongside(peer.receive()):
                    try:
                        await self._open(peer, session, _mcp_servers(running, url))
                        while True:
                            calls = running.calls
                            await self._prompt(running, peer, session, said)
                            if (left := await _next(running, task)) is None:
                                break
                            said = left
                    except AcpFailed as error:
                        failed = str(error)
            finally:
                output = _tell(running, program, peer, session)
        done = program.result
        if failed is None:
            return None
        if failed == "ended" and left is not None and running.calls == calls:
            return left
        failed = f"ended with {done.returncode}" if failed == "ended" and done is not None else failed
        running.check(failed, output, begun=bool(session.id))
        running.result.stop(running.stop_reason(StopReason.PROGRAM_FAILED, since=calls))
        return None

    async def _open(self, peer: Peer, session: _Session, servers: Sequence[Mapping[str, Any]]) -> None:
        """Open a session, or, after a restart of the program, load the earlier one.

        Args:
            servers: the MCP servers that the session is to use.

        Raises:
            AcpFailed: the program refused, or has ended.
        """
        capabilities = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
        client = {"name": "hermes-rl", "version": __version__}
        place = {"cwd": session.cwd, "mcpServers": servers}
        told: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                told = await peer.call(
                    "initialize", protocolVersion=VERSION, clientCapabilities=capabilities, clientInfo=client
                )
                if told.get("protocolVersion") != VERSION:
                    raise AcpFailed(f"speaks version {_words(told.get('protocolVersion'))} of ACP, and not {VERSION},")
                able = _object(told.get("agentCapabilities"))
                session.loadable = able.get("loadSession") is True
                if servers and _object(able.get("mcpCapabilities")).get("http") is not True:
                    raise AcpFailed("takes no MCP servers over HTTP, and the rollout has some, so it was not started:")
                about = _object(told.get("agentInfo"))
                session.agent = _words(f"{about.get('name', '')} {about.get('version', '')}".strip())
                if self.settings.auth_method is not None:
                    await peer.call("authenticate", methodId=self.settings.auth_method)
                if session.id:
                    await peer.call("session/load", sessionId=session.id, **place)
                    return
                opened = (await peer.call("session/new", **place)).get("sessionId")
        except AcpFailed as error:
            ways = told.get("authMethods") if self.settings.auth_method is None else None
            names = [_words(_object(way).get("id")) for way in ways] if isinstance(ways, list) else []
            raise AcpFailed(f"{error} (auth_method can be {', '.join(names)})" if names else str(error)) from None
        except TimeoutError:
            raise AcpFailed(f"was not ready within {self.settings.start_timeout_s:g} s,") from None
        if not isinstance(opened, str) or not opened:
            raise AcpFailed("opened a session without a name")
        session.id = opened

    async def _prompt(self, running: RunningProgram, peer: Peer, session: _Session, text: str) -> None:
        """Give the program a prompt, and note why it stopped. When its time is up, it gets the message to stop.

        Raises:
            AcpFailed: the program gave no answer.
            ModelError: the model failed.
        """
        calls = running.calls
        prompt = [{"type": "text", "text": text}]
        async with alongside(peer.call("session/prompt", sessionId=session.id, prompt=prompt)) as answer:
            try:
                await asyncio.wait([answer])
            except asyncio.CancelledError:
                peer.cancelled = True
                with suppress(TimeoutError, ProgramEnded, HermesError):
                    async with asyncio.timeout(CANCEL_S):
                        await peer.send(method="session/cancel", params={"sessionId": session.id})
                        await running.gateway.aclose()
                        await asyncio.wait([answer])
                if answer.done() and answer.exception() is None:
                    session.stops.append(_words(answer.result().get("stopReason")))
                raise
            stop = _words((await answer).get("stopReason"))
        session.stops.append(stop)
        running.check(None, "")
        running.result.stop(running.stop_reason(_STOPS.get(stop, StopReason.PROGRAM_FAILED), since=calls))


def _mcp_servers(running: RunningProgram, url: str) -> list[dict[str, Any]]:
    """Return the rollout's MCP servers in the form of the protocol."""
    headers = [{"name": "Authorization", "value": f"Bearer {running.gateway.key}"}]
    return [{"type": "http", "name": name, "url": f"{url}/mcp/{name}", "headers": headers} for name in running.servers]


async def _next(running: RunningProgram, task: AgentTask) -> str | None:
    """Return the text of the user's next message; None if the model was not done, or the user has no further
    message."""
    if running.result.stop_reason is not StopReason.FINISHED:
        return None
    message = await task.follow_up()
    return None if message is None else prompt_of([message])


def _tell(running: RunningProgram, program: SlotProgram, peer: Peer, session: _Session) -> str:
    """Record how the program ended, and return the end of its standard error."""
    done = None
    with suppress(HermesError):  # raised elsewhere, unless another error is already being raised
        done = program.result
    output = sayable(done.error_text) if done is not None else ""
    if peer.junk:
        output = f"{output}\nits standard output is not only ACP: {peer.junk}".strip()
    about = {"agent": session.agent, "stop_reasons": session.stops[-_KINDS:], "messages": dict(session.counts)}
    running.tell(done, output, peer.read_bytes, acp=about)
    return output


async def _directory(commands: SlotCommands) -> str:
    """Return the directory in which commands start.

    Raises:
        SetupFailed: the directory can't be found out.
    """
    told = await commands.run(["pwd"])
    if not told.ok:
        raise SetupFailed(f"the slot can't run pwd: {told.error_text.strip()[-_WORDS:]}")
    return told.text.rstrip("\n")


def _message(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line has none, or is too large to be parsed on the event loop."""
    if len(line) > MAX_READ or line.count(b"{") + line.count(b"[") > MAX_OBJECTS:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _words(value: Any) -> str:
    """Return a value that the program sent as a short text."""
    return sayable(value if isinstance(value, str) else repr(value))[:_WORDS]
