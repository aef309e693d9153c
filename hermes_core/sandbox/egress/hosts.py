"""What programs may reach: hosts as users write them, and the rules made of an allow-list and a deny-list."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from hermes_core.sandbox.egress.addresses import Address, Range, is_special, judged_as, lies_in_special_range

WEB_PORTS = frozenset({80, 443})
"""The ports of an allowed host that names none."""

EVERYWHERE = ("*:*", "0.0.0.0/0:*", "[::/0]:*")
"""Every host of the internet."""

MAX_ENTRIES = 10_000

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label that makes a whole name an address for the system's resolver: `127.1`, `0x7f000001`."""
_RANGE = re.compile(r"[0-9a-fA-F.:]+/[0-9]+")
_WITH_PORT = re.compile(r"(?P<host>\[[^]]*\](?:/[0-9]+)?|[^:]*):(?P<port>\*|[0-9]{1,5})")


@dataclass(frozen=True)
class Destination:
    """What a program wants to reach."""

    host: str
    """A name in lower case and in ASCII, or an address."""
    port: int
    address: Address | None = None
    """The address that `host` is; None if it is a name."""

    @classmethod
    def parse(cls, host: str, port: int) -> Destination:
        """Return the destination for the host of a URL or of a CONNECT request.

        Raises:
            ValueError: this can't be a host or a port.
        """
        if not 0 < port < 65536:
            raise ValueError(f"{port} is no port")
        bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if (address := _address(bare)) is not None:
            return cls(str(address), port, address)
        return cls(check_name(host), port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def check_name(name: str) -> str:
    """Return the name of a host in lower case, without a dot at the end.

    Raises:
        ValueError: this can't be the name of a host. Numbers as in `127.1` are none, because resolvers take them for
            addresses.
    """
    text = name.lower().removesuffix(".")
    if not text.isascii():
        try:
            text = text.encode("idna").decode("ascii")
        except UnicodeError as error:
            raise ValueError(f"{name!r:.80} is no name of a host: {error}") from error
    labels = text.split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{name!r:.80} is no name of a host")
    return text


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise ValueError(f"{text!r:.80} has a zone, which means nothing outside of its host")
    return judged_as(address)


@dataclass(frozen=True)
class HostPattern:
    """One entry of a list of hosts."""

    written: str
    """The entry as the user wrote it, which may be the name of a list."""
    name: str = ""
    """A name, `*.NAME` for all names below it, or `*` for every name. Empty for addresses."""
    addresses: Range | None = None
    port: int | None = None
    """None: the entry names no port."""
    any_port: bool = False

    def covers(self, destination: Destination) -> bool:
        """Return whether this is the host of a destination, whatever its port."""
        if destination.address is not None:
            return self.addresses is not None and destination.address in self.addresses
        return self.covers_name(destination.host)

    def covers_name(self, name: str) -> bool:
        """Return whether this is or includes the name of a host."""
        if self.name.startswith("*."):
            return name.endswith(self.name[1:]) and len(name) > len(self.name) - 1
        return self.name in ("*", name)

    def covers_port(self, port: int, usual: frozenset[int] | None) -> bool:
        """Return whether this includes a port. An entry that names none includes the `usual` ones; None is all."""
        if self.any_port or (self.port is None and usual is None):
            return True
        return port == self.port if self.port is not None else usual is not None and port in usual


def parse_hosts(entries: Iterable[str]) -> tuple[HostPattern, ...]:
    """Return the patterns for entries as users write them.

    An entry is a name, `*.NAME`, `*`, an address, a range of addresses such as `10.0.0.0/8`, or the name of a list in
    `host_lists.toml`. `:PORT` or `:*` can follow; an IPv6 address then stands in brackets.

    Raises:
        ValueError: an entry is none of these.
    """
    patterns = [pattern for entry in entries for pattern in _parse_entry(entry)]
    if len(patterns) > MAX_ENTRIES:
        raise ValueError(f"has {len(patterns)} hosts, and {MAX_ENTRIES} is the most")
    return tuple(patterns)


def _parse_entry(entry: str) -> Iterator[HostPattern]:
    text = entry.strip()
    if (listed := host_lists().get(text)) is not None:
        for each in listed:
            yield HostPattern(text, name=each)
        return
    host, port, any_port = text, None, False
    if (parts := _WITH_PORT.fullmatch(text)) is not None:
        host, any_port = parts["host"], parts["port"] == "*"
        port = None if any_port else int(parts["port"])
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"has {entry!r}, and {port} is no port")
    bare = re.sub(r"\[([^]]*)\]", r"\1", host)
    try:
        addresses = ipaddress.ip_network(bare)
    except ValueError as error:
        if _RANGE.fullmatch(bare):
            raise ValueError(f"has {entry!r}, which is no range of addresses: {error}") from error
    else:
        if "%" in bare:
            raise ValueError(f"has {entry!r}, and a zone means nothing outside of its host")
        yield HostPattern(text, addresses=addresses, port=port, any_port=any_port)
        return
    wildcard = "*." if host.startswith("*.") else ""
    try:
        name = "*" if host == "*" else wildcard + check_name(host.removeprefix(wildcard))
    except ValueError as error:
        lists = ", ".join(sorted(host_lists()))
        raise ValueError(
            f"has {entry!r}; an entry is a host's name, *.NAME, *, an address, a range such as 10.0.0.0/8, any of them "
            f"with :PORT, or one of the lists {lists}"
        ) from error
    yield HostPattern(text, name=name, port=port, any_port=any_port)


@cache
def host_lists() -> Mapping[str, tuple[str, ...]]:
    """Return the lists of hosts that users can name."""
    text = resources.files("hermes_core.sandbox.egress").joinpath("host_lists.toml").read_text(encoding="utf-8")
    return {name: tuple(hosts) for name, hosts in tomllib.loads(text).items()}


class HostRules:
    """Decides what the programs of a slot may reach.

    Args:
        allowed, denied: entries as in `parse_hosts`. What both lists cover is denied.
        setting: what is put before the names of the two settings in explanations, such as `verify_network.`.
        for_item: whether these are the rules of an item. Then other rules decide about addresses that are not the
            internet's.

    Raises:
        ValueError: an entry is wrong.
    """

    def __init__(
        self, allowed: Iterable[str], denied: Iterable[str] = (), *, setting: str = "", for_item: bool = False
    ) -> None:
        self._allowed, self._denied = parse_hosts(allowed), parse_hosts(denied)
        self._setting, self._for_item = setting, for_item

    def explain_refusal(self, wanted: Destination) -> str | None:
        """Return why a destination is refused by its name, or by the address that stands in place of a name. None: it
        is not refused. Names resolve only after this, so a refused one is never looked up."""
        if (reason := self._explain_denial(wanted)) is not None:
            return reason
        covering = [each for each in self._allowed if each.covers(wanted)]
        if not covering:
            return f"{wanted} is not in {self._setting}allowed_hosts"
        if not any(each.covers_port(wanted.port, WEB_PORTS) for each in covering):
            return f"port {wanted.port} of {wanted.host} is not in {self._setting}allowed_hosts"
        return None

    def explain_address_refusal(self, wanted: Destination, address: Address, *, own: bool) -> str | None:
        """Return why the address of a permitted destination is refused. None: it is not.

        Args:
            own: whether the address is one of the driver's host.
        """
        found = Destination(str(address), wanted.port, judged_as(address))
        if (reason := self._explain_denial(found)) is not None:
            return f"{wanted.host} is {found.host}: {reason}"
        if self._for_item:
            return None
        assert found.address is not None
        ranges = [
            each.addresses
            for each in self._allowed
            if each.addresses is not None and each.covers(found) and each.covers_port(wanted.port, WEB_PORTS)
        ]
        if is_special(found.address) and not any(lies_in_special_range(each) for each in ranges):
            kind = "an address of this kind (loopback, private, link-local and so on)"
        elif own and not is_special(found.address) and not any(each.num_addresses == 1 for each in ranges):
            kind = "an address of the driver's host"
        else:
            return None
        return f"{wanted.host} is {found.host}: {kind} must be in {self._setting}allowed_hosts itself"

    def explain_server_name_refusal(self, wanted: Destination, name: str) -> str | None:
        """Return why a TLS connection to a permitted destination may not ask for the server `name`. None: it may.

        Behind a permitted address there may be other servers that are denied, or that are not allowed.
        """
        try:
            asked = Destination.parse(name, wanted.port)
        except ValueError as error:
            return str(error)
        if asked.host == wanted.host:
            return None
        reason = self._explain_denial(asked) if wanted.address is not None else self.explain_refusal(asked)
        return None if reason is None else f"TLS asks {wanted.host} for {asked.host}: {reason}"

    def _explain_denial(self, wanted: Destination) -> str | None:
        for each in self._denied:
            if each.covers(wanted) and each.covers_port(wanted.port, None):
                listed = "" if each.written == wanted.host else f" ({each.written})"
                return f"{wanted} is in {self._setting}denied_hosts{listed}"
        return None
