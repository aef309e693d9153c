"""Addresses that are not the internet's: loopback, private networks, metadata services, and those of this host."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Range = ipaddress.IPv4Network | ipaddress.IPv6Network

_SPECIAL: tuple[Range, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        # this network, private, shared by a provider's customers, loopback, link-local with its metadata services
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        # protocol assignments, documentation, 6to4 relays, private, benchmarks, documentation, multicast, reserved
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",  # a public address that is Azure's metadata service inside of Azure
        # all that is not 2000::/3: loopback, private, link-local, multicast and so on
        *("::/3", "4000::/2", "8000::/1"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),  # protocols (Teredo), documentation, 6to4
    )
)

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses whose last four bytes are the IPv4 address that a gateway connects to."""


def judged_as(address: Address) -> Address:
    """Return the address that a connection to `address` reaches: the IPv4 address inside, if it has one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return ipaddress.IPv4Address(address.packed[-4:]) if address in _NAT64 else address


def is_special(address: Address) -> bool:
    """Return whether an address is not one of the public internet, or leads to a provider's metadata."""
    return any(address in each for each in _SPECIAL)


def lies_in_special_range(addresses: Range) -> bool:
    """Return whether a range has only special addresses of one kind. So `0.0.0.0/0` does not name any of them."""
    return any(addresses.version == each.version and addresses.subnet_of(each) for each in _SPECIAL)  # type: ignore[arg-type]


def is_own(address: Address) -> bool:
    """Return whether an address is one of this host. No packet is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((str(address), 0))  # only a host's own addresses can be bound
        return True
    return False
