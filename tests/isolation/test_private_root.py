"""Slots that are root of roots of their own: what they can do there, and that none of it gets any further."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.isolation.root_attacks import ATTACKS, LOW_PORT, SETTINGS

KEPT = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18))
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE and SYS_CHROOT."""
LIMIT = 64


@pytest.fixture
def pair(root: Any) -> Any:
    """Slots `a` and `b` of one sandbox of root's."""
    return root.shared("private-root")


def test_it_is_root_inside_and_nobody_outside(pair: Any) -> None:
    status = dict(line.split(":\t") for line in pair.run("a", "cat /proc/self/status").out.strip().split("\n"))
    assert pair.granted == "private-root"
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"0"} and status["Groups"].split() == []
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {KEPT}
    assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
    assert status["Seccomp"] == "2"
    pair.run("a", "touch mine; touch of-another; chown 1000:1000 of-another")
    mine, of_another = (pair.directory() / "data" / "slot_0" / name for name in ("mine", "of-another"))
    assert mine.stat().st_uid > 2_147_483_648 and of_another.stat().st_uid == mine.stat().st_uid + 1000
    pair.run("a", "rm mine of-another")


def test_it_can_do_what_tasks_do(pair: Any) -> None:
    done = pair.run(
        "a",
        "set -e; mkdir /app /tests /logs; echo x >/usr/bin/new; rm /usr/bin/env; mv /usr/share/doc /usr/share/moved\n"
        "echo 'task:x:1234:1234::/home/task:/bin/sh' >>/etc/passwd; echo 'task:*:19000::::::' >>/etc/shadow\n"
        "mkdir /home/task; chown task /home/task; chmod 711 /app; su task -c 'touch ~/his && id -u'\n"
        "cp /bin/sh /usr/local/setuid-sh; chmod 4755 /usr/local/setuid-sh\n"
        "su task -c '/usr/local/setuid-sh -p -c \"id -u\"'\n"
        "chroot / /bin/true; stat -c %U /home/task/his; ls -d /usr/share/moved; echo $HOME",
    )
    assert done.status == 0, done
    assert done.out.split() == ["1234", "0", "task", "/usr/share/moved", "/root"]
    assert pair.python("a", LOW_PORT) == {"80": "ok"}
    pair.reset("a")


def test_what_it_changes_is_its_own_and_ends_with_its_lease(pair: Any) -> None:
    name = f"hermes-test-{uuid.uuid4().hex}"
    places = [
        f"{folder}/{name}" for folder in ("/usr/bin", "/etc", "/opt", "/root", "/tmp", "/var/lib/dpkg", "/", "/run")
    ]
    places = [place for place in places if pair.run("a", f"test -d {os.path.dirname(place)}").status == 0]
    changed = " ".join(places)
    before = pair.run("b", "cat /etc/passwd; ls /usr/bin").out
    made = pair.run("a", f"touch {changed} && rm -rf /usr/bin/env /usr/share/doc && echo x >>/etc/passwd")
    assert made.status == 0, made
    for other in ("b", "preparation"):
        assert pair.run(other, f"ls {changed} 2>/dev/null").out == ""
    assert not any(Path(place).exists() for place in places) and Path("/usr/bin/env").exists()
    pair.call("kill", slot="a")
    assert pair.run("a", f"ls {changed}").status == 0  # its processes are dead, its files are its own still
    pair.reset("a")
    assert pair.run("a", f"ls {changed} 2>/dev/null").out == ""
    assert pair.run("a", "cat /etc/passwd; ls /usr/bin").out == before
    deadline = time.monotonic() + 20
    while left := [folder for folder, _, files in os.walk(pair.directory()) if name in files]:
        assert time.monotonic() < deadline, left  # the trash is emptied soon
        time.sleep(0.1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_but_its_own_is_in_its_reach(pair: Any, attack: str) -> None:
    assert pair.python("a", ATTACKS[attack]) == {}


def test_no_setting_of_the_kernel_can_be_written(pair: Any) -> None:
    assert pair.python("a", SETTINGS) == [[], [], False]
    nodes = {"null", "zero", "full", "random", "urandom", "tty"}
    links = {"fd", "stdin", "stdout", "stderr", "ptmx", "pts", "shm"}
    assert set(pair.run("a", "ls /dev").out.split()) <= nodes | links


def test_it_can_not_end_its_parent(pair: Any) -> None:
    killed = pair.run("a", "kill -9 1; kill -STOP 1; kill -9 -1; echo $$ still here", timeout_s=10)
    assert killed.status in (0, -9, 137), killed
    assert pair.run("a", "echo alive").out == "alive\n"


def test_neighbours_and_the_guest_are_not_there(pair: Any) -> None:
    pair.call("write", slot="b", path="secret", text="of b")
    pair.run("b", "echo of b >/root/secret; echo of b >/tmp/secret")
    paths = ["/data/slot_1", "/data/slot_1/secret", "/data/.hermes", "/data/.slots/slot_1", "/data/.slots/trash"]
    paths += ["/root/secret", "/tmp/secret", "/data/prepared/private", "/data/.slots/slot_0/root", "/tmp/hermes-rl-0"]
    there = [path for path in paths if pair.run("a", ["test", "-e", path]).status == 0]
    assert there == []
    assert pair.run("a", "find / -xdev -name secret 2>/dev/null").out == ""
    program = "import json, os; print(json.dumps([int(name) for name in os.listdir('/proc') if name.isdigit()]))"
    assert 2 <= len(pair.python("a", program)) <= 4
    assert pair.python("a", "import json, socket; print(json.dumps([n for _, n in socket.if_nameindex()]))") == ["lo"]
    pair.reset("b")


@pytest.fixture
def system_file() -> Iterator[Callable[[str, int], Path]]:
    """Makes files of the host in a directory that slots see."""
    folder = Path("/usr/local/share", f"hermes-test-{uuid.uuid4().hex}")
    folder.mkdir()

    def make(name: str, mode: int) -> Path:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("secret of the host")
        path.chmod(mode)
        return path

    yield make
    shutil.rmtree(folder)


@pytest.mark.full
def test_of_the_host_it_sees_what_any_user_may_read(root: Any, system_file: Callable[[str, int], Path]) -> None:
    hidden = [system_file("hidden", 0o600), system_file("of-a-group", 0o640), system_file("closed/file", 0o644)]
    hidden[2].parent.chmod(0o700)
    shown = system_file("shown", 0o644)
    with root.started("private-root", "a") as driver:
        for path in hidden:
            assert driver.run("a", ["cat", str(path)]).status != 0
        assert driver.run("a", ["cat", str(shown)]).out == "secret of the host"
        fields = [line.split(":")[1] for line in driver.run("a", "cat /etc/shadow").out.strip().split("\n")]
        assert fields and set(fields) == {"*"}
        keys = driver.run("a", "cat /etc/ssh/ssh_host_* /etc/ssl/private/* 2>/dev/null | grep -c PRIVATE").out
        assert keys.strip() == "0"


@pytest.mark.full
def test_visible_paths_show_what_any_user_may_read(root: Any) -> None:
    folder = root.account.folder / f"visible-{uuid.uuid4().hex}"
    folder.mkdir()
    (folder / "open").write_text("open")
    (folder / "closed").write_text("closed")
    (folder / "closed").chmod(0o600)
    with root.started("private-root", "a", visible_paths=[str(folder)]) as driver:
        assert (
            driver.run("a", f"cat {folder}/open; cat {folder}/closed; touch {folder}/new; rm {folder}/open").out
            == "open"
        )
    assert (folder / "open").exists() and not (folder / "new").exists()


@pytest.mark.full
def test_processes_are_bounded_whatever_user_they_have(root: Any) -> None:
    bomb = """if 1:
        import os, sys, time
        made = 0
        for uid in range(40):
            if os.fork() == 0:
                try:
                    if uid:
                        os.setuid(1000 + uid)
                    while True:
                        if os.fork() == 0:
                            time.sleep(30)
                            os._exit(0)
                except OSError:
                    time.sleep(30)
                    os._exit(0)
        """
    with root.started("private-root", "a", "b", max_processes=LIMIT) as driver:
        driver.call("start", slot="a", command=["python3", "-I", "-S", "-c", bomb])
        counts = [0]
        while len(counts) < 100 and (counts[-1] < LIMIT // 2 or counts[-1] > counts[-2]):
            time.sleep(0.1)
            counts.append(_processes_of(driver))
        assert LIMIT // 2 <= counts[-1] <= LIMIT + 4, counts
        assert driver.run("b", "for i in 1 2 3 4 5 6 7 8; do true | true; done; echo fine").out == "fine\n"
        driver.reset("a")
        assert driver.run("a", "echo alive").out == "alive\n"


def _processes_of(driver: Any) -> int:
    """How many processes of this host have user ids of the sandbox's roots."""
    first, count = (driver.directory() / "data" / "slot_0").stat().st_uid, 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = dict(line.split(":\t", 1) for line in Path("/proc", name, "status").read_text().splitlines())
            count += first <= int(status["Uid"].split()[0]) < first + 65_536
    return count


def test_what_is_prepared_is_read_only_and_its_private_part_is_hidden(pair: Any) -> None:
    key = uuid.uuid4().hex
    shared = pair.call("prepare", slot="a", key=key, command="echo text >file", private=False)
    private = pair.call("prepare", slot="a", key=key, command="echo text >file", private=True)
    assert pair.run("a", f"cat {shared}/file").out == "text\n"
    assert pair.run("a", f"echo x >{shared}/file; rm -f {shared}/file; chmod 777 {shared}").status != 0
    assert pair.run("b", f"cat {shared}/file; cat {private}/file").out == "text\n"


@pytest.mark.full
def test_a_root_can_start_from_a_directory(root: Any) -> None:
    image = root.account.folder / f"image-{uuid.uuid4().hex}"
    for name in ("usr/bin", "etc", "app", "root"):
        (image / name).mkdir(parents=True)
    (image / "app" / "of-the-image").write_text("here")
    (image / "app" / "of-the-image").chmod(0o600)  # all of an image is the slot's
    (image / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    os.symlink("usr/bin", image / "bin")
    for program in ("sh", "cat", "ls", "touch", "rm"):
        _install(Path(shutil.which(program) or f"/bin/{program}"), image / "usr" / "bin" / program, image)
    with root.started("private-root", "a", "b", root=str(image)) as driver:
        assert driver.run("a", "cat /app/of-the-image").out == "here"
        listed = {path.name for path in image.iterdir()} | {"data", "dev", "proc", "tmp"}
        assert set(driver.run("a", "ls /").out.split()) == listed
        assert driver.run("a", "rm /app/of-the-image && touch /app/new /tmp/new").status == 0
        assert driver.run("b", "ls /app").out == "of-the-image\n"
    assert os.listdir(image / "app") == ["of-the-image"]


def _install(program: Path, target: Path, image: Path) -> None:
    """Copy a program and the libraries that it needs."""
    shutil.copy(program, target)
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    for path in (Path(word) for word in listed.split() if word.startswith("/")):
        copy = image / str(path)[1:]
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            shutil.copy(path, copy)


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "level", "reason"),
    [
        ("/", "private-root", "no usr"),
        ("relative", "private-root", "no usr"),
        ("/usr", "namespace", "level 'private-root'"),
    ],
)
def test_a_directory_that_is_no_system_is_refused(root: Any, path: str, level: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason) as refused, root.started(level, "a", root=path):
        pass
    assert refused.value.kind == "PolicyError"


@pytest.mark.full
def test_a_directory_without_programs_is_refused(root: Any) -> None:
    image = root.account.folder / f"image-{uuid.uuid4().hex}"
    (image / "usr").mkdir(parents=True)
    with pytest.raises(Exception, match="no /bin/sh: below /image") as refused:
        root.shared("private-root", root=str(image))
    assert refused.value.kind == "PolicyError"


@pytest.mark.full
def test_an_ordinary_users_driver_is_refused(ordinary: Any) -> None:
    with pytest.raises(Exception, match="can't grant isolation 'private-root'") as refused:
        ordinary.shared("private-root")
    assert refused.value.kind == "PolicyError"


def test_files_go_in_and_out_as_root(pair: Any) -> None:
    pair.call("write", slot="a", path="/usr/share/new-file", text="text")
    assert pair.call("read", slot="a", path="/usr/share/new-file") == "text"
    assert pair.run("a", "stat -c '%u %a' /usr/share/new-file").out.startswith("0 ")
    spooled = pair.run("a", "echo spooled", spool=True).spool
    assert pair.run("a", ["cat", spooled]).out == "spooled\n"
    assert stat.S_ISDIR((pair.directory() / "data").stat().st_mode)
    assert pair.run("b", ["test", "-e", "/usr/share/new-file"]).status != 0
    pair.reset("a")


@pytest.mark.full
def test_a_shared_network_is_the_sandboxs_and_gives_no_power_over_it(root: Any) -> None:
    names = "import json, socket; print(json.dumps(sorted(name for _, name in socket.if_nameindex())))"
    with root.started("private-root", "a", share_network=True) as driver:
        assert driver.python("a", names) == driver.python("preparation", names)
        assert driver.python("a", ATTACKS["kernel"]) == {}
        assert driver.run("a", "ip link set lo down 2>/dev/null; ip addr add 10.9.9.9/32 dev lo").status != 0
    with pytest.raises(Exception, match="for slots of level 'private-root'"):
        root.shared("namespace", share_network=True)
