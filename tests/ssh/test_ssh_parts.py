"""The parts that need no server: settings, configuration files, known hosts, and what is sent to a host."""

from __future__ import annotations

import ast
import getpass
import json
import subprocess
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import paramiko
import pytest
from hermes_ssh.config import SshConfig
from hermes_ssh.known_hosts import HostKeyError, KnownHosts
from hermes_ssh.routes import route
from pydantic import ValidationError

from hermes_core.errors import ConfigError
from hermes_core.sandbox.local.host import MARK
from hermes_core.sandbox.remote import program
from hermes_core.sandbox.remote.relay import KEEPER
from tests.support.pythons import NEWER, OLDEST, interpreter


def way(path: Path, text: str, host: str = "box", **more: Any) -> Any:
    path.write_text(text)
    return route(SshConfig(host=host, config_file=str(path), **more).access(host))


@pytest.mark.parametrize("host", ["", "a b", "-oProxyCommand=x", "a/b", "user@", "a:99999999", "[::1"])
def test_what_is_no_host(host: str) -> None:
    with pytest.raises(ValidationError):
        SshConfig(hosts=(host,))


def test_a_host_is_named_once() -> None:
    with pytest.raises(ValidationError, match="twice"):
        SshConfig(host="a", hosts=("b", "a"))
    assert SshConfig(host="a", hosts=("b", "c")).all_hosts == ("a", "b", "c")


def test_the_configuration_file_is_read(tmp_path: Path) -> None:
    (hop,) = way(
        tmp_path / "config",
        "Host box\n HostName box.example\n User me\n Port 2200\n IdentityFile /k1\n IdentityFile ~/k2\n"
        " IdentitiesOnly yes\n UserKnownHostsFile /known /more\n",
    )
    assert (hop.hostname, hop.port, hop.user, hop.agent) == ("box.example", 2200, "me", False)
    assert hop.identities == (Path("/k1"), Path("~/k2").expanduser())
    assert hop.known_hosts[:2] == (Path("/known"), Path("/more"))
    assert hop.key_name == "[box.example]:2200"


def test_the_profile_comes_before_the_file_and_the_host_before_the_profile(tmp_path: Path) -> None:
    text = "Host *\n User file\n Port 1\n IdentityFile /k\n"
    (hop,) = way(tmp_path / "config", text, user="profile", port=2, identity="/own", known_hosts="/mine")
    assert (hop.user, hop.port, hop.identities) == ("profile", 2, (Path("/own"), Path("/k")))
    assert hop.known_hosts[0] == Path("/mine")
    (hop,) = way(tmp_path / "config", text, "host@[::1]:3", user="profile", port=2)
    assert (hop.user, hop.hostname, hop.port) == ("host", "::1", 3)


def test_without_a_file_there_are_the_usual_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (hop,) = route(SshConfig(host="box.example").access("box.example"))
    assert (hop.user, hop.port, hop.key_name, hop.agent) == (getpass.getuser(), 22, "box.example", True)
    assert tmp_path / ".ssh/id_ed25519" in hop.identities and not hop.named_identities
    assert hop.known_hosts[0] == tmp_path / ".ssh/known_hosts"


@pytest.mark.parametrize(
    ("jumps", "expected"),
    [
        ("gate", ["gate.example:22", "box.example:22"]),
        ("you@gate:77", ["gate.example:77", "box.example:22"]),
        ("gate,inner", ["gate.example:22", "inner:22", "box.example:22"]),
        ("far", ["gate.example:22", "far:22", "box.example:22"]),
        ("none", ["box.example:22"]),
    ],
)
def test_the_way_leads_through_the_hosts_between(tmp_path: Path, jumps: str, expected: list[str]) -> None:
    others = "Host gate\n HostName gate.example\nHost far\n ProxyJump gate\n"
    text = f"Host box\n HostName box.example\n ProxyJump {jumps}\n{others}"
    hops = way(tmp_path / "config", text, port=None)
    assert [f"{hop.hostname}:{hop.port}" for hop in hops] == expected
    if jumps.startswith("you"):
        assert hops[0].user == "you"


def test_jumping_in_circles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="circles"):
        way(tmp_path / "config", "Host box\n ProxyJump gate\nHost gate\n ProxyJump box\n")


def test_the_profiles_account_is_not_that_of_the_hosts_between(tmp_path: Path) -> None:
    gate, box = way(tmp_path / "config", "Host box\n ProxyJump gate\n", user="me", port=5)
    assert (gate.user, gate.port) == (getpass.getuser(), 22)
    assert (box.user, box.port) == ("me", 5)


def test_a_proxy_command_with_its_tokens(tmp_path: Path) -> None:
    (hop,) = way(tmp_path / "config", "Host box\n HostName b.example\n Port 9\n ProxyCommand nc %h %p\n")
    assert hop.proxy_command == "nc b.example 9"


def test_files_that_are_included(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/one.conf").write_text("Host box\n Port 4\n")
    (hop,) = way(tmp_path / "config", "Include conf.d/*.conf\nHost *\n User me\n")
    assert (hop.port, hop.user) == (4, "me")


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        route(SshConfig(host="box", config_file=str(tmp_path / "none")).access("box"))


KEY, OTHER = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
HASHED = paramiko.HostKeys.hash_host("[box]:22022", "|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|")


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        ("box", "box", True),
        ("other,box", "box", True),
        ("other", "box", False),
        ("*.example", "box.example", True),
        ("*.example,!box.example", "box.example", False),
        ("[box]:22022", "[box]:22022", True),
        ("box", "[box]:22022", False),
        (HASHED, "[box]:22022", True),
        (HASHED, "box", False),
        ("# box", "box", False),
    ],
)
def test_who_a_line_is_about(tmp_path: Path, names: str, name: str, found: bool) -> None:
    (tmp_path / "known").write_text(f"{names} {KEY.get_name()} {KEY.get_base64()} comment\n")
    known = KnownHosts([tmp_path / "known", tmp_path / "not-there"])
    assert bool(known.kinds(name)) is found
    if found:
        known.check(name, KEY)
        with pytest.raises(HostKeyError, match="CHANGED"):
            known.check(name, OTHER)
    else:
        with pytest.raises(HostKeyError, match="not known"):
            known.check(name, KEY)


def test_a_revoked_key(tmp_path: Path) -> None:
    line = f"{KEY.get_name()} {KEY.get_base64()}"
    (tmp_path / "known").write_text(f"box {line}\n@revoked * {line}\n")
    with pytest.raises(HostKeyError, match="revoked"):
        KnownHosts([tmp_path / "known"]).check("box", KEY)


def test_a_host_key_error_is_final(tmp_path: Path) -> None:
    with pytest.raises(HostKeyError) as caught:
        KnownHosts([tmp_path / "known"]).check("box", KEY)
    assert not caught.value.retryable


def test_what_is_sent_runs_through_any_shell() -> None:
    line = program.command_line("/opt/my python/bin/python3")
    assert "\n" not in line and "!" not in line
    for shell in ("/bin/sh", "/bin/bash"):
        command = [shell, "-c", program.command_line(sys.executable)]
        for same_bytecode in (None, True, False):
            message = program.message({"op": "list", "directory": "/nonexistent", "usual": ""}, same_bytecode)
            done = subprocess.run(command, input=message, capture_output=True)
            assert done.returncode == 0, done.stderr
            answer = json.dumps({"sandboxes": [], "magic": MAGIC_NUMBER.hex()})
            assert done.stdout == MARK + answer.encode()


def test_a_python_whose_bytecode_is_known_gets_what_it_can_use_alone() -> None:
    request: dict[str, str] = {}
    unknown, same, another = (len(program.message(request, same_bytecode)) for same_bytecode in (None, True, False))
    assert another < same < unknown


def test_what_is_sent_is_as_old_as_it_says() -> None:
    for name, file in program._modules(KEEPER).items():
        ast.parse(file.read_text("utf-8"), name, feature_version=(3, 7))


@pytest.mark.parametrize("version", [OLDEST, *NEWER])
def test_what_is_sent_runs_on_every_python(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    message = program.message({"op": "probe", "directory": None, "usual": "/nonexistent"})
    done = subprocess.run(["/bin/sh", "-c", program.command_line(python)], input=message, capture_output=True)
    assert done.stdout.startswith(MARK), done.stderr
    assert json.loads(done.stdout[len(MARK) :])["python"].startswith(version)
