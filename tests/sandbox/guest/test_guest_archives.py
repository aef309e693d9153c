"""Trees into and out of a slot as tar streams."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import pytest

from hermes_core.errors import CommandError

pytestmark = pytest.mark.asyncio(loop_scope="module")


def archive(*members, compression=""):
    """A tar of `(name, content)`, where content is bytes, None (a directory), or a dict of TarInfo's fields."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            elif isinstance(content, dict):
                for field, value in content.items():
                    setattr(member, field, value)
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


async def listed(slot, path="."):
    return [entry.path for entry in await slot.list_dir(path, recursive=True)]


async def refused(slot, data, path="in", **options):
    with pytest.raises(CommandError) as caught:
        await slot.tar_in(path, data, **options)
    return caught.value.code


async def in_pieces(data, size):
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_a_tree_comes_out_as_it_went_in(rig):
    slot, other = await rig.slot(), await rig.slot()
    await slot.run(
        "mkdir -p t/a/b t/empty; printf x >t/a/b/f; printf '#!/bin/sh\\necho ran' >t/run; chmod 755 t/run;"
        "ln -s a/b/f t/link; ln t/a/b/f t/hard; ln -s /nowhere t/dangling; mkfifo t/pipe; touch -d @1000000000 t/a/b/f"
    )
    await slot.write_file("t/\udcff", b"no text")
    await slot.write_file("t/" + "long" * 50, b"long")
    await slot.write_file("t/large", os.urandom(1_000_000))
    data = await slot.tar_out("t")
    await other.tar_in("deep/er", data)
    names = await listed(slot, "t")
    names.remove("pipe")
    assert await listed(other, "deep/er") == names
    assert (await other.read_file("deep/er/large")).data == (await slot.read_file("t/large")).data
    assert (await other.run(["deep/er/run"])).text == "ran\n"
    assert (await other.run("readlink deep/er/link deep/er/dangling")).text == "a/b/f\n/nowhere\n"
    assert (await other.run("stat -c '%h %Y' deep/er/hard")).text == "2 1000000000\n"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {(m.uid, m.gid, m.uname) for m in tar} == {(0, 0, "")}


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
@pytest.mark.parametrize("piece", [1 << 20, 1000])
async def test_archives_are_taken_in_pieces_plain_and_compressed(slot, compression, piece):
    content = os.urandom(300_000)
    packed = archive(("d", None), ("d/f", content), compression=compression)
    await slot.tar_in(".", in_pieces(packed, piece), compression=compression)
    assert (await slot.read_file("d/f")).data == content


async def test_members_that_leave_by_a_link_are_refused(slot):
    await slot.run("mkdir out")
    away = {"type": tarfile.SYMTYPE, "linkname": slot.workspace_dir + "/out"}
    assert await refused(slot, archive(("link", away), ("link/f", b"x"))) == "invalid"
    assert (
        await refused(slot, archive(("up", {"type": tarfile.SYMTYPE, "linkname": ".."}), ("up/f", b"x"))) == "invalid"
    )
    assert await refused(slot, archive(("link", away), ("link", None))) == "invalid"
    hard = {"type": tarfile.LNKTYPE, "linkname": "../secret"}
    await slot.write_file("secret", b"secret")
    assert await refused(slot, archive(("hard", hard))) == "invalid"
    assert (
        await refused(
            slot, archive(("s", {"type": tarfile.SYMTYPE, "linkname": "../secret"}), ("h", hard | {"linkname": "s"}))
        )
        == "invalid"
    )
    assert await listed(slot, "out") == []


async def test_a_link_is_replaced_not_written_through(slot):
    await slot.run("mkdir in; echo keep >keep; ln -s ../keep in/f")
    await slot.tar_in("in", archive(("f", b"new")))
    assert (await slot.read_file("keep")).data == b"keep\n"
    assert (await slot.read_file("in/f")).data == b"new"


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
async def test_devices_and_pipes_in_an_archive_are_refused(slot, kind):
    assert await refused(slot, archive(("x", {"type": kind}))) == "invalid"


async def test_what_is_no_archive_is_refused(slot):
    whole = archive(("f", os.urandom(100_000)))
    packed = gzip.compress(whole)
    for data in (b"", b"x", b"nonsense" * 1000, whole[:700], whole[:50_000], packed):
        assert await refused(slot, data) == "invalid", data[:20]
    for data in (whole, packed[: len(packed) // 2], packed[:9], packed[:20] + bytes(100) + packed[120:]):
        assert await refused(slot, data, compression="gz") == "invalid", data[:20]
    assert await refused(slot, whole, compression="*") == "invalid"


async def test_names_of_every_kind_come_back(slot):
    """Bytes of no encoding, what a header of tar is made of, spaces, and what is long."""
    names = [
        "\udcff",
        "ä",
        "ä\udcff",
        "a\nb",
        "11 path=x\n",
        "GNU.sparse.size=1\n",
        " x ",
        "\\x",
        "././@LongLink",
        "-f",
    ]
    names += ["pax_global_header", "n" * 255, "ö" * 127, "\x01\x7f", "a" * 98 + "é", "a" * 99, "a" * 100, "a" * 101]
    for name in names:
        await slot.write_file(f"t/{name}", name.encode("utf-8", "surrogateescape"))
        await slot.run(["ln", "-s", "--", name, f"t/link to {name}"[:250]], timeout_s=10)
    await slot.tar_in("in", await slot.tar_out("t"))
    assert await listed(slot, "in") == await listed(slot, "t")
    for name in names:
        assert (await slot.read_file(f"in/{name}")).data == name.encode("utf-8", "surrogateescape")
    for where in ("t", "in"):
        links = (await slot.run(f"cd {where} && find . -type l -printf '%p %l\\0' | sort -z | sha256sum")).text
        assert links == (await slot.run("cd t && find . -type l -printf '%p %l\\0' | sort -z | sha256sum")).text


async def test_a_file_of_many_names_is_read_once(slot):
    await slot.run("mkdir t; head -c 3000000 /dev/zero >t/f; for i in $(seq 200); do ln t/f t/$i; done")
    assert len(await slot.tar_out("t")) < 4_000_000


async def test_more_files_than_the_limit_has_room_for(slot):
    await slot.run("mkdir -p t/a/b && cd t && touch $(seq 300) a/$(seq 1) a/b/x")
    with pytest.raises(CommandError, match="too many files") as caught:
        await slot.tar_out("t", max_bytes=300 * 512)
    assert caught.value.code == "too_large"


async def test_a_file_that_is_kept_from_us_is_not_left_out(own_rig):
    """A lease holds up who opens the file: that is no reason to give an archive without it."""
    slot = await own_rig.slot()
    await slot.run("mkdir t; echo x >t/f")
    lease = (
        "import fcntl,time; f=open('t/f'); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK); print(1); time.sleep(60)"
    )
    held = await slot.start(["python3", "-uc", lease.replace("open('t/f')", "open('t/f','r+')")])
    while not (log := await slot.log(held.process_id, wait_s=5)).data:
        assert log.running
    if log.data.strip() != b"1":
        pytest.skip("slots of this level can hold no lease")
    with pytest.raises(CommandError) as caught:
        await slot.tar_out("t")
    assert caught.value.code == "failed"


async def test_a_source_that_fails_ends_it(slot):
    async def source():
        yield archive(("f", bytes(100_000)))[:50_000]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        await slot.tar_in("in", source())
    assert (await slot.run("echo fine")).text == "fine\n"


async def test_deep_members_come_back_and_too_deep_ones_are_refused(slot):
    deep = "/".join(["d"] * 500)
    await slot.tar_in("in", archive((f"{deep}/f", b"x")))
    assert len(await slot.tar_out("in")) > 500 * 512
    assert await refused(slot, archive(("/".join(["d" * 50] * 100), None))) == "invalid"


async def test_a_tree_above_the_limit_is_refused(slot):
    await slot.write_file("t/f", bytes(100_000))
    assert len(await slot.tar_out("t", max_bytes=101_000)) < 120_000
    with pytest.raises(CommandError) as caught:
        await slot.tar_out("t", max_bytes=100_000)
    assert caught.value.code == "too_large"
    await slot.run(["truncate", "-s", "1T", "t/sparse"])
    with pytest.raises(CommandError) as caught:
        await slot.tar_out("t")
    assert caught.value.code == "too_large"


async def test_what_cannot_be_read_is_left_out(own_rig):
    slot = await own_rig.slot()
    await slot.run("mkdir -p t/locked; touch t/locked/f t/f; echo x >t/mine; chmod 000 t/locked t/mine")
    with tarfile.open(fileobj=io.BytesIO(await slot.tar_out("t"))) as tar:
        assert sorted(tar.getnames()) == ["f", "locked"]


@pytest.mark.full
async def test_an_archive_of_a_tree_that_changes_meanwhile_is_whole(slot):
    """Files shrink, vanish and turn into pipes: the archive is whole all the same."""
    await slot.run("mkdir t; for i in $(seq 200); do head -c 20000 /dev/urandom >t/$i; done")
    storm = await slot.start(
        "while :; do for i in $(seq 200); do"
        " : >t/$i; rm t/$i; mkfifo t/$i; rm t/$i; head -c 20000 /dev/zero >t/$i; done; done"
    )
    for _ in range(5):
        with tarfile.open(fileobj=io.BytesIO(await slot.tar_out("t"))) as tar:
            for member in tar:
                assert member.isfile() or member.isdir()
    await slot.kill(storm.process_id, grace_s=0)
