"""File operations in a slot, at every edge."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tarfile

import pytest

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import MAX_FILE_BYTES
from hermes_core.sandbox.guest import archives

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = os.geteuid() == 0


async def refusal(awaitable):
    with pytest.raises(CommandError) as caught:
        await awaitable
    return caught.value.code


# --- reading --------------------------------------------------------------------------------------------------------


async def test_one_read_is_bounded(slot):
    await slot.run(["truncate", "-s", "100000000", "sparse"])
    content = await slot.read_file("sparse", limit=1 << 40)
    assert len(content.data) == MAX_FILE_BYTES and content.size == 100_000_000


async def test_paths_that_cannot_be_read_are_refused_with_a_code(slot):
    await slot.run("ln -s loop loop; touch f")
    for path, code in (
        ("loop", "invalid"),
        ("f/below", "not_a_directory"),
        ("x" * 300, "invalid"),
        ("x/" * 3000, "invalid"),
    ):
        assert await refusal(slot.read_file(path)) == code, path
    assert await refusal(slot.read_file("f", offset=1 << 70)) == "invalid"


async def test_a_pipe_with_a_writer_is_no_file(slot):
    await slot.run("mkfifo p; (sleep 1000 >p) & true")
    assert await asyncio.wait_for(refusal(slot.read_file("p")), 20) == "not_a_file"
    assert await asyncio.wait_for(refusal(slot.write_file("p", b"x")), 20) == "not_a_file"
    assert await asyncio.wait_for(refusal(slot.write_file("p", b"x", append=True)), 20) == "not_a_file"


async def test_rights_are_the_slots(own_rig):
    slot, other = await own_rig.slot(), await own_rig.slot()
    assert await refusal(slot.read_file("/etc/shadow")) in ("permission", "not_found")
    await other.write_file("secret", b"secret")
    outside = other.workspace_dir + "/secret"
    await slot.run(["ln", "-s", outside, "link"])
    for path in (outside, "link"):
        assert await refusal(slot.read_file(path)) in ("permission", "not_found")
        assert await refusal(slot.write_file(path, b"mine")) in ("permission", "not_found")
    assert (await other.read_file("secret")).data == b"secret"


# --- writing --------------------------------------------------------------------------------------------------------


async def test_a_file_in_a_directory_that_is_not_writable_can_be(own_rig):
    slot = await own_rig.slot()
    if (await slot.run("id -u")).text.strip() == "0":
        pytest.skip("root writes everywhere")
    assert (await slot.run("mkdir d; echo old >d/f; chmod 500 d")).ok
    await slot.write_file("d/f", b"new and longer\n")
    assert (await slot.read_file("d/f")).data == b"new and longer\n"
    with pytest.raises(CommandError) as caught:
        await slot.write_file("d/g", b"x")
    assert caught.value.code == "permission"
    assert "d/g" in str(caught.value) and ".hermes" not in str(caught.value)
    assert (await slot.run("chmod 700 d; ls -A d")).text.split() == ["f"]


async def test_paths_that_cannot_be_written_are_refused_with_a_code(slot):
    await slot.run("mkdir -p d/e; touch f; mkfifo p")
    for path, code in (
        ("d", "is_a_directory"),
        (".", "is_a_directory"),
        ("p", "not_a_file"),
        ("f/below", "not_a_directory"),
        ("new/", "invalid"),
        ("/proc/x", "not_found"),
        ("/dev/full", "not_a_file"),
    ):
        for append in (False, True):
            assert await refusal(slot.write_file(path, b"x", append=append)) in (code, "permission"), path
    assert (await slot.run("ls -A d")).text == "e\n"


async def test_an_old_file_survives_a_write_that_is_cut(rig):
    slot = await rig.slot()
    await slot.write_file("f", b"old")
    for delay in (0, 0.02, 0.05):
        writing = asyncio.ensure_future(slot.write_file("f", bytes(60_000_000)))
        await asyncio.sleep(delay)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    for _ in range(600):
        names = [entry.path for entry in await slot.list_dir()]
        if names == ["f"]:
            break
        await asyncio.sleep(0.05)
    assert names == ["f"], "no temporary file stays"
    assert (await slot.read_file("f")).data == b"old"


async def test_appending_that_is_cut_takes_back_what_it_wrote(slot):
    await slot.write_file("f", b"old")
    writing = asyncio.ensure_future(slot.write_file("f", bytes(60_000_000), append=True))
    while (await slot.stat("f")).size == 3:
        await asyncio.sleep(0.001)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    for _ in range(100):
        if (await slot.stat("f")).size == 3:
            return
        await asyncio.sleep(0.05)
    pytest.fail("a part of it stayed")


@pytest.mark.skipif(not ROOT, reason="mounting takes root")
@pytest.mark.parametrize("level", ["shared", "user"])
async def test_a_full_disk_leaves_the_old_file_as_it_was(rigged, level):
    async with rigged(level) as rig:
        slot = await rig.slot()
        await slot.run("mkdir small")
        folder = slot.workspace_dir + "/small"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=777", "none", folder], check=True)
        try:
            await slot.write_file("small/f", b"old")
            assert await refusal(slot.write_file("small/f", bytes(2_000_000))) == "no_space"
            assert await refusal(slot.write_file("small/f", bytes(2_000_000), append=True)) == "no_space"
            assert (await slot.read_file("small/f")).data == b"old"
            assert [entry.path for entry in await slot.list_dir("small")] == ["f"]
            assert (await slot.run("head -c 2000000 /dev/zero >small/g")).exit_code == 1
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


# --- trees ----------------------------------------------------------------------------------------------------------


def tar_of(*members: tuple[str, bytes, str]) -> bytes:
    """A tar of members: name, type, and where it leads if it is a link."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind, leads_to in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, leads_to, 0o755
            archive.addfile(member)
    return packed.getvalue()


async def test_a_link_that_is_put_in_the_place_of_another_is_looked_at_again(slot, tmp_path):
    outside = await slot.run(["mktemp", "-d"])
    place = outside.text.strip()
    data = tar_of(
        ("inside/", tarfile.DIRTYPE, ""),
        ("x", tarfile.SYMTYPE, "inside"),
        ("x/d/one", tarfile.REGTYPE, ""),
        ("x", tarfile.SYMTYPE, place),
        ("x/d/two", tarfile.REGTYPE, ""),
    )
    with pytest.raises(CommandError, match="leaves the directory by a link"):
        await slot.tar_in("tree", data)
    assert (await slot.run(["find", place])).text.split() == [place]
    assert (await slot.run("find tree/inside -type f")).text.split() == ["tree/inside/d/one"]


async def test_a_limit_counts_what_is_sent(slot):
    make = "import os; os.makedirs('t'); [os.symlink('x' * 4000, f't/{n}') for n in range(100)]"
    assert (await slot.run(["python3", "-c", make])).ok
    sent = len(await slot.tar_out("t", max_bytes=1 << 20))
    assert sent > 100 * 4000
    with pytest.raises(CommandError) as caught:
        await slot.tar_out("t", max_bytes=sent // 2)
    assert caught.value.code == "too_large"


async def test_a_deep_tree_takes_no_more_looks_than_it_has_directories(tmp_path, monkeypatch):
    """A thousand levels took eleven seconds: every member's path was resolved from the top."""
    looks = []
    monkeypatch.setattr(archives.os.path, "islink", lambda path: looks.append(path) or False)
    folders = archives._Folders(str(tmp_path))
    path = str(tmp_path)
    for _ in range(500):
        path += "/d"
        assert folders.resolve(path) == path
    assert len(looks) == 500


async def test_a_tree_deeper_than_any_path_is_removed(slot):
    script = "import os\nfor i in range(300):\n os.mkdir('d'*50); os.chdir('d'*50); open('f', 'w').close()"
    assert (await slot.run(["python3", "-c", script], cwd=None)).ok
    await slot.remove("d" * 50, recursive=True)
    assert await slot.list_dir() == []


async def test_a_tree_with_names_of_our_own_is_removed(slot):
    await slot.run("mkdir -p d/x/y/z d/.hermes-removing-1/f d/x/.hermes-removing-2; touch d/.hermes-removing-2 d/x/y/f")
    await slot.remove("d", recursive=True)
    assert await slot.list_dir() == []


async def test_a_full_process_table_is_the_commands_own_trouble(own_rig):
    """At its process limit a slot's file operations fail as commands do, and its commands go on afterwards."""
    index = await own_rig.index()
    slot = own_rig.client.commands(index)
    hog = await slot.start("for i in $(seq 400); do sleep 1000 & done; wait")
    for _ in range(100):
        try:
            await slot.stat(".")
            await slot.run("true")
        except CommandError:
            break
        await asyncio.sleep(0.1)
    assert await refusal(slot.stat(".")) == "spawn"
    assert await refusal(slot.run("true")) == "spawn"
    assert (await slot.poll(hog.process_id)).running
    await own_rig.client.reset_slot(index)
    assert (await slot.run("echo fine")).text == "fine\n"
