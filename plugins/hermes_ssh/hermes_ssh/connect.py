"""Makes connections hop by hop. Every host key is verified, and only the configured ways to log in are tried."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko

from hermes_core import ConfigError, ProvisionError, begin_thread
from hermes_ssh.config import Access
from hermes_ssh.known_hosts import HostKeyError, KnownHosts
from hermes_ssh.routes import Hop, route

log = logging.getLogger(__name__)
# paramiko logs a traceback at level ERROR when a connection is lost. We log one line ourselves.
logging.getLogger(f"{__name__}.paramiko").setLevel(logging.CRITICAL)

_STDERR_BYTES = 1 << 15
_CLOSE_S = 2.0
_LAST_WORDS_S = 0.25

Secret = Callable[[str], str]
"""Returns the value of a secret by its name."""


_DROPPED = (EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""The errors of a connection that the server ended."""


class Unreachable(ProvisionError):
    """A host, or a host on the route to it, could not be reached, or dropped the connection while it was being made."""

    dropped = False
    """Whether the server dropped the connection, as a busy one does. Then another attempt may succeed."""


class LoginRefused(ProvisionError):
    """A host refuses the login with our credentials."""

    retryable = False


class SessionRefused(Exception):
    """The server allows no more sessions in this connection."""


class HostConnection:
    """A logged-in connection to a host. Blocking; owned by a `Host`.

    Every `keepalive_s` seconds it sends a keep-alive, and closes if the answer has not come before the next is due.
    """

    def __init__(self, transports: Sequence[paramiko.Transport], processes: Sequence[Any], access: Access) -> None:
        self._transport = transports[-1]
        self._transports = transports
        self._processes = processes
        self._interval_s = access.keepalive_s
        self._closed = threading.Event()
        self._opening = threading.Lock()  # paramiko keeps one error for all channels that are being opened
        self.sessions = 0
        """Number of sessions that are open or being opened."""
        self.proved = False
        """Whether the server has ever opened a session in this connection."""
        self.room = access.max_sessions
        """Maximum number of sessions."""
        begin_thread(self._watch, "ssh-keepalive")

    @property
    def alive(self) -> bool:
        """Return whether the connection still works, as far as we know."""
        return self._transport.is_active() and not self._closed.is_set()

    def start(self, command: str) -> HostSession:
        """Run a command on the host.

        Raises:
            SessionRefused: the server allows no more sessions.
            Unreachable: the connection is dead.
        """
        try:
            with self._opening:
                channel = self._transport.open_session(timeout=2 * self._interval_s + 1)
        except paramiko.ChannelException as error:
            raise SessionRefused(str(error)) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            self.close()
            raise Unreachable(f"the connection is lost: {error or type(error).__name__}") from error
        try:
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            if self._answers():  # a connection that was cut just now raises the same errors as a refusal
                raise SessionRefused(str(error)) from error
            raise Unreachable(f"the connection is lost: {error or type(error).__name__}") from error
        return HostSession(channel, self)

    def close(self) -> None:
        """Close the connection with all of its sessions. Idempotent."""
        self._closed.set()
        _close_all(self._transports, self._processes)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s) and self._transport.is_active():
            with _or_else(self.close, self._interval_s):
                self._answers()
        self.close()

    def _answers(self) -> bool:
        """Wait for the server's answer to a keep-alive, or for the connection's end. Return whether it answered."""
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._transport.global_request("keepalive@openssh.com", wait=True)
        return self.alive


@contextlib.contextmanager
def _or_else(give_up: Callable[[], object], limit_s: float) -> Iterator[None]:
    """Call `give_up` if the block takes longer than `limit_s` seconds. `give_up` must end the blocking call there."""
    over = threading.Event()
    begin_thread(lambda: over.wait(limit_s) or give_up(), "ssh-overdue")
    try:
        yield
    finally:
        over.set()


class HostSession:
    """A program on the host, with the blocking calls that `BlockingStreamChannel` takes."""

    def __init__(self, channel: paramiko.Channel, connection: HostConnection) -> None:
        self._channel = channel
        self._connection = connection
        self._stderr_ended = threading.Event()

    def read(self, n: int) -> bytes:
        """Return at most `n` bytes of standard output; `b""` at the end. Raises EOFError if the connection was cut."""
        data: bytes = self._channel.recv(n)
        if not data and not self._channel.eof_received:
            raise EOFError("the connection was cut")
        return data

    def write(self, data: bytes) -> None:
        """Write all of `data` to standard input."""
        self._channel.sendall(data)

    def wait(self) -> int:
        """Return the exit status. Raises EOFError if the connection was cut first, or a signal ended the program."""
        status: int = self._channel.recv_exit_status()
        self._stderr_ended.wait(_LAST_WORDS_S)
        if status < 0:
            raise EOFError("the connection was cut" if not self._connection.alive else "a signal ended the program")
        return status

    def close(self) -> None:
        """Close the session. If the connection can't even transmit this, it is dead, and is closed too."""
        with _or_else(self._connection.close, _CLOSE_S):
            self._channel.close()

    def carry_stderr(self, feed: Callable[[bytes], object]) -> None:
        """Pass standard error to `feed` in a thread of its own, so that the program never waits for its reader."""

        def run() -> None:
            with contextlib.suppress(OSError, EOFError):
                while data := self._channel.recv_stderr(_STDERR_BYTES):
                    feed(data)
            self._stderr_ended.set()

        begin_thread(run, "ssh-stderr")


def connect(access: Access, secret: Secret) -> HostConnection:
    """Make a connection. Blocks for at most `connect_timeout_s` for each hop.

    Raises:
        HostKeyError: a server's key is unknown or has changed.
        LoginRefused: no key and no password was accepted.
        Unreachable: a server does not answer.
        ConfigError: the configuration names a file or a secret that does not exist.
    """
    transports: list[paramiko.Transport] = []
    processes: list[Any] = []
    try:
        for hop in route(access):
            known = KnownHosts(hop.known_hosts)
            with _explain_errors(hop):
                stream = _reach(hop, transports[-1] if transports else None, processes, access.connect_timeout_s)
                transport = paramiko.Transport(stream)
                transports.append(transport)
                _greet(transport, hop, known, access.connect_timeout_s)
                _log_in(transport, hop, access, secret)
    except BaseException:
        _close_all(transports, processes)
        raise
    log.debug("connected to %s", access.host)
    return HostConnection(transports, processes, access)


def _close_all(transports: Sequence[paramiko.Transport], processes: Sequence[Any]) -> None:
    """Close the hops, the last one first, because each runs through the hops before it. Ignore errors, and end the
    proxies."""
    for transport in reversed(transports):
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.close()
    for process in processes:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _explain_errors(hop: Hop) -> Iterator[None]:
    try:
        yield
    except (paramiko.SSHException, EOFError, OSError) as error:
        reason = str(error) or type(error).__name__
        unreachable = Unreachable(
            f"host {hop.name!r} ({hop}) can't be reached: {reason}", hint=f"does `ssh {hop.name} true` work?"
        )
        # Before the server's first line, paramiko raises an error of its own, with that of the socket as its context.
        unreachable.dropped = any(isinstance(each, _DROPPED) for each in (error, error.__context__))
        raise unreachable from error


def _reach(hop: Hop, through: paramiko.Transport | None, processes: list[Any], limit_s: float) -> Any:
    """Return a stream to the server: through the previous hop, through a proxy command, or directly."""
    if through is not None:
        return through.open_channel("direct-tcpip", (hop.hostname, hop.port), ("127.0.0.1", 0), timeout=limit_s)
    if hop.proxy_command is not None:
        ours, theirs = socket.socketpair()
        with theirs:  # the command is the user's own, from the user's configuration, and is run as by OpenSSH
            processes.append(
                subprocess.Popen(
                    ["/bin/sh", "-c", f"exec {hop.proxy_command}"],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        return ours
    stream = socket.create_connection((hop.hostname, hop.port), timeout=limit_s)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _greet(transport: paramiko.Transport, hop: Hop, known: KnownHosts, limit_s: float) -> None:
    """Exchange keys, and verify the server's key before anything else is sent."""
    transport.set_log_channel(f"{__name__}.paramiko")
    transport.banner_timeout = transport.auth_timeout = transport.channel_timeout = limit_s
    options = transport.get_security_options()
    known_kinds = set(known.kinds(hop.key_name))
    if "ssh-rsa" in known_kinds:
        known_kinds |= {"rsa-sha2-512", "rsa-sha2-256"}
    # Ask for the kinds of keys that we know first. The sort is stable, so the order stays otherwise.
    options.key_types = sorted(options.key_types, key=lambda kind: kind not in known_kinds)
    transport.start_client(timeout=limit_s)
    known.check(hop.key_name, transport.get_remote_server_key())


def _log_in(transport: paramiko.Transport, hop: Hop, access: Access, secret: Secret) -> None:
    tried: list[str] = []
    for label, key in _keys(hop, access, secret, tried):
        try:
            further = transport.auth_publickey(hop.user, key)
        except paramiko.AuthenticationException as error:
            tried.append(f"{label}: refused")
            _check_not_cut(transport, hop, tried, error)
            continue
        if transport.is_authenticated():
            return
        tried.append(f"{label}: accepted, but the server wants {', '.join(further) or 'more'} besides")
    if access.password_secret is not None:
        try:
            transport.auth_password(hop.user, secret(access.password_secret))
        except paramiko.AuthenticationException as error:
            tried.append(f"password {access.password_secret}: refused")
            _check_not_cut(transport, hop, tried, error)
        if transport.is_authenticated():
            return
    raise LoginRefused(
        f"host {hop.name!r} ({hop}) refused the login; " + ("; ".join(tried) or "there is no key to try"),
        hint="name a key by `identity`, load it into the agent, or name secrets by `passphrase_secret`, "
        "`password_secret`",
    )


def _check_not_cut(transport: paramiko.Transport, hop: Hop, tried: list[str], error: Exception) -> None:
    """Raise `Unreachable` if the connection was lost, which paramiko reports as a refusal, too."""
    if not transport.is_active():
        raise Unreachable(
            f"host {hop.name!r} ({hop}) broke off the login after: {'; '.join(tried)}",
            hint="if that is too many keys for it, name one by `identity` and set `agent` to false",
        ) from error


def _keys(hop: Hop, access: Access, secret: Secret, tried: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield the keys to try, in order, each with its name for messages. Keys that can't be read are noted in
    `tried`."""
    passphrase = secret(access.passphrase_secret) if access.passphrase_secret is not None else None
    identity = None if access.identity is None else Path(access.identity).expanduser()
    for path in hop.identities:
        if path.is_file():
            if (key := _load(path, passphrase, tried)) is not None:
                yield str(path), key
        elif path == identity:
            raise ConfigError(f"there is no key {path}", hint="`identity` is the path of a private key, a file")
        elif hop.named_identities:
            tried.append(f"{path}: not there")
    if hop.agent:
        agent = paramiko.Agent()
        try:
            for key in agent.get_keys():
                yield f"agent's {key.get_name()} {key.fingerprint}", key
        finally:
            agent.close()


def _load(path: Any, passphrase: str | None, tried: list[str]) -> paramiko.PKey | None:
    reason = "no key that we can read"
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path), passphrase)
        except paramiko.PasswordRequiredException:
            reason = "needs a passphrase, and `passphrase_secret` names none"
        except (paramiko.SSHException, ValueError) as error:
            if passphrase is not None and "checkints" in str(error).lower():
                reason = "the passphrase is wrong"
        except OSError as error:
            reason = f"can't be read: {error.strerror}"
    tried.append(f"{path}: {reason}")
    return None


__all__ = ["HostConnection", "HostKeyError", "HostSession", "LoginRefused", "SessionRefused", "Unreachable", "connect"]
