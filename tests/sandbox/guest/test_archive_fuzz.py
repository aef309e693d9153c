"""No bytes that come to a parser of the guest's, or of ours, make it crash, hang, or write outside of its directory."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import signal
import stat
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import CommandResult
from hermes_core.sandbox.direct.files import check_archive, file_stat, parse_list, prepend_entry, read_all
from hermes_core.sandbox.guest import files
from hermes_core.sandbox.guest_client.commands import RemoteCommands

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

EXAMPLES = int(os.environ.get("HERMES_FUZZ_EXAMPLES", "25"))
LONGEST_S = 20.0

fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)

ODD = [
    b"\x1f\x8b\x08\x04x",
    b"BZh91AY&SY",
    b"\xfd7zXZ",
    b"11 path=x\n",
    b"././@LongLink",
    b"\xff",
    b" ",
    b"-",
    b"n" * 255,
]
names = st.one_of(
    st.sampled_from(ODD),
    st.binary(min_size=1, max_size=110).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"0")),
).filter(lambda name: name not in (b".", b".."))
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)
entries = st.one_of(
    st.binary(max_size=2000).map(lambda content: ("file", content)),
    paths.map(lambda target: ("link", target)),
    st.just(("directory", b"")),
    st.just(("hard link", b"")),
    st.just(("pipe", b"")),
)
trees = st.lists(st.tuples(paths, entries, st.sampled_from([0o644, 0o755, 0o600, 0o400])), max_size=8)


def operate(name, arguments, data=b""):
    """Run one of the guest's file operations in a child, as the guest does: its outcome and its output."""
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if not pid:
        try:
            for fd, (reader, writer) in enumerate(pipes):
                os.dup2(reader if fd == 0 else writer, fd)
            os.closerange(3, 100)
            os._exit(files.run(name, arguments))
        finally:
            os._exit(99)
    os.close(pipes[0][0])
    os.close(pipes[1][1])
    os.close(pipes[2][1])
    feed, out, err = pipes[0][1], pipes[1][0], pipes[2][0]
    found = {out: b"", err: b""}
    writing, reading, until = [feed], [out, err], time.monotonic() + LONGEST_S
    os.set_blocking(feed, False)
    while reading:
        ready = select.select(reading, writing, [], max(0, until - time.monotonic()))
        if not any(ready):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("it hangs")
        for fd in ready[0]:
            piece = os.read(fd, 1 << 16)
            found[fd] += piece
            if not piece:
                reading.remove(fd)
                os.close(fd)
        for fd in ready[1]:
            try:
                data = data[os.write(fd, data[: 1 << 16]) :]
            except BrokenPipeError:
                data = b""
            if not data:
                writing.remove(fd)
                os.close(fd)
    for fd in writing:
        os.close(fd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1), (status, found[err])
    outcome = json.loads(found[err])
    assert outcome.get("ok", False) is (status == 0)
    assert status == 0 or outcome["code"], outcome
    return outcome, found[out]


def plant(root, tree):
    """Make the entries of a tree; those that can't be are none."""
    for path, (kind, content), mode in tree:
        place = os.path.join(os.fsencode(root), path)
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if kind == "directory":
                os.mkdir(place)
            elif kind == "link":
                os.symlink(content, place)
            elif kind == "hard link":
                os.link(os.path.join(os.fsencode(root), b"first"), place)
            elif kind == "pipe":
                os.mkfifo(place)
            else:
                with open(place, "xb") as file:
                    file.write(content)
                os.chmod(place, mode)
        except OSError:
            continue


def described(root):
    """All that is in a directory but pipes: kinds, rights, contents."""
    found = {}
    for folder, directories, others in os.walk(os.fsencode(root)):
        for name in directories + others:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            content = b""
            if stat.S_ISFIFO(info.st_mode):
                continue
            if stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                content = Path(os.fsdecode(path)).read_bytes() + b"%d" % info.st_nlink
            mode = 0 if stat.S_ISLNK(info.st_mode) else info.st_mode | 0o600
            found[os.path.relpath(path, os.fsencode(root))] = (mode, content)
    return found


@fuzz
@given(trees)
def test_any_tree_comes_out_as_it_went_in(tree):
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "from").mkdir()
        Path(scratch, "from", "first").write_bytes(b"first")
        plant(f"{scratch}/from", tree)
        outcome, data = operate("tar_out", {"path": f"{scratch}/from", "max_bytes": 1 << 20})
        assert outcome["ok"]
        outcome, _ = operate("tar_in", {"path": f"{scratch}/to"}, data)
        assert outcome["ok"], outcome
        assert described(f"{scratch}/to") == described(f"{scratch}/from")


def whole():
    """An archive with a member of every kind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("é" * 60, tarfile.REGTYPE), ("l", tarfile.SYMTYPE), ("x", b"g")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "d" if kind == tarfile.SYMTYPE else ""
            member.pax_headers = {"comment": "c" * 600}
            member.size = 700 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        hard = tarfile.TarInfo("h")
        hard.type, hard.linkname = tarfile.LNKTYPE, "é" * 60
        tar.addfile(hard)
    return buffer.getvalue()


WHOLE = whole()
NUMBERS = [
    b"77777777777\0",
    b"\xff" * 12,
    b"\x80" + b"\xff" * 11,
    b"\x80" + bytes(10) + b"\1",
    bytes(12),
    b"-1         \0",
]
TYPES = [b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"\0", b"A"]
PIECES = [
    b"../",
    b"/",
    b"./",
    b"GNU.sparse.size=9",
    b"22 GNU.sparse.map=0,1\n",
    b"size=-1\n",
    b"9 path=a\n",
    b"99999999 a=b\n",
]


@st.composite
def mangled(draw):
    """The archive, or something like it."""
    data = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 5))):
        block = draw(st.integers(0, len(data) // 512)) * 512
        match draw(st.sampled_from(["size", "type", "piece", "bytes", "cut", "double", "end"])):
            case "size":
                data[block + 124 : block + 136] = draw(st.sampled_from(NUMBERS))
            case "type":
                data[block + 156 : block + 157] = draw(st.sampled_from(TYPES))
            case "piece":
                at, piece = block + draw(st.sampled_from([0, 157, 345, 3])), draw(st.sampled_from(PIECES))
                data[at : at + len(piece)] = piece
            case "bytes":
                piece = draw(st.binary(min_size=1, max_size=40))
                at = draw(st.integers(0, len(data)))
                data[at : at + len(piece)] = piece
            case "cut":
                del data[block : block + 512]
            case "double":
                data[block:block] = data[block : block + 1024]
            case "end":
                del data[draw(st.integers(0, len(data))) :]
    if draw(st.booleans()):
        for at in range(0, len(data) - 511, 512):
            if data[at + 257 : at + 262] == b"ustar":
                data[at + 148 : at + 156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@fuzz
@given(st.one_of(mangled(), st.binary(max_size=3000)), st.sampled_from(["", "", "gz", "bz2", "xz"]))
def test_no_archive_leaves_its_directory(data, compression):
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "beside").write_bytes(b"beside")
        outcome, _ = operate("tar_in", {"path": f"{scratch}/to", "compression": compression}, data)
        assert sorted(os.listdir(scratch)) == ["beside", "to"]
        assert Path(scratch, "beside").read_bytes() == b"beside"
        assert os.stat(f"{scratch}/beside").st_nlink == 1
        if not outcome.get("ok"):
            assert outcome["code"] in (*set(files.CODES.values()), "failed"), outcome


@fuzz
@given(st.one_of(mangled(), st.binary(max_size=3000)), st.sampled_from(["", "gz"]))
def test_an_archive_is_checked_or_refused(data, compression):
    try:
        check_archive(data, compression)
    except CommandError as error:
        assert error.code == "invalid"


@pytest.mark.parametrize("size", [b"\x80" + b"\x7f" * 11, b"\x80" + bytes(3) + b"\xff" * 8])
@pytest.mark.parametrize("kind", [b"0", b"x"])
def test_a_member_of_a_size_that_fits_nowhere_is_refused(size, kind):
    data = bytearray(WHOLE)
    data[124:136], data[156:157] = size, kind
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    with pytest.raises(CommandError) as caught:
        check_archive(bytes(data), "")
    assert caught.value.code == "invalid"


def test_the_first_entry_of_what_a_foreign_tar_is_given_is_ours():
    assert prepend_entry(WHOLE)[:3] == b"./\0"
    check_archive(prepend_entry(WHOLE), "")


@fuzz
@given(
    st.one_of(
        st.binary(max_size=400),
        st.lists(st.sampled_from([b"81a4 1 1\n", b"./a\0", b"./", b"\0", b"\n", b"x"])).map(b"".join),
    )
)
def test_a_listing_is_read_or_refused(answer):
    for read in (parse_list, lambda line: file_stat("p", line)):
        try:
            read(answer)
        except CommandError:
            continue


@fuzz
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(
            lambda value: json.dumps(value).encode()
        ),
        st.just(b"[" * 40_000),
        st.just(b'{"code": 1}'),
        st.just(b"9" * 5000),
    )
)
def test_an_outcome_is_read_or_refused(stderr):
    commands = RemoteCommands(None, 0, "/data/slot_0")
    try:
        outcome = commands._outcome("read", CommandResult(exit_code=1, stderr=stderr))
    except CommandError:
        return
    assert outcome["ok"]


def test_a_stream_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr("hermes_core.sandbox.direct.files.MAX_TAR_IN", 1000)

    async def endless():
        while True:
            yield bytes(100)

    with pytest.raises(CommandError) as caught:
        asyncio.run(read_all(endless()))
    assert caught.value.code == "too_large"
