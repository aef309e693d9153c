"""Trees into and out of a slot, as tar streams."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import expect_refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


def archive(*members: tuple[str, bytes], links: tuple[tuple[str, str], ...] = (), mode: str = "w:") -> bytes:
    """A tar of links, then files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.GNU_FORMAT) as tar:  # type: ignore[call-overload]
        for name, target in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    """The data as a stream."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_a_tar_comes_as_a_stream(kit: Kit) -> None:
    """A tar, plain or compressed with gzip, is taken in pieces of any size."""
    slot = await kit.slot()
    content = os.urandom(300_000)
    plain, packed = archive(("f", content)), archive(("f", content), mode="w:gz")
    for stream, compression in ((pieces(plain, 1000), ""), (pieces(packed, 70_000), "gz")):
        await slot.tar_in("d", stream, compression=compression)  # type: ignore[arg-type]
        if (await slot.read_file("d/f")).data != content:
            pytest.fail("the member has other bytes than the archive")
        await slot.remove("d", recursive=True)


async def test_a_tar_is_never_taken_for_another(kit: Kit) -> None:
    """A plain tar whose first file's name begins as a compressed file does is a plain tar; a compressed one is none."""
    slot = await kit.slot()
    for magic in ("\x1f\udc8b\x08", "BZh9", "\udcfd7zXZ"):
        await slot.tar_in("d", archive((magic, b"x"), ("second", b"y")))
        names = sorted(entry.path for entry in await slot.list_dir("d"))
        assert names == sorted([magic, "second"]), "the files of the archive"
        await slot.remove("d", recursive=True)
    packed = archive(("f", b"x"), mode="w:gz")
    await expect_refusal(slot.tar_in("d", packed), "invalid")


async def test_a_slot_is_cleared(kit: Kit) -> None:
    """`clear` removes all files of the slot, but for the entries of its workspace that are to be kept."""
    slot, other = await kit.slot(), await kit.slot()
    await other.run("mkdir sub; touch sub/f ~/f $TMPDIR/f")
    await slot.run("mkdir -p sub/a gone/b; touch sub/a/f gone/b/f f ~/f $TMPDIR/f; chmod 000 gone/b gone")
    await slot.clear(keep=["sub"])
    left = (await slot.run("find . ~ $TMPDIR -mindepth 1 | sort")).text.split()
    assert left == ["./sub", "./sub/a", "./sub/a/f"], "what is left"
    await slot.clear()
    assert (await slot.run("find . -mindepth 1")).text == "", "what is left of all"
    assert (await other.run("ls sub ~ $TMPDIR | grep -c f$")).text == "3\n", "the neighbour's files"


async def test_a_tree_goes_out_in_pieces(kit: Kit) -> None:
    """`tar_out_to` gives what `tar_out` does."""
    slot = await kit.slot()
    await slot.write_file("t/f", os.urandom(1_000_000))
    found: list[bytes] = []

    async def keep(piece: bytes) -> None:
        found.append(piece)

    size = await slot.tar_out_to(keep, "t")
    whole = b"".join(found)
    assert len(whole) == size, "the number of bytes"
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as tar:
        sizes = [member.size for member in tar if member.isfile()]
    assert sizes == [1_000_000], "the files of the archive"


async def test_a_large_tar(kit: Kit) -> None:
    """A tar of 30 MB goes in and out."""
    slot = await kit.slot()
    content = os.urandom(1_000_000) * 30
    await slot.tar_in("in", archive(("f", content)))
    with tarfile.open(fileobj=io.BytesIO(await slot.tar_out("in"))) as tar:
        sizes = {member.name.removeprefix("./"): member.size for member in tar if member.isfile()}
    assert sizes == {"f": len(content)}, "what comes out"


async def test_members_that_leave_are_refused(kit: Kit) -> None:
    """A tar's members can't leave its directory: not by `..`, not absolute, not through a link."""
    slot = await kit.slot()
    await slot.run("mkdir out")
    for name in ("../escaped", "a/../../escaped", "..", "a/../..", f"{slot.workspace_dir}/escaped"):
        await expect_refusal(slot.tar_in("in", archive((name, b"x"))), "invalid")
    away = archive(("link/escaped", b"x"), links=(("link", f"{slot.workspace_dir}/out"),))
    await expect_refusal(slot.tar_in("in", away), "invalid")
    found = [entry.path for entry in await slot.list_dir(recursive=True) if "escaped" in entry.path]
    assert found == [], "files that got out"


async def test_what_is_no_tar_is_refused(kit: Kit) -> None:
    """Bytes that are no archive, and half an archive, are refused."""
    slot = await kit.slot()
    await expect_refusal(slot.tar_in("in", b"no archive at all " * 100), "invalid", "failed")
    whole = archive(("f", os.urandom(100_000)))
    await expect_refusal(slot.tar_in("in", whole[:50_000]), "invalid", "failed")


async def test_a_tar_that_is_too_large(kit: Kit) -> None:
    """`tar_out` is bounded by `max_bytes`."""
    slot = await kit.slot()
    await slot.run("head -c 2000000 /dev/zero >f")
    await expect_refusal(slot.tar_out(max_bytes=1_000_000), "too_large")
