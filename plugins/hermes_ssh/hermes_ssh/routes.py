"""The route to a host by OpenSSH's configuration file: the host's own settings, and those of the hosts in between."""

from __future__ import annotations

import getpass
import glob
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.config import SSHConfigDict

from hermes_core import ConfigError
from hermes_ssh.config import Access, split_host

_HOPS, _INCLUDES = 8, 16
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Hop:
    """A server on the route, whose last hop is the host itself."""

    name: str
    hostname: str
    port: int
    user: str
    identities: tuple[Path, ...]
    named_identities: bool
    """Whether the user named the identities. Otherwise they are OpenSSH's default files, which need not exist."""
    agent: bool
    known_hosts: tuple[Path, ...]
    key_name: str
    """The server's name in `known_hosts`."""
    proxy_command: str | None = None

    def __str__(self) -> str:
        return f"{self.user}@{self.hostname}:{self.port}"


def route(access: Access) -> tuple[Hop, ...]:
    """Return the servers on the route, with the host as the last one.

    Raises:
        ConfigError: the configuration file can't be read, or the route goes in a circle.
    """
    config = _read(access.config_file)
    return tuple(_hops(access, config, access.host, final=True, depth=0))


def _hops(access: Access, config: paramiko.SSHConfig, host: str, *, final: bool, depth: int) -> Iterator[Hop]:
    """Yield the servers on the route to `host`, with `host` as the last one."""
    if depth > _HOPS:
        raise ConfigError(f"ProxyJump leads through more than {_HOPS} hosts, or in circles, at {host!r}")
    settings = _look_up(config, host)
    jumps = [part.strip() for part in (settings.get("proxyjump") or "none").split(",")]
    command = settings.get("proxycommand") or "none"
    if jumps[0].lower() != "none":
        yield from _hops(access, config, jumps[0], final=False, depth=depth + 1)
        for jump in jumps[1:]:  # each is reached through the host before, so its own ProxyJump does not count
            yield _hop(access, _look_up(config, jump), jump, final=False, command=None)
        command = "none"
    yield _hop(access, settings, host, final=final, command=None if command.lower() == "none" else command)


def _look_up(config: paramiko.SSHConfig, host: str) -> SSHConfigDict:
    """Return a host's settings in the file."""
    try:
        return config.lookup(split_host(host)[1])
    except (paramiko.SSHException, ValueError) as error:
        raise ConfigError(f"the SSH configuration of {host!r} can't be read: {error}") from error


def _hop(access: Access, settings: SSHConfigDict, host: str, *, final: bool, command: str | None) -> Hop:
    user, name, port = split_host(host)
    hostname = settings.get("hostname", name)
    number = port or (access.port if final else None) or int(settings.get("port", 22))
    identities = [Path(path).expanduser() for path in settings.get("identityfile", [])]
    if access.identity is not None:
        identities.insert(0, Path(access.identity).expanduser())
    named = bool(identities)
    if not named:
        identities = [Path("~/.ssh", name).expanduser() for name in _DEFAULT_KEYS]
    files = [access.known_hosts] if access.known_hosts else shlex.split(settings.get("userknownhostsfile", ""))
    files = files or ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
    alias = settings.get("hostkeyalias")
    return Hop(
        name=name,
        hostname=hostname,
        port=number,
        user=user or (access.user if final else None) or settings.get("user") or getpass.getuser(),
        identities=tuple(identities),
        named_identities=named,
        agent=access.agent and settings.get("identitiesonly", "no").lower() != "yes",
        known_hosts=(*(Path(path).expanduser() for path in files), Path("/etc/ssh/ssh_known_hosts")),
        key_name=alias or (hostname if number == 22 else f"[{hostname}]:{number}"),
        proxy_command=command,
    )


def _read(config_file: str | None) -> paramiko.SSHConfig:
    path = Path(config_file or "~/.ssh/config").expanduser()
    if config_file is None and not path.exists():
        return paramiko.SSHConfig()
    try:
        return paramiko.SSHConfig.from_text("\n".join(_lines(path, 0)))
    except (OSError, UnicodeDecodeError, paramiko.SSHException) as error:
        raise ConfigError(f"the SSH configuration {path} can't be read: {error}", hint="see `config_file`") from error


def _lines(path: Path, depth: int) -> Iterator[str]:
    """Yield the lines of a file, and in place of an `Include`, which paramiko ignores, those of the included files."""
    if depth > _INCLUDES:
        raise ConfigError(f"Include goes deeper than {_INCLUDES} files, at {path}")
    for line in path.read_text("utf-8").splitlines():
        words = line.replace("=", " ", 1).split(None, 1)
        if not words or words[0].lower() != "include":
            yield line
            continue
        for pattern in shlex.split(words[1]) if len(words) > 1 else []:
            place = Path(pattern).expanduser()
            for found in sorted(glob.glob(str(place if place.is_absolute() else path.parent / place))):  # noqa: PTH207
                yield from _lines(Path(found), depth + 1)
