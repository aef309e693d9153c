"""The hosts: one shared connection to each, and a pool that spreads sandboxes over them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import MAGIC_NUMBER
from typing import Any

from hermes_core import (
    BlockingStreamChannel,
    BrokenOff,
    Channel,
    ChannelLost,
    HermesError,
    InfraError,
    PolicyError,
    ProvisionError,
    SingleFlight,
    TaskSet,
    begin_thread,
    call_in,
)
from hermes_core.sandbox.remote import program
from hermes_core.sandbox.remote.host import RemoteHost
from hermes_ssh.config import Access, SshConfig
from hermes_ssh.connect import HostConnection, HostSession, Secret, SessionRefused, Unreachable, connect
from hermes_ssh.threads import in_thread

log = logging.getLogger(__name__)

_PLACE = "/var/tmp/hermes-rl-ssh"
_LONGEST_ASIDE_S = 600.0
_NO_PYTHON = (5, 126, 127)
_TRIES = 4
_PAUSES_S = (0.1, 0.4, 1.6)
"""Seconds before the second, the third and the fourth attempt of a request."""


class Host(RemoteHost):
    """A host and the connections to it: one, unless more sessions are needed than MaxSessions of the server allows."""

    def __init__(self, access: Access, secret: Secret) -> None:
        self.access = access
        self.name = access.host
        self.sandboxes: set[str] = set()
        """The creation ids of our sandboxes that run there or are being made."""
        self.packages: list[str] | None = None
        """The package directories of the host's Pythons, as the host reports them."""
        self.aside_until = 0.0
        """Until this time of the monotonic clock, other hosts are preferred."""
        self._failures = 0
        self._reached = False
        """Whether the host was ever reached. If so, a failure to reach it may be temporary."""
        self._same_bytecode: bool | None = None
        """Whether the host's Python takes the bytecode of ours; None if that is not known."""
        self._secret = secret
        self._connections: list[HostConnection] = []
        self._work = TaskSet()
        self._dialling: SingleFlight[None] = SingleFlight("the connection to the host")

    def set_aside(self, seconds: float) -> None:
        """Prefer other hosts for a while, because this one failed. Each failure in a row doubles the time."""
        self.aside_until = time.monotonic() + min(seconds * 2**self._failures, _LONGEST_ASIDE_S)
        self._failures += 1

    def clear_failures(self) -> None:
        """Forget the host's failures, because it has just made a sandbox."""
        self.aside_until, self._failures = 0.0, 0

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to our program on the host, and return the answer.

        If the connection is cut or dropped, the request is sent again, as all requests are idempotent.

        Raises:
            PolicyError, ConfigError, ProvisionError: the host refuses; the message has the reason.
            Unreachable, HostKeyError, LoginRefused: there is no connection.
            ChannelLost: the connection was cut; the request may have been carried out.
        """
        cut: ChannelLost | None = None
        pauses = iter(_PAUSES_S)
        while True:
            try:
                return await self._ask_once(request)
            except (ChannelLost, Unreachable) as error:
                if isinstance(error, ChannelLost):
                    cut = error
                again = isinstance(error, ChannelLost) or error.dropped
                pause_s = next(pauses, None) if again else None
                if pause_s is None:
                    if cut is None or cut is error:
                        raise
                    raise ChannelLost(f"{cut.message}, and then: {error.message}", hint=error.hint) from error
                log.info("host %s: asking again: %s", self.name, error.message)
            await asyncio.sleep(pause_s)

    async def _ask_once(self, request: Mapping[str, Any]) -> dict[str, Any]:
        value = await super().ask(request)
        self._same_bytecode = value.pop("magic", None) == MAGIC_NUMBER.hex()
        return value

    async def open(self, request: Mapping[str, Any]) -> BlockingStreamChannel:
        """Start our program on the host with a request, and return the channel to it. Raises as `ask` does."""
        session, connection = await self._session()
        over = functools.partial(self._note_end, connection, asyncio.get_running_loop())
        channel = BlockingStreamChannel(
            session.read, session.write, close=lambda: _close(session, over), wait=session.wait
        )
        session.carry_stderr(channel.feed_stderr)
        try:
            arguments = {**request, "directory": self.access.directory, "usual": _PLACE}
            await channel.write(program.message(arguments, self._same_bytecode))
        except ChannelLost:
            pass  # either the program has ended already, or the connection was cut: the reader of its output will see
        except BaseException:
            await channel.aclose()
            raise
        return channel

    async def enter(self, sandbox_id: str, argv: Sequence[str], env: Mapping[str, str]) -> Channel:
        """Start a program in a sandbox, and return the channel to it.

        Raises:
            SandboxLost: the sandbox does not exist any more.
            ChannelLost: the host can't be reached.
        """
        try:
            return await super().enter(sandbox_id, argv, env)
        except Unreachable as error:
            raise ChannelLost(error.message, hint=error.hint, sandbox_id=f"{self.name}/{sandbox_id}") from error

    async def aclose(self) -> None:
        """Close the connections. Programs on the host go on."""
        await self._work.aclose()
        connections, self._connections = self._connections, []
        for connection in connections:
            await asyncio.to_thread(connection.close)

    # --- connections ------------------------------------------------------------------------------------------------

    async def _session(self) -> tuple[HostSession, HostConnection]:
        command = program.command_line(self.access.python)
        for _ in range(_TRIES):
            connection = await self._with_room()
            try:
                session = await in_thread(functools.partial(connection.start, command), HostSession.close)
            except SessionRefused as error:
                self._release(connection)
                self._note_refusal(connection, error)
            except Unreachable:  # the connection was dead, and nobody had noticed: try another one
                self._release(connection)
            except BaseException:
                self._release(connection)
                raise
            else:
                connection.proved = True
                return session, connection
        raise Unreachable(f"host {self.name!r} opens no session, tried {_TRIES} times")

    def _note_refusal(self, connection: HostConnection, error: SessionRefused) -> None:
        """Use the connection for no more sessions than it has, or close it if it has none.

        Raises:
            ProvisionError: the server refuses the first session of a connection.
        """
        if not connection.proved:
            raise ProvisionError(
                f"host {self.name!r} allows no session: {error}",
                hint="the server's MaxSessions stands in the way, or what the account may do",
                retryable=False,
            ) from error
        if connection.sessions:
            connection.room = min(connection.room, connection.sessions)
            log.debug("host %s allows %d sessions in one connection", self.name, connection.room)
        elif connection in self._connections:  # the server still counts sessions whose end it has not noticed
            self._connections.remove(connection)
            _close_apart(connection)

    async def _with_room(self) -> HostConnection:
        """Return a connection with room for another session, and count that session."""
        while True:
            self._connections = [each for each in self._connections if each.alive]
            for connection in self._connections:
                if connection.sessions < connection.room:
                    connection.sessions += 1
                    return connection
            try:
                await self._dialling.get(self._work, self._dial)
            except BrokenOff as error:
                raise Unreachable(f"the connection to host {self.name!r} was closed") from error

    async def _dial(self) -> None:
        """Make another connection."""
        try:
            connection = await in_thread(functools.partial(connect, self.access, self._secret), HostConnection.close)
        except Unreachable as error:
            error.retryable = self._reached
            raise
        self._reached = True
        self._connections.append(connection)

    def _note_end(self, connection: HostConnection, loop: asyncio.AbstractEventLoop) -> None:
        """Release a session that has ended. Called in a thread of its own."""
        call_in(loop, self._release, connection)

    def _release(self, connection: HostConnection) -> None:
        connection.sessions -= 1
        spare = connection in self._connections[1:]
        if not connection.sessions and spare:
            self._connections.remove(connection)
            _close_apart(connection)

    def explain_silence(self, status: int, words: str) -> HermesError:
        """Return the error for a host that can't run our program."""
        self._same_bytecode = None  # the host may have another Python by now
        return ProvisionError(
            f"host {self.name!r} can't run our program with {self.access.python!r}: "
            f"exit status {status}: {words[-1000:]}",
            hint="it needs Python 3.7 or newer, which the setting `python` can name",
            retryable=status not in _NO_PYTHON,
        )


def _close_apart(connection: HostConnection) -> None:
    begin_thread(connection.close, "ssh-close")


def _close(session: HostSession, over: Callable[[], object]) -> None:
    try:
        session.close()
    finally:
        over()


class HostPool:
    """All hosts that a backend uses."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._hosts: dict[Access, Host] = {}
        self._placed: dict[str, Host] = {}

    def hosts(self) -> list[Host]:
        """Return the hosts of all profiles that were used so far."""
        return list(self._hosts.values())

    def of(self, config: SshConfig) -> list[Host]:
        """Return the hosts of a profile."""
        found = []
        for name in config.all_hosts:
            access = config.access(name)
            if access not in self._hosts:
                self._hosts[access] = Host(access, self._secret)
            found.append(self._hosts[access])
        return found

    def candidates(self, config: SshConfig, creation_id: str) -> Iterable[Host]:
        """Return the hosts for a new sandbox, best first: the host of the last attempt, then the others from the least
        loaded on, and at the end the hosts that are set aside."""
        now = time.monotonic()
        last = self._placed.get(creation_id)

        def rank(host: Host) -> tuple[bool, bool, float, int]:
            aside = host.aside_until > now
            return host is not last, aside, host.aside_until if aside else 0.0, len(host.sandboxes)

        return sorted(self.of(config), key=rank)

    async def place(
        self, config: SshConfig, creation_id: str, request: Mapping[str, Any]
    ) -> tuple[Host, dict[str, Any]]:
        """Make a sandbox on one of the profile's hosts. Return that host and its answer.

        Raises:
            InfraError, PolicyError, ConfigError: no host could make it; the message has the reasons.
        """
        failures: list[HermesError] = []
        for host in self.candidates(config, creation_id):
            host.sandboxes.add(creation_id)
            self._placed[creation_id] = host
            try:
                answer = await host.ask({**request, "packages": host.packages})
            except BaseException as error:
                host.sandboxes.discard(creation_id)
                if not isinstance(error, HermesError):
                    raise
                host.set_aside(config.retry_host_after_s)
                if isinstance(error, ChannelLost):  # the sandbox may exist, and the next attempt must find it there
                    raise
                log.warning("host %s is set aside: %s", host.name, error)
                failures.append(error)
                continue
            host.clear_failures()
            host.packages = answer["packages"]
            return host, answer
        self._placed.pop(creation_id, None)
        raise _combine(failures)

    def forget(self, host: Host, creation_id: str) -> None:
        """Remove a sandbox that has ended from the host's load."""
        host.sandboxes.discard(creation_id)
        self._placed.pop(creation_id, None)

    async def aclose(self) -> None:
        """Close every connection."""
        for host in self.hosts():
            await host.aclose()


def _combine(failures: list[HermesError]) -> HermesError:
    """Return one error for the failures of all hosts."""
    if len(failures) == 1:
        return failures[0]
    text = "no host can have the sandbox: " + "; ".join(str(error) for error in failures)
    if all(isinstance(error, PolicyError) for error in failures):
        return PolicyError(text)
    passes = any(isinstance(each, InfraError) and each.retryable for each in failures)
    error = ProvisionError(text, retryable=passes)
    error.__cause__ = ExceptionGroup("the hosts", failures)
    return error
