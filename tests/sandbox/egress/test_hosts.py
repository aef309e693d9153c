"""What lists of hosts permit: written forms, names that only look alike, addresses that a name must not lead to."""

from __future__ import annotations

import ipaddress
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.sandbox.egress.addresses import is_own, is_special, judged_as
from hermes_core.sandbox.egress.hosts import Destination, HostRules, host_lists, parse_hosts

LABEL = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=12).filter(
    lambda label: label[0] != "-" and label[-1] != "-"
)
NAME = st.lists(LABEL, min_size=2, max_size=4).map(".".join).filter(lambda name: name[-1].isalpha())


def permits(rules: HostRules, host: str, port: int = 443) -> bool:
    return rules.explain_refusal(Destination.parse(host, port)) is None


@given(NAME, LABEL)
def test_a_name_permits_itself_and_a_wildcard_what_is_below_it(name: str, label: str) -> None:
    exact, below = HostRules([name.upper()]), HostRules([f"*.{name}"])
    assert permits(exact, name)
    assert permits(exact, f"{name.swapcase()}.")
    assert not permits(exact, f"{label}.{name}")
    assert permits(below, f"{label}.{name}")
    assert permits(below, f"{label}.{label}.{name}")
    assert not permits(below, name)
    assert not permits(below, f"{label}{name}")  # `*.example.org` is not `evilexample.org`
    assert not permits(exact, f"{name}.{label}xy")
    assert not permits(below, f"a.{name}.{label}xy")


@given(NAME, st.integers(1, 65535))
def test_other_ports_than_the_web_s_must_be_named(name: str, port: int) -> None:
    assert permits(HostRules([name]), name, port) == (port in (80, 443))
    assert permits(HostRules([f"{name}:{port}"]), name, port)
    assert not permits(HostRules([f"{name}:{port}"]), name, port % 65535 + 1)
    assert permits(HostRules([f"{name}:*"]), name, port)
    assert not permits(HostRules(["*:*"], [name]), name, port)  # a denied host is denied at every port
    assert permits(HostRules(["*:*"], [f"{name}:{port}"]), name, port % 65535 + 1)


@given(NAME, st.binary(max_size=30))
def test_what_is_asked_for_is_a_name_an_address_or_an_error(name: str, noise: bytes) -> None:
    for text in (noise.decode("latin-1"), name + noise.decode("latin-1")):
        try:
            found = Destination.parse(text, 443)
        except ValueError:
            continue
        assert found.address is not None or set(found.host) <= set(string.ascii_lowercase + string.digits + "-_.")
        assert Destination.parse(found.host, 443) == found


@given(st.ip_addresses(), st.integers(8, 32))
def test_a_range_permits_its_addresses(address: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int) -> None:
    around = ipaddress.ip_network(f"{address}/{bits}", strict=False)
    rules = HostRules([str(around)])
    assert permits(rules, f"[{address}]") == (judged_as(address) in around)
    assert not permits(HostRules(["*"]), f"[{address}]")  # an address is no name
    assert not permits(HostRules([str(around)], [str(judged_as(address))]), f"[{address}]")


@pytest.mark.parametrize(
    "entry", ["", "a b", "http://a.org", "a.org/x", "*.", "*a.org", "a.*.org", "10.0.0.1/8", "a.org:0", "a.org:99999",
              "127.1", "0x7f000001", "1.2.3", "a.5", "-a.org", "fe80::1%eth0", "a..org", "x" * 64 + ".org",
              "a.org:http"]
)  # fmt: skip
def test_a_wrong_entry_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match=r"has |zone"):
        parse_hosts(["fine.org", entry])


@pytest.mark.parametrize(
    "written", ["127.1", "0x7f000001", "0177.0.0.1", "2130706433", "127.0.0.1.", "0x7f.1", "[::1%lo]", "a\0b", "a/b@c"]
)
def test_odd_ways_to_write_an_address_are_no_names(written: str) -> None:
    """The system's resolver takes some of them for addresses, without asking anyone for a name."""
    with pytest.raises(ValueError):
        Destination.parse(written, 80)


def test_names_that_are_not_ascii_are_compared_in_ascii() -> None:
    assert permits(HostRules(["bücher.example"]), "xn--bcher-kva.example")
    assert permits(HostRules(["xn--bcher-kva.example"]), "BÜCHER.example")
    assert not permits(HostRules(["paypal.com"]), "pаypal.com")  # a Cyrillic а


SPECIAL = [
    *("127.0.0.1", "10.1.2.3", "169.254.169.254", "100.100.100.200", "192.168.1.1", "172.17.0.1", "0.0.0.0"),
    *("168.63.129.16", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:0:1::1", "::7f00:1"),
]


@pytest.mark.parametrize("text", SPECIAL)
def test_a_permitted_name_does_not_lead_inside(text: str) -> None:
    address = ipaddress.ip_address(text)
    wanted = Destination.parse("example.org", 443)
    assert is_special(judged_as(address))
    for rules in (HostRules(["*"]), HostRules(["example.org", "0.0.0.0/0", "::/0", "0.0.0.0/1", "128.0.0.0/1"])):
        reason = rules.explain_address_refusal(wanted, address, own=False)
        assert reason is not None
        assert "allowed_hosts" in reason
    named = HostRules(["example.org", str(judged_as(address))])
    assert named.explain_address_refusal(wanted, address, own=True) is None


def test_the_driver_s_own_public_address_must_be_named_itself() -> None:
    wanted, address = Destination.parse("example.org", 443), ipaddress.ip_address("8.8.8.8")
    for allowed, refused in ((["*", "8.0.0.0/8"], True), (["*", "8.8.8.8"], False)):
        rules = HostRules(allowed)
        assert (rules.explain_address_refusal(wanted, address, own=True) is not None) == refused
        assert rules.explain_address_refusal(wanted, address, own=False) is None
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert not is_own(address)


def test_a_denied_range_denies_what_a_name_resolves_to() -> None:
    rules = HostRules(["*"], ["8.8.0.0/16"])
    reason = rules.explain_address_refusal(
        Destination.parse("example.org", 443), ipaddress.ip_address("8.8.4.4"), own=False
    )
    assert reason == "example.org is 8.8.4.4: 8.8.4.4:443 is in denied_hosts (8.8.0.0/16)"


def test_reasons_name_the_setting() -> None:
    rules = HostRules(["*", "a.org:8080"], ["code-hosts", "b.org"], setting="verify_network.")
    reasons = {
        ("github.com", 443): "github.com:443 is in verify_network.denied_hosts (code-hosts)",
        ("b.org", 80): "b.org:80 is in verify_network.denied_hosts",
        ("c.org", 22): "port 22 of c.org is not in verify_network.allowed_hosts",
        ("8.8.8.8", 443): "8.8.8.8:443 is not in verify_network.allowed_hosts",
    }
    for (host, port), reason in reasons.items():
        assert rules.explain_refusal(Destination.parse(host, port)) == reason


def test_tls_asks_for_the_server_that_was_permitted() -> None:
    rules = HostRules(["front.org", "*.cdn.org", "8.8.8.8"], ["github.com", "bad.cdn.org"])
    asked = {
        ("front.org", "front.org"): True,
        ("front.org", "FRONT.org"): True,
        ("front.org", "a.cdn.org"): True,
        ("front.org", "bad.cdn.org"): False,
        ("front.org", "hidden.org"): False,
        ("8.8.8.8", "hidden.org"): True,  # whoever permits an address permits what is there
        ("8.8.8.8", "github.com"): False,
        ("front.org", "not a name"): False,
    }
    for (host, name), permitted in asked.items():
        reason = rules.explain_server_name_refusal(Destination.parse(host, 443), name)
        assert (reason is None) == permitted, (host, name, reason)


def test_the_lists_hold_what_fixes_come_from() -> None:
    rules = HostRules(["*"], [*host_lists()])
    for host in ("github.com", "raw.githubusercontent.com", "codeload.github.com", "gitlab.com", "huggingface.co",
                 "pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "static.crates.io", "proxy.golang.org",
                 "deb.debian.org"):  # fmt: skip
        assert not permits(rules, host), host
    assert permits(rules, "example.org")
    assert permits(HostRules(["package-indexes"]), "pypi.org")
    for name, hosts in host_lists().items():
        assert len(hosts) == len(set(hosts)), name
        parse_hosts(hosts)
