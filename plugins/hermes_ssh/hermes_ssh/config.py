"""The settings of a profile of the `ssh` backend, and those of the connection to one host."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Self

from pydantic import Field, field_validator, model_validator

from hermes_core import SandboxConfig, TerminalVariables

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<name>\[[0-9a-fA-F:.%\w]+\]|[^@:\[\]\s/]+)(?::(?P<port>\d{1,5}))?")


class SshConfig(SandboxConfig):
    """A profile of the `ssh` backend. Sandboxes have the processors, the memory and the system of the hosts.

    Settings of the connection that are None come from the configuration file of OpenSSH's client.
    """

    unsupported = ("image", "cpu", "memory")
    terminal = TerminalVariables(
        {
            "TERMINAL_SSH_HOST": "host",
            "TERMINAL_SSH_USER": "user",
            "TERMINAL_SSH_PORT": "port",
            "TERMINAL_SSH_KEY": "identity",
        }
    )

    host: str | None = None
    """The host: a name of the configuration file, or `[user@]name[:port]`."""
    hosts: tuple[str, ...] = ()
    """More hosts. Sandboxes are spread over all of them."""
    user: str | None = None
    """The account on the hosts."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The port of the hosts."""
    config_file: str | None = None
    """OpenSSH's configuration file; None is `~/.ssh/config`, if there is one."""
    identity: str | None = None
    """A file with a private key, tried before all others."""
    passphrase_secret: str | None = None
    """The name of the secret with the passphrase of the private keys."""
    password_secret: str | None = None
    """The name of the secret with the account's password. Without it, no password is tried."""
    known_hosts: str | None = None
    """The file with the hosts' keys. None is the one that the configuration file names, or `~/.ssh/known_hosts`."""
    agent: bool = True
    """Whether keys of the SSH agent are tried."""
    connect_timeout_s: float = Field(default=15.0, gt=0)
    """Time limit in seconds of one connection, its authentication included."""
    keepalive_s: float = Field(default=5.0, gt=0)
    """Seconds between two keep-alives of an idle connection."""
    max_sessions: int = Field(default=10, ge=1)
    """Maximum number of sessions in one connection, as the server's MaxSessions. It is lowered if the server allows
    fewer."""
    retry_host_after_s: float = Field(default=15.0, ge=0)
    """Seconds for which other hosts are preferred to one that failed; doubled with each further failure."""
    directory: str | None = None
    """The directory of the sandboxes on a host, on a local disk and never on a network one. None is
    `/var/tmp/hermes-rl-ssh-<uid>`."""
    python: str = "python3"
    """Python 3.7 or newer on the hosts. It runs our program there and the guest, and is the slots' `python3`."""

    @field_validator("host", "hosts")
    @classmethod
    def _are_hosts(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for host in (value,) if isinstance(value, str) else value or ():
            if not _HOST.fullmatch(host) or host.startswith("-"):
                raise ValueError(
                    f"{host!r} is not a host: write a name of the configuration file, or [user@]name[:port]"
                )
        return value

    @model_validator(mode="after")
    def _names_no_host_twice(self) -> Self:
        if len(set(self.all_hosts)) != len(self.all_hosts):
            raise ValueError("a host is named twice")
        return self

    @property
    def all_hosts(self) -> tuple[str, ...]:
        """Return the hosts of the profile as they are written."""
        return (self.host, *self.hosts) if self.host else self.hosts

    def access(self, host: str) -> Access:
        """Return the settings of the connection to one of the hosts."""
        settings = {each.name: getattr(self, each.name) for each in fields(Access)}
        return Access(**(settings | {"host": host}))


@dataclass(frozen=True)
class Access:
    """The settings of the connection to one host. Profiles with equal values share a connection."""

    host: str
    user: str | None
    port: int | None
    config_file: str | None
    identity: str | None
    passphrase_secret: str | None
    password_secret: str | None
    known_hosts: str | None
    agent: bool
    connect_timeout_s: float
    keepalive_s: float
    max_sessions: int
    directory: str | None
    python: str


def split_host(text: str) -> tuple[str | None, str, int | None]:
    """Return the parts of `[user@]name[:port]`."""
    match = _HOST.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a host")
    port = match["port"]
    return match["user"], match["name"].strip("[]"), int(port) if port else None
