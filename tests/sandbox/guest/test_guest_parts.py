"""Parts of the guest by themselves: its loop, its drains, removing and sweeping trees."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hermes_core.sandbox.guest import background
from hermes_core.sandbox.guest.connection import DriverConnection, Outlet
from hermes_core.sandbox.guest.loop import Loop
from hermes_core.sandbox.guest.parent import Parent
from hermes_core.sandbox.guest.streams import Drains, Input, Spool, Stream
from hermes_core.sandbox.guest.wire import CHUNK, WINDOW
from hermes_core.sandbox.linux import descriptors, processes, removal

ROOT = os.geteuid() == 0
NOBODY, SOMEBODY = 54_331, 54_332


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop in this process, which gets its signal handling back."""
    handler = signal.getsignal(signal.SIGCHLD)
    loop = Loop()
    yield loop
    os.close(signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGCHLD, handler)
    os.close(loop._wake)


def run_for(loop, seconds):
    loop.later(seconds, loop.stop)
    loop._running = True
    loop.run()


# --- the loop -------------------------------------------------------------------------------------------------------


def test_timers_come_in_order_and_cancelled_ones_never(loop):
    called = []
    loop.later(0.03, lambda: called.append("second"))
    loop.later(0.01, lambda: called.append("first"))
    loop.later(0.02, lambda: called.append("never")).cancel()
    run_for(loop, 0.06)
    assert called == ["first", "second"]


def test_a_call_for_the_end_of_a_round_waits_for_no_event(loop):
    called = []
    loop.after(lambda: loop.after(lambda: (called.append(time.monotonic()), loop.stop())))
    began = time.monotonic()
    run_for(loop, 5)
    assert called and called[0] - began < 4


def test_a_channel_that_takes_all_at_once_lets_paused_streams_go_on(loop):
    """As when the driver reads as quickly as the guest writes, so that there is no wait for the channel."""
    ours, bridge = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unread, output = os.pipe()
    fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
    source, silent = os.pipe()
    resumed = []

    def go_on():
        resumed.append(connection.is_congested())
        loop.stop()

    outlet = Outlet()
    connection = DriverConnection(loop, ours, lambda *_: None, lambda _: None, outlet.resume_paused)
    outlet.connection = connection
    with bridge, open(unread, "rb"), open(silent, "wb"):
        descriptors.send(bridge, b"x", (source, output))
        os.close(source)
        os.close(output)
        loop.later(0.05, lambda: fill(connection, outlet, go_on))
        run_for(loop, 3)
        connection.close()
    assert resumed == [False]


def fill(connection, outlet, resume):
    """Queue more than streams may, as one round of the loop does, and pause a stream."""
    while not outlet.is_congested():
        connection.send({"ev": "out", "id": "a", "off": 0}, bytes(CHUNK))
    outlet.pause(resume)


def test_cancelled_timers_do_not_pile_up(loop):
    for _ in range(10_000):
        loop.later(3600, lambda: None).cancel()
    assert len(loop._timers) < 1000
    kept = [loop.later(3600, lambda: None) for _ in range(10)]
    for _ in range(1000):
        timer = loop.later(1e12, lambda: None)
        timer.cancel()
        timer.cancel()
    assert sum(entry[2] in kept for entry in loop._timers) == 10
    run_for(loop, 0.01)


def test_a_timer_may_cancel_another_that_is_due(loop):
    called = []
    first = loop.later(0.01, lambda: (called.append("first"), second.cancel()))
    second = loop.later(0.01, lambda: called.append("second"))
    assert first.due <= second.due
    run_for(loop, 0.05)
    assert called == ["first"]


def test_far_away_timers_are_no_error_to_the_kernel(loop):
    loop.later(1e300, lambda: None)
    loop.later(0, loop.stop)
    loop.run()


def child(status, delay=0.0):
    pid = os.fork()
    if pid == 0:
        time.sleep(delay)
        os._exit(status)
    return pid


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_children_are_reaped_watched_early_or_late(loop):
    began, statuses = time.monotonic(), []
    early = child(3, 0.02)
    loop.watch(early, statuses.append, began)
    late = child(4)
    while len(statuses) < 1 or Path(f"/proc/{late}").exists():  # until the loop has reaped both
        run_for(loop, 0.01)
    loop.watch(late, statuses.append, began)
    assert statuses == [3 << 8], "never from within `watch`"
    while len(statuses) < 2:
        run_for(loop, 0.01)
    assert statuses == [3 << 8, 4 << 8]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_earlier_process_of_the_same_pid_is_not_taken_for_the_new_one(loop):
    statuses = []
    stranger = child(5)
    while Path(f"/proc/{stranger}").exists():  # until the loop has reaped it
        run_for(loop, 0.01)
    loop.watch(stranger, statuses.append, time.monotonic())
    run_for(loop, 0.01)
    assert statuses == []


def test_what_is_removed_is_not_called(loop):
    reader, writer = os.pipe()
    other, other_writer = os.pipe()
    called = []
    for fd, rival in ((reader, other), (other, reader)):
        loop.add(
            fd,
            select.POLLIN,
            lambda _events, fd=fd, rival=rival: (called.append(fd), os.read(fd, 1), loop.remove(rival)),
        )
    os.write(writer, b"x")
    os.write(other_writer, b"x")
    run_for(loop, 0.02)
    assert len(called) == 1
    loop.remove(called[0])
    loop.remove(called[0])
    for fd in (reader, writer, other, other_writer):
        os.close(fd)


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_stops_at_its_window_and_resumes_where_the_reader_is():
    sent = []
    stream = Stream("id", lambda header, data: sent.append((header["off"], data)), lambda: False)
    while stream.room():
        stream.feed(b"x" * stream.room())
    assert stream.total == WINDOW
    stream.confirm(WINDOW // 2)
    assert stream.room() == CHUNK
    stream.hold()
    assert stream.room() == 0, "on a new channel the reader says first what it has"
    sent.clear()
    stream.resend(WINDOW // 2 + 1)
    assert sent[0][0] <= WINDOW // 2 + 1 < sent[0][0] + len(sent[0][1])
    assert sent[-1][0] + len(sent[-1][1]) == stream.total


def test_the_end_of_a_stream_is_said_again_with_the_rest():
    sent = []
    stream = Stream(
        "id", lambda header, data: sent.append((header["off"], data, header.get("eof", False))), lambda: False
    )
    stream.feed(b"abc")
    stream.end()
    first = sent.copy()
    assert first == [(0, b"abc", False), (3, b"", True)]
    stream.hold()
    sent.clear()
    stream.resend(0)
    assert sent == first
    sent.clear()
    stream.resend(3)
    assert sent == [(3, b"", True)]


@pytest.mark.parametrize("whole", [True, False])
def test_the_end_of_an_input_says_whether_all_was_taken(loop, whole):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ends = []
    stdin = Input(loop, writer, "id", lambda *_: None, on_end=ends.append)
    stdin.add(0, b"abc" if whole else bytes(200_000), True)
    os.close(reader)
    run_for(loop, 0.02)
    stdin.close()
    assert ends == [whole]


def test_input_takes_each_byte_once(loop):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken = []
    stdin = Input(loop, writer, "id", lambda header, _: taken.append(header["off"]))
    stdin.add(0, b"abc", False)
    stdin.add(0, b"abcdef", False)
    stdin.add(9, b"behind a gap", True)
    stdin.add(3, b"defghi", True)
    stdin.add(0, b"abcdefghi", True)
    assert os.read(reader, 100) == b"abcdefghi" and os.read(reader, 1) == b""
    assert taken[-1] == 9 and stdin.is_closed
    os.close(reader)


def test_input_that_nobody_reads_counts_as_taken(loop):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken = []
    stdin = Input(loop, writer, "id", lambda header, _: taken.append(header["off"]))
    stdin.add(0, bytes(200_000), False)
    assert 0 < stdin.pending() < 200_000
    os.close(reader)
    run_for(loop, 0.02)
    assert taken[-1] == 200_000 and stdin.pending() == 0 and stdin.is_closed
    stdin.add(200_000, b"more", False)
    assert taken[-1] == 200_004


def test_drains_are_bounded_in_number_and_rate(loop):
    drains = Drains(loop)
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(Drains.MOST + 5)]
    for reader, _ in pipes:
        drains.add(reader)
    with pytest.raises(BrokenPipeError):
        os.write(pipes[0][1], b"x")
    writers = [writer for _, writer in pipes[5:]]
    written = 0

    def write():
        nonlocal written
        for writer in writers:
            try:
                written += os.write(writer, bytes(65536))
            except BlockingIOError:
                pass
        loop.later(0, write)

    write()
    run_for(loop, 0.3)
    assert 0 < written < 10 * Drains.TICK_BYTES + len(writers) * 65536
    drains.close()
    for _, writer in pipes:
        os.close(writer)


def test_a_spool_has_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(Spool, "LIMIT", 1000)
    spool = Spool(str(tmp_path / "log"), None)
    for _ in range(30):
        spool.write(b"x" * 70)
    spool.close()
    assert (tmp_path / "log").stat().st_size == 1000


# --- trees ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not ROOT, reason="about what root does for others")
def test_sweeping_removes_what_some_users_own(tmp_path):
    for user in (NOBODY, SOMEBODY):
        (tmp_path / f"file-{user}").write_text("x")
        (tmp_path / f"dir-{user}" / "a" / "b").mkdir(parents=True)
        (tmp_path / f"dir-{user}" / "a" / "b" / "f").write_text("x")
        (tmp_path / f"link-{user}").symlink_to(tmp_path / f"dir-{SOMEBODY}")
        (tmp_path / f"dir-{user}" / "link").symlink_to(tmp_path / f"dir-{SOMEBODY}")
        for path in tmp_path.rglob(f"*{user}*"):
            os.chown(path, user, user, follow_symlinks=False)
            for below in path.rglob("*") if not path.is_symlink() else ():
                os.chown(below, user, user, follow_symlinks=False)
    # Each has something in a directory of the other.
    (tmp_path / f"dir-{SOMEBODY}" / "a").chmod(0o777)
    guest = tmp_path / f"dir-{SOMEBODY}" / "a" / "of-nobody"
    guest.write_text("x")
    os.chown(guest, NOBODY, NOBODY)
    (tmp_path / f"dir-{SOMEBODY}").chmod(0o777)
    host = tmp_path / f"dir-{NOBODY}" / "a" / "b" / "of-somebody"
    host.mkdir(mode=0o777)
    (host / "f").write_text("x")
    (host / "mine").write_text("x")
    os.chown(host, SOMEBODY, SOMEBODY)
    os.chown(host / "f", SOMEBODY, SOMEBODY)
    os.chown(host / "mine", NOBODY, NOBODY)
    host.chmod(0o777)
    removal.sweep([str(tmp_path), str(tmp_path / "missing"), str(tmp_path / f"link-{NOBODY}")], [NOBODY])
    left = {path.lstat().st_uid for path in tmp_path.rglob("*")}
    assert NOBODY not in left and SOMEBODY in left
    assert (tmp_path / f"dir-{SOMEBODY}" / "a" / "b" / "f").exists() and (tmp_path / f"link-{SOMEBODY}").is_symlink()
    kept = list(tmp_path.rglob("of-somebody"))
    assert len(kept) == 1 and sorted(os.listdir(kept[0])) == ["f"], "moved, whole but for what is not its own"


@pytest.mark.skipif(not ROOT, reason="about what root does for others")
def test_sweeping_is_not_led_astray(tmp_path):
    """A directory that becomes a link under our hands, a name that is gone, a tree without end."""
    deep = tmp_path / "common"
    deep.mkdir()
    deep.chmod(0o777)
    place = deep
    for _ in range(100):
        place = place / "d"
        place.mkdir()
        place.chmod(0o777)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("x")
    os.chown(outside / "f", NOBODY, NOBODY)
    (deep / "link").symlink_to(outside)
    removal.sweep([str(deep)], [NOBODY])
    assert (outside / "f").exists()


def test_world_writable_directories_are_found(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b").chmod(0o1777)
    (tmp_path / "skipped").mkdir()
    (tmp_path / "skipped").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    for name, mode in (("closed", 0o700), ("group", 0o710)):
        (tmp_path / name / "open").mkdir(parents=True)
        (tmp_path / name / "open").chmod(0o777)
        (tmp_path / name).chmod(mode)
    tmp_path.chmod(0o755)
    real = os.lstat

    def lstat(path, **arguments):
        return real(str(tmp_path) if path == "/" else path, **arguments)

    scan = os.scandir
    monkeypatch.setattr(removal.os, "lstat", lstat)
    monkeypatch.setattr(removal.os, "scandir", lambda path: scan(str(tmp_path) if path == "/" else path))
    found = removal.find_world_writable({str(tmp_path / "skipped")}, 60.0)
    assert sorted(found) == [str(tmp_path / "a" / "b"), str(tmp_path / "group" / "open")]
    assert removal.find_world_writable(set(), 0.0) == []


MOUNTED = """
from hermes_core.sandbox.linux import mounts, namespaces, removal
namespaces.unshare(mount=True)
mounts.make_private()
top = "/mnt"  # of this mount namespace alone
def make(path, mode=0o777):
    removal.os.makedirs(top + path)
    removal.os.chmod(top + path, mode)
mounts.mount("tmpfs", top, "tmpfs", 0, "mode=755")
for path in ("/a/one", "/a/two/deep", "/a/file system", "/a/writable"):
    make(path)
mounts.mount("tmpfs", top + "/a/file system", "tmpfs", 0, "mode=755")
make("/a/file system/in/it")
mounts.mount("", top + "/a/writable", "tmpfs", 0, "mode=777")
mounts.mount(None, top, None, 0x1021)
print([path[len(top):] for path in removal.find_world_writable({"/proc", "/sys"}, 60.0) if path.startswith(top)])
"""


@pytest.mark.skipif(not ROOT, reason="root mounts")
def test_world_writable_directories_are_found_on_what_is_mounted_over_what_is_read_only(isolates):
    done = subprocess.run([sys.executable, "-c", MOUNTED], capture_output=True, text=True, check=True)
    assert done.stdout == "['/a/writable', '/a/file system/in/it']\n"


def test_world_writable_directories_are_found_where_the_root_is_no_mount(monkeypatch):
    table = {path: mount for path, mount in removal.mounts.read_mounts().items() if path != "/"}

    def found():
        return set(removal.find_world_writable({"/proc", "/sys", "/home", "/opt", "/usr"}, 60.0))

    before = found()
    with monkeypatch.context() as patched:
        patched.setattr(removal.mounts, "read_mounts", lambda: table)
        there = found()
    stayed = before & found()  # other tests' containers come and go
    assert stayed and stayed <= there


def test_a_missing_tree_is_removed_already(tmp_path):
    removal.remove_tree(str(tmp_path / "missing"))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        removal.remove_tree(str(tmp_path / "link"))


# --- background processes -------------------------------------------------------------------------------------------


def test_what_has_ended_is_kept_from_its_end_on(monkeypatch):
    def process(ended):
        return SimpleNamespace(execution=SimpleNamespace(ended=ended is not None), ended=ended or 0.0)

    now = time.monotonic()
    known = {"old": process(now - 1801), "new": process(now - 1790), "runs": process(None)}
    for identity, each in known.items():
        each.id = identity
    background._forget_old(known)
    assert list(known) == ["new", "runs"]


def test_a_shell_is_killed_before_its_child(monkeypatch):
    """Or it would report the child's end, and seem to have ended by itself."""
    family, sent = [907, 908, 912], []
    looks = iter([family, [], [], []])
    monkeypatch.setattr(processes, "send_signal", lambda pid, number: sent.append(pid))
    assert Parent._kill_listed(SimpleNamespace(_family=lambda pid: next(looks), _reap=lambda: None), 907)
    assert sent == family
    assert next(looks, None) is None
