"""Files of a slot: reading, writing, looking and removing, at every edge."""

from __future__ import annotations

import asyncio
import os

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import expect_refusal, within

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ["a b", "new\nline", "-rf", "€", "'\"$`;&|", "*", "..x", ".hidden", "x" * 255, "deep/er/file"]


@pytest.mark.full
async def test_fifty_megabytes(kit: Kit) -> None:
    """A file of 50 MB is written and read, whole and in part."""
    slot = await kit.slot()
    data = os.urandom(1_000_000) * 50
    await slot.write_file("large", data)
    if (await slot.read_file("large")).data != data:
        pytest.fail("what was read is not what was written")
    part = await slot.read_file("large", offset=len(data) - 10)
    assert (part.data, part.size) == (data[-10:], len(data)), "the last 10 bytes"


async def test_reading_in_parts(kit: Kit) -> None:
    """`offset` and `limit` cut what is read; beyond the end is nothing."""
    slot = await kit.slot()
    await slot.write_file("f", b"0123456789")
    for offset, limit, data in ((0, 100, b"0123456789"), (3, 4, b"3456"), (10, 5, b""), (99, 5, b""), (0, 0, b"")):
        content = await slot.read_file("f", offset=offset, limit=limit)
        assert (content.data, content.offset, content.size) == (data, offset, 10), f"offset {offset}, limit {limit}"
    assert (await slot.read_file(f"{slot.workspace_dir}/f")).data == b"0123456789", "the file by its absolute path"


async def test_appending(kit: Kit) -> None:
    """`append` extends a file, or makes it."""
    slot = await kit.slot()
    await slot.write_file("f", b"one", append=True)
    await slot.write_file("f", b"two", append=True)
    assert (await slot.read_file("f")).data == b"onetwo", "the file"


async def test_replacing_is_whole(kit: Kit) -> None:
    """Replacing a file leaves nothing of the old one."""
    slot = await kit.slot()
    await slot.write_file("f", b"a long old content")
    await slot.write_file("f", b"new")
    assert (await slot.read_file("f")).data == b"new", "the file"


async def test_modes(kit: Kit) -> None:
    """A file is written with the mode that was asked for; an old file keeps its own."""
    slot = await kit.slot()
    await slot.write_file("f", b"#!/bin/sh\necho ran", mode=0o755)
    assert (await slot.run(["./f"])).text == "ran\n", "its output"
    await slot.write_file("f", b"#!/bin/sh\necho again")
    assert ((await slot.stat("f")).mode, (await slot.run(["./f"])).text) == (0o755, "again\n"), "after it was replaced"
    await slot.write_file("f", b"", mode=0o600)
    assert (await slot.stat("f")).mode == 0o600, "the mode of an old file for which one was asked"
    await slot.write_file("f", b"", mode=0o640, append=True)
    assert (await slot.stat("f")).mode == 0o640, "the mode that was asked for with bytes to append"


async def test_any_name_will_do(kit: Kit) -> None:
    """Spaces, newlines, dashes, quotes, dots: a path is data, no shell reads it."""
    slot = await kit.slot()
    for name in NAMES:
        await slot.write_file(f"d/{name}", b"data")
        assert (await slot.read_file(f"d/{name}")).data == b"data", f"the file {name!r}"
        assert (await slot.stat(f"d/{name}")).size == 4, f"the size of {name!r}"
        listed = [entry.path for entry in await slot.list_dir("d", recursive=True) if entry.kind == "file"]
        assert listed == [name], f"the list with {name!r} in it"
        await slot.remove(f"d/{name}")
    assert [entry.path for entry in await slot.list_dir()] == ["d"], "what is left in the workspace"


async def test_names_that_are_no_text(kit: Kit) -> None:
    """A name that is no UTF-8 is written, listed, read and removed."""
    slot = await kit.slot()
    name = "\udcff\udcfe.bin"
    await slot.write_file(name, b"data")
    assert [entry.path for entry in await slot.list_dir()] == [name], "the list"
    assert (await slot.read_file(name)).data == b"data", "the file"
    await slot.remove(name)
    assert list(await slot.list_dir()) == [], "the list afterwards"


async def test_what_is_missing(kit: Kit) -> None:
    """What does not exist is `not_found`, whatever is asked of it."""
    slot = await kit.slot()
    await slot.run("ln -s nowhere dangling")
    for path in ("missing", "no/where"):
        await expect_refusal(slot.read_file(path), "not_found")
        await expect_refusal(slot.stat(path), "not_found")
        await expect_refusal(slot.list_dir(path), "not_found")
        await expect_refusal(slot.remove(path), "not_found")
        await expect_refusal(slot.tar_out(path), "not_found")
    await expect_refusal(slot.read_file("dangling"), "not_found")


async def test_directories_are_no_files(kit: Kit) -> None:
    """A directory can't be read or written as a file, nor a file be listed."""
    slot = await kit.slot()
    await slot.run("mkdir d; touch f")
    await expect_refusal(slot.read_file("d"), "is_a_directory")
    await expect_refusal(slot.write_file("d", b"x"), "is_a_directory")
    await expect_refusal(slot.list_dir("f"), "not_a_directory")
    await expect_refusal(slot.tar_out("f"), "not_a_directory")
    await expect_refusal(slot.write_file("f/below", b"x"), "not_a_directory", "exists")


async def test_pipes_and_devices_hold_nobody_up(kit: Kit) -> None:
    """Pipes and devices are refused as files, and nobody waits for them."""
    slot = await kit.slot()
    await slot.run("mkfifo p")
    await within(20, expect_refusal(slot.read_file("p"), "not_a_file"), "reading a pipe")
    await within(20, expect_refusal(slot.read_file("/dev/zero"), "not_a_file"), "reading a device")


async def test_no_permission(kit: Kit) -> None:
    """A file without rights is refused to its owner with code `permission`."""
    slot = await kit.slot()
    await slot.write_file("f", b"x", mode=0)
    if (await slot.run("cat f")).ok:
        pytest.skip("the slot's user may read everything: it is root")
    await expect_refusal(slot.read_file("f"), "permission")


async def test_stat_tells_kinds(kit: Kit) -> None:
    """`stat` tells kind, size, mode and time, and does not follow links."""
    slot = await kit.slot()
    await slot.run("mkdir -m 750 d; printf 12345 >f; chmod 640 f; ln -s f l; mkfifo p; touch -t 200109090146.40 f")
    found = {path: await slot.stat(path) for path in "dflp"}
    assert [found[path].kind for path in "dflp"] == ["dir", "file", "link", "other"], "the kinds of d, f, l, p"
    assert (found["f"].size, found["f"].mode, found["d"].mode) == (5, 0o640, 0o750), "size and modes"
    assert abs(found["f"].mtime - 1e9) < 86_400, f"the time is {found['f'].mtime:.0f}, not about 1,000,000,000"


async def test_lists(kit: Kit) -> None:
    """Lists are sorted, recursive if asked for, follow no link, and are bounded."""
    slot = await kit.slot()
    await slot.run("mkdir -p a/b a/c empty; touch a/b/f a/z a/c/g; ln -s / a/root; mkdir -m 000 a/locked")
    assert [entry.path for entry in await slot.list_dir("a")] == ["b", "c", "locked", "root", "z"], "the list of a"
    everything = [entry.path for entry in await slot.list_dir("a", recursive=True)]
    assert everything == ["b", "b/f", "c", "c/g", "locked", "root", "z"], "the recursive list of a"
    assert list(await slot.list_dir("empty")) == [], "the list of an empty directory"
    await slot.run("mkdir many; cd many; i=0; while [ $i -lt 1000 ]; do : >$i; i=$((i+1)); done")
    assert len(await slot.list_dir("many")) == 1000, "entries of 1000"
    await expect_refusal(slot.list_dir("many", max_entries=999), "too_large")


async def test_removing(kit: Kit) -> None:
    """`remove` takes files, links and (if asked) trees, follows no link, and refuses a full directory."""
    slot = await kit.slot()
    await slot.run("mkdir -p d/e keep empty; touch d/f f keep/f; ln -s ../keep d/link; ln -s keep link; ln -s no lost")
    for path in ("f", "link", "lost"):
        await slot.remove(path)
    await slot.remove("empty", recursive=kit.direct)
    await expect_refusal(slot.remove("d"), "exists", "is_a_directory")
    await slot.remove("d", recursive=True)
    left = [entry.path for entry in await slot.list_dir(recursive=True)]
    assert left == ["keep", "keep/f"], "what is left"


async def test_removing_what_nobody_may_touch(kit: Kit) -> None:
    """Trees whose directories have lost their rights are removed."""
    slot = await kit.slot()
    await slot.run("mkdir -p d/a/b; touch d/a/f; chmod 000 d/a/b d/a d")
    await slot.remove("d", recursive=True)
    assert list(await slot.list_dir()) == [], "what is left"


async def test_writing_through_a_link(kit: Kit) -> None:
    """Writing to a link writes the file that it leads to, and the link stays."""
    slot = await kit.slot()
    await slot.run("mkdir there; echo old >there/target; ln -s there/target link")
    await slot.write_file("link", b"new")
    got = ((await slot.read_file("there/target")).data, (await slot.stat("link")).kind)
    assert got == (b"new", "link"), "the target and the kind of the link"
    await slot.run("ln -s there/other first")
    await slot.write_file("first", b"made")
    assert (await slot.read_file("there/other")).data == b"made", "a target that was not there"


async def test_a_file_of_two_names_keeps_them(kit: Kit) -> None:
    """Writing a file that has two names writes both, and leaves its mode."""
    slot = await kit.slot()
    assert (await slot.run("echo old and longer >one; ln one two; chmod 640 one")).ok, "it could not be made"
    for data in (b"new\n", b"newer and much longer than it was\n" * 5000, b"", b"x"):
        await slot.write_file("one", data)
        if (await slot.read_file("two")).data != data:
            pytest.fail(f"the other name has not the {len(data)} bytes")
    await slot.write_file("one", b"yz", append=True)
    assert (await slot.read_file("two")).data == b"xyz", "the other name, after bytes were appended"
    assert (await slot.run("stat -c '%a %h' one")).text.split() == ["640", "2"], "the mode and the number of names"


async def test_a_path_that_can_not_be(kit: Kit) -> None:
    """Empty paths, NUL bytes and negative offsets are refused as `invalid`."""
    slot = await kit.slot()
    await slot.write_file("f", b"x")
    await expect_refusal(slot.read_file(""), "invalid")
    await expect_refusal(slot.read_file("a\0b"), "invalid")
    await expect_refusal(slot.write_file("a\0b", b""), "invalid")
    await expect_refusal(slot.write_file("new/", b""), "invalid")
    await expect_refusal(slot.read_file("f", offset=-1), "invalid")


async def test_many_at_once(kit: Kit) -> None:
    """Fifty files are written and read at the same time, and none is mixed up."""
    slot = await kit.slot()
    contents = {f"f{number}": os.urandom(20_000) for number in range(50)}
    await asyncio.gather(*(slot.write_file(name, data) for name, data in contents.items()))
    found = await asyncio.gather(*(slot.read_file(name) for name in contents))
    if [each.data for each in found] != list(contents.values()):
        pytest.fail("a file has other bytes than were written to it")
