"""Small parts of the local backend: blocks of user ids, processes by identity, directories and their locks."""

from __future__ import annotations

import json
import marshal
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hermes_core.errors import ProvisionError
from hermes_core.sandbox import uids
from hermes_core.sandbox.local import directories, host, processes, removal
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.sandbox.local.host import SandboxRecord
from hermes_core.sandbox.local.launch import LAUNCHER

ALL = [(0, 4_294_967_295)]


@pytest.mark.parametrize(
    ("user_map", "group_map", "expected"),
    [
        (ALL, ALL, (uids.FIRST_UID, uids.BLOCKS)),
        ([(0, 65_536)], ALL, (20_000, (65_536 - 20_000) // 512)),
        ([(0, 1), (1, 65_536)], [(0, 1), (1, 65_536)], (20_000, (65_537 - 20_000) // 512)),
        ([(0, 1)], [(0, 1)], (0, 0)),
        (ALL, [(0, 1)], (0, 0)),
        ([(0, 20_511)], ALL, (0, 0)),
        ([(0, 20_512)], ALL, (20_000, 1)),
        ([], [], (0, 0)),
    ],
)
def test_blocks_lie_within_the_id_map(user_map: list, group_map: list, expected: tuple[int, int]) -> None:
    assert uids.choose_range(user_map, group_map) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one id")
def test_a_block_is_held_until_the_last_holder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "choose_range", lambda *_: (1_000_000, 2))
    files = (str(tmp_path / "no" / "file"), str(tmp_path / "uids"))
    one, other = uids.reserve(files), uids.reserve(files)
    assert {one.uid_base, other.uid_base} == {1_000_000, 1_000_512}
    with pytest.raises(ProvisionError, match="all 2 blocks"):
        uids.reserve(files)
    with one:
        child = subprocess.Popen(["sleep", "60"], pass_fds=one.descriptors)
    assert one.descriptors == ()
    with pytest.raises(ProvisionError):
        uids.reserve(files)
    child.kill()
    child.wait()
    again = uids.reserve(files)
    assert again.uid_base == one.uid_base
    again.close()
    again.close()
    other.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["uids"]
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == tmp_path / "uids"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another owner")
def test_a_lock_file_of_someone_else_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "uids").write_text("")
    os.chown(tmp_path / "uids", 12345, 12345)
    with pytest.raises(ProvisionError, match="someone else"):
        uids.reserve((str(tmp_path / "uids"),))
    (tmp_path / "link").symlink_to(tmp_path / "uids")
    with pytest.raises(ProvisionError, match="Too many levels"):
        uids.reserve((str(tmp_path / "link"), str(tmp_path / "other")))


def test_without_room_in_the_id_map_a_block_has_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "choose_range", lambda *_: (0, 0))
    with uids.reserve() as block:
        assert (block.uid_base, block.descriptors) == (None, ())


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one id")
def test_a_supervisor_without_ids_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from hermes_core.sandbox import uids; from hermes_core.sandbox.local import supervisor\n"
        "uids._lock = lambda *_: False\n"
        f"supervisor.create({{'state_root': {str(tmp_path)!r}, 'sandbox_id': 'a', 'reserve_uids': True}})"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, timeout=60)
    assert "blocks of user ids are taken (end some sandboxes)" in marshal.loads(done.stdout)["error"]
    assert list(tmp_path.iterdir()) == []


def test_a_process_is_known_by_its_start() -> None:
    started = processes.start_time(os.getpid())
    assert started > 0 and processes.alive(os.getpid(), started)
    assert not processes.alive(os.getpid(), started + 1)
    assert processes.start_time(2**22 + 1) == 0 and not processes.alive(2**22 + 1, 0)
    child = subprocess.Popen([sys.executable, "-c", "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 (x'); input()"],
                             stdin=subprocess.PIPE)  # fmt: skip
    assert processes.start_time(child.pid) >= started
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_time(child.pid) == 0  # a zombie does nothing any more
    child.wait()


def test_marked_processes_are_found_the_oldest_first_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"local-test-{os.getpid()}"
    environment = {"PATH": os.environ["PATH"], processes.MARKER: mark}
    children = []
    for _ in range(3):
        children.append(subprocess.Popen(["sleep", "60"], env=environment))
        time.sleep(0.03)  # the kernel counts their starts in ticks of 10 ms
    other = subprocess.Popen(["sleep", "60"], env={**environment, processes.MARKER: mark + "0"})
    listed = os.listdir("/proc")[::-1]  # as if the numbers had begun again
    monkeypatch.setattr(os, "listdir", lambda path: listed)
    assert processes.find_marked(mark) == [child.pid for child in children]
    monkeypatch.undo()
    assert processes.kill_marked(mark)
    assert [child.wait() for child in children] == [-9, -9, -9]
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_directory_belongs_to_who_holds_it(tmp_path: Path) -> None:
    path, holder = directories.claim(str(tmp_path), "local-x")
    assert directories.is_held(path) and not directories.discard_dead(path)
    with pytest.raises(FileExistsError):
        directories.claim(str(tmp_path), "local-x")
    assert directories.leftovers(str(tmp_path)) == []
    assert (tmp_path / "local-x" / "tmp").stat().st_mode & 0o7777 == 0o1777
    os.close(holder)
    assert not directories.is_held(path)
    assert directories.leftovers(str(tmp_path)) == [path]
    assert directories.discard_dead(path)
    assert list(tmp_path.iterdir()) == []
    assert not directories.is_held(path) and not directories.discard_dead(path) and directories.discard(path)


def test_trees_are_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "link").symlink_to(outside)
    (tree / "loop").symlink_to("loop")
    (tree / "a" / "b").chmod(0)
    assert removal.remove_tree(str(tree))
    assert (outside / "precious").exists() and not tree.exists()
    assert removal.remove_tree(str(tree))
    (tmp_path / "link").symlink_to(outside)
    assert not removal.remove_tree(str(tmp_path / "link"))
    assert (outside / "precious").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount")
def test_a_mount_inside_a_tree_is_left_alone(tmp_path: Path, isolates: None) -> None:
    script = """if 1:
        import sys; sys.path[:0] = sys.argv[2:]
        from hermes_core.sandbox.linux import mounts, namespaces
        from hermes_core.sandbox.local import removal
        from pathlib import Path
        namespaces.unshare(mount=True); mounts.make_private()
        tree = Path(sys.argv[1], "tree"); (tree / "a" / "mount").mkdir(parents=True); (tree / "top").mkdir()
        for place in (tree / "a" / "mount", tree / "top"):
            mounts.mount("tmpfs", str(place), "tmpfs", 0); (place / "file").write_text("x")
        assert not removal.remove_tree(str(tree))
        print(sorted(p.read_text() for p in tree.rglob("file")))"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *sys.path], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "['x', 'x']", done.stderr


def test_a_record_that_is_no_record_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "local-1"
    folder.mkdir()
    assert host.find(str(tmp_path), folder.name) is None
    for text in ("", "{}", "[]", '{"supervisor": 1, "init": 2}', '{"supervisor": [1, 2], "init": [1, 2]}', "\0"):
        (folder / "record.json").write_text(text)
        assert host.find(str(tmp_path), folder.name) is None
    values = {"sandbox_id": "local-1", "owner": "o", "creation_id": "l", "isolation": "user", "created": 1.5,
              "user_namespace": False, "supervisor": [1, 2], "init": [3, 4]}  # fmt: skip
    (folder / "record.json").write_text(json.dumps(values))
    assert host.find(str(tmp_path), folder.name) == SandboxRecord.of(values) and SandboxRecord.of(values).is_isolated
    assert host.records(str(tmp_path)) == [SandboxRecord.of(values)]


def test_an_id_is_made_of_any_creation_id() -> None:
    assert host.sandbox_id_of("a") == host.sandbox_id_of("a") != host.sandbox_id_of("b")
    assert host.sandbox_id_of("../../etc/\0").startswith("local-") and "/" not in host.sandbox_id_of("/")


async def test_the_default_state_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert await LocalBackend().list() == []
    (place,) = tmp_path.iterdir()
    assert place.name == f"hermes-rl-{os.geteuid()}" and place.stat().st_mode & 0o777 == 0o711


def test_the_launcher_starts_without_our_package_or_anything_heavy() -> None:
    heavy = ("typing", "dataclasses", "pathlib", "re", "json", "socket", "enum", "pydantic", "asyncio")
    program = f"""if 1:
        import sys
        names = {{"__name__": "launcher", "__file__": {str(LAUNCHER)!r}}}
        exec(open(names["__file__"]).read(), names)
        names["_bare_packages"]()
        from hermes_core.sandbox.local import supervisor
        print([name for name in {heavy!r} if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
