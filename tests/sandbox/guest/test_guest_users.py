"""The names of slots' users: in which lists they are put, and whose lists are left alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_core.sandbox.guest import site as site_module
from hermes_core.sandbox.guest import workspace
from hermes_core.sandbox.guest.loop import Loop
from hermes_core.sandbox.guest.site import Site
from hermes_core.sandbox.linux import users
from hermes_core.sandbox.linux.probe import system_identity

PASSWD = b"root:x:0:0:root:/root:/bin/sh\nodd line\n+::::::\n:::\nagent0:x:1000:1000::/home/agent0:/bin/sh"
GROUP = b"root:x:0:\nagent1:x:1001:\n"
ONE = [(5002, "agent", "/data/home")]


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /etc."""
    monkeypatch.setattr(site_module, "_raise_file_limit", lambda: 1024)
    directory = tmp_path / "etc"
    directory.mkdir()
    monkeypatch.setattr(users, "_ETC", str(directory))
    monkeypatch.setattr(users, "_PATHS", (str(directory / "passwd"), str(directory / "group")))
    return directory


@pytest.fixture
def system(etc: Path) -> Path:
    """The same, with lists."""
    (etc / "passwd").write_bytes(PASSWD)
    (etc / "group").write_bytes(GROUP)
    (etc / "passwd").chmod(0o640)
    return etc


def site_of(tmp_path: Path, mechanism: str, **config: object) -> Site:
    site = Site(Loop(), str(tmp_path))
    site.mechanism, site.base = mechanism, "/data"
    site.config = {"uid_base": 5000, "slots": 2, "own_system": True, "driver_etc": system_identity(), **config}
    return site


def test_what_was_there_stays_as_it_is() -> None:
    passwd, group = users.add((PASSWD, GROUP), ONE)
    assert passwd == b"agent:*:5002:5002:slot of hermes-rl:/data/home:/bin/sh\n" + PASSWD
    assert group == b"agent:*:5002:\n" + GROUP


def test_names_that_are_taken_are_not_given_again() -> None:
    lists = users.add((PASSWD, GROUP), workspace.slot_users("/data", 5000, 2))
    names = [users.name_in(lists, uid) for uid in (5000, 5002, 5003, 1000, 5001)]
    assert names == ["agent-prepare", "agent0_", "agent1_", "agent0", None]


def test_of_an_id_that_has_a_name_ours_counts() -> None:
    lists = users.add((PASSWD, GROUP), [(1000, "agent", "/data/home")])
    assert users.name_in(lists, 1000) == "agent"
    assert users.name_in((PASSWD, GROUP), 1000) == "agent0"


def test_the_names_of_an_earlier_sandbox_are_replaced() -> None:
    earlier = users.add((PASSWD, GROUP), workspace.slot_users("/data", 7000, 3))
    wanted = workspace.slot_users("/data", 5000, 2)
    assert users.add(earlier, wanted) == users.add((PASSWD, GROUP), wanted)


def test_a_home_that_would_spoil_the_lists_is_not_written() -> None:
    for home in ("/data:x", "/data\nroot::0:0::/:/bin/sh"):
        assert users.add((b"", b""), [(5002, "agent", home)])[0] == b"agent:*:5002:5002:slot of hermes-rl:/:/bin/sh\n"


def test_names_are_written_into_the_system_of_a_sandbox(system: Path) -> None:
    for _ in range(2):  # the second time nothing changes
        users.write_system(ONE)
        assert users.read() == users.add((PASSWD, GROUP), ONE)
    assert (system / "passwd").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(system)) == ["group", "passwd"]


def test_a_system_without_lists_gets_them(etc: Path) -> None:
    users.write_system(ONE)
    assert users.name_in(users.read(), 5002) == "agent"
    assert (etc / "passwd").stat().st_mode & 0o777 == 0o644


def _link(etc: Path) -> None:
    (etc / "passwd").rename(etc.parent / "elsewhere")
    (etc / "passwd").symlink_to(etc.parent / "elsewhere")


def _pipe(etc: Path) -> None:
    (etc / "passwd").unlink()
    os.mkfifo(etc / "passwd")


def _huge(etc: Path) -> None:
    (etc / "passwd").write_bytes(b"a:x:1:1::/:/bin/sh\n" * 100_000)


def _linked_etc(etc: Path) -> None:
    etc.rename(etc.parent / "real")
    etc.symlink_to(etc.parent / "real")


@pytest.mark.parametrize("spoil", [_link, _pipe, _huge, _linked_etc])
def test_odd_lists_are_left_alone(system: Path, spoil: Callable[[Path], None]) -> None:
    spoil(system)
    before = {path: path.read_bytes() for path in system.parent.rglob("*") if path.is_file()}
    with pytest.raises(OSError):
        users.write_system(ONE)
    assert {path: path.read_bytes() for path in system.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["", "passwd", "group"])
def test_what_is_mounted_there_is_left_alone(system: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(users.mounts, "read_mounts", lambda: {"/": None, str(system / name): None})
    with pytest.raises(OSError, match="not part of the sandbox's root"):
        users.write_system(ONE)
    assert users.read() == (PASSWD, GROUP)


def test_copies_are_shown_in_place_of_what_is_there(system: Path, tmp_path: Path) -> None:
    (system / "group").unlink()
    lists = users.add((PASSWD, GROUP), ONE)
    assert users.write_copies(lists, str(tmp_path)) == [(str(tmp_path / "passwd"), str(system / "passwd"), False)]
    assert (tmp_path / "passwd").read_bytes() == lists[0]
    assert (system / "passwd").read_bytes() == PASSWD


@pytest.mark.parametrize(
    ("mechanism", "changes", "written"),
    [
        ("user", {"driver_etc": "another kernel/1/2"}, True),
        ("user", {}, False),  # a provider that runs its sandboxes on the driver's host
        ("user", {"driver_etc": "another kernel/1/2", "own_system": False}, False),
        ("namespace", {"driver_etc": "another kernel/1/2"}, False),
        ("shared", {"driver_etc": "another kernel/1/2"}, False),
    ],
)
def test_the_guest_writes_only_to_a_system_of_the_sandboxs_own(
    system: Path, tmp_path: Path, mechanism: str, changes: dict[str, object], written: bool
) -> None:
    site = site_of(tmp_path, mechanism, **changes)
    site._name_users()
    assert (users.read() != (PASSWD, GROUP)) == written
    assert (users.name_in(site.lists, 5003) is not None) == written


def test_a_system_that_cannot_be_written_to_stays_as_it_was(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    site = site_of(tmp_path, "user", driver_etc="another kernel/1/2")
    site._name_users()
    assert users.read() == site.lists == (PASSWD, GROUP)
    assert sorted(os.listdir(system)) == ["group", "passwd"]
    assert "Read-only" in capsys.readouterr().err
