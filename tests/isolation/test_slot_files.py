"""Files: a slot's own, what is prepared, the guest's, and every way from one to the other."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

REACH = """if 1:
    import errno, json, os, socket, sys
    def outcome(call, *arguments):
        try:
            call(*arguments)
        except OSError as error:
            return errno.errorcode[error.errno]
        return "ok"
    def connect(path):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    done = {}
    for path in sys.argv[1:]:
        done[path] = {
            "read": outcome(lambda: open(path).close()),
            "write": outcome(lambda: open(path, "r+").close()),
            "list": outcome(os.listdir, path),
            "create": outcome(lambda: open(path + "/planted", "x").close()),
            "rename": outcome(os.rename, path, path + "-moved"),
            "chmod": outcome(os.chmod, path, 0o777),
            "remove": outcome(os.unlink, path),
            "connect": outcome(connect, path),
        }
    print(json.dumps({path: [what for what in each if each[what] == "ok"] for path, each in done.items()}))
"""


def test_the_guests_directory_is_out_of_reach(pair: Any) -> None:
    paths = [f"/data/.hermes{name}" for name in ("", "/guest.sock", "/heartbeat", "/lock", "/log", "/scratch")]
    paths += ["/data/.slots/trash", "/data/.slots/slot_1", "/data/.slots/prepare", "/data/slot_1", "/data/slot_2"]
    assert pair.python("a", REACH, *paths) == {path: [] for path in paths}
    assert "planted" not in os.listdir(pair.directory() / "data" / ".hermes")


def test_directories_have_the_rights_that_they_should_have(pair: Any) -> None:
    data = pair.directory() / "data"
    if not os.access(data, os.R_OK):
        pytest.skip("they are root's")

    def mode(path: str) -> int:
        return stat.S_IMODE((data / path).stat().st_mode)

    assert mode("..") == 0o700
    assert mode(".") == mode(".slots") == 0o711
    assert mode(".hermes") == mode(".slots/trash") == mode("prepared/private") == 0o700
    for slot in (0, 1):
        assert mode(f"slot_{slot}") == mode(f".slots/slot_{slot}/home") == mode(f".slots/slot_{slot}/tmp") == 0o700
        if pair.granted == "user":
            assert mode(f".slots/slot_{slot}") == 0o750
            assert (data / f"slot_{slot}").stat().st_uid == (data / f".slots/slot_{slot}").stat().st_gid


def test_a_link_out_of_the_slot_shows_what_its_user_could_read_anyway(pair: Any) -> None:
    name = uuid.uuid4().hex
    pair.call("write", slot="b", path=name, text="text")
    for target in (f"{pair.workspace('b')}/{name}", "/data/.hermes/heartbeat", "/etc/shadow", f"/proc/1/root/{name}"):
        pair.run("a", ["ln", "-sfn", target, "link"])
        for attempt in (lambda: pair.call("read", slot="a", path="link"), lambda: _write(pair, "link")):
            with pytest.raises(Exception, match=r"[Pp]ermission|such file|[Rr]ead-only") as refused:
                attempt()
            assert refused.value.kind == "CommandError"
    pair.run("a", "rm link")
    assert pair.call("read", slot="b", path=name) == "text"


def _write(driver: Any, path: str) -> None:
    driver.call("write", slot="a", path=path, text="other text")


def test_others_files_can_not_be_linked_to(pair: Any) -> None:
    name = uuid.uuid4().hex
    pair.call("write", slot="b", path=name, text="text")
    for target in (f"{pair.workspace('b')}/{name}", "/etc/passwd", "/usr/bin/env"):
        assert pair.run("a", ["ln", target, "hard"]).status != 0


def test_what_is_prepared_can_be_read_and_not_changed(pair: Any) -> None:
    key = uuid.uuid4().hex
    make = "mkdir d && echo text >d/file && echo '#!/bin/sh' >run && chmod 777 run && chmod -R 777 d && chmod 777 ."
    shared = pair.call("prepare", slot="a", key=key, command=make, private=False)
    for slot in ("a", "b"):
        assert pair.run(slot, f"cat {shared}/d/file && {shared}/run").out == "text\n"
        paths = [shared, f"{shared}/d", f"{shared}/d/file", "/data/prepared/shared", "/data/prepared"]
        reach = pair.python(slot, REACH, *paths)
        assert {what for each in reach.values() for what in each} <= {"read", "list"}
    private = pair.call("prepare", slot="a", key=key, command="echo text >file; chmod -R 777 .", private=True)
    assert pair.python("a", REACH, private, f"{private}/file", "/data/prepared/private") == {
        path: [] for path in (private, f"{private}/file", "/data/prepared/private")
    }


def test_a_link_of_the_preparation_users_is_not_followed_by_root(root: Any) -> None:
    with root.started("user", "a") as driver:
        state = driver.directory() / "data" / ".hermes"
        before = state.stat()
        trap = "cd /data/prepared && mv shared away && ln -s /data/.hermes shared"
        driver.run("preparation", trap)
        driver.run("preparation", ["python3", "-I", "-S", "-c", "import os; os.kill(os.getppid(), 9)"])
        assert driver.run("preparation", "test -d shared && test ! -L shared && echo made").out == "made\n"
        after = state.stat()
        assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)


def test_spooled_output_is_for_its_slot_alone(pair: Any) -> None:
    spooled = pair.run("b", "echo of b", spool=True).spool
    assert pair.run("b", ["cat", spooled]).out == "of b\n"
    assert pair.run("b", f"echo x >{spooled}").status != 0
    folder = os.path.dirname(spooled)
    assert pair.python("a", REACH, spooled, folder) == {spooled: [], folder: []}


def test_the_next_lease_finds_nothing(pair: Any) -> None:
    mark = uuid.uuid4().hex
    places = [".", "$HOME", "$TMPDIR", "/tmp", "/var/tmp", "/dev/shm"]
    for place in places:
        pair.run("a", f"mkdir -p {place}/{mark}/deep && echo x >{place}/{mark}/deep/f && chmod 0 {place}/{mark}/deep")
    assert pair.run("a", f"ls -d {' '.join(f'{place}/{mark}' for place in places)}").status == 0
    pair.reset("a")
    for slot in ("a", "b"):
        listing = f"ls -A . $HOME $TMPDIR /tmp /var/tmp /dev/shm | grep {mark}"
        assert pair.run(slot, listing).out == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put things into system directories")
def test_a_state_directory_in_a_system_directory_is_hidden(drivers: Any) -> None:
    """To an ordinary user's slots, all files of the others are their own."""
    place = Path(tempfile.mkdtemp(prefix="hermes-isolation-", dir="/opt"))
    place.chmod(0o755)
    state = place / "state"
    state.mkdir()
    try:
        with drivers.started("user", "a", "b", state_dir=state) as driver:
            driver.call("write", slot="b", path="file", text="text")
            path = driver.directory() / "data" / "slot_1" / "file"
            assert path.read_text() == "text"
            paths = [str(path), str(driver.directory()), str(state)]
            assert set(map(str, driver.python("a", REACH, *paths).values())) <= {"[]", "['list']"}
            assert driver.run("a", ["ls", "-A", str(state)]).out == ""
            assert json.dumps(driver.python("a", REACH, str(place))) == json.dumps({str(place): ["list"]})
    finally:
        state.rmdir()
        place.rmdir()
