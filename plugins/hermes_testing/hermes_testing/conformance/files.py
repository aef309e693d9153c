"""Checks of files in a slot, single files and directory trees. Core's own tests cover the details."""

from __future__ import annotations

import os

import pytest

from hermes_core import Isolation
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import expect_refusal


async def write_and_read(kit: Kit) -> None:
    """Files of every size, also binary, are read as they were written; missing directories are made."""
    slot = await kit.slot()
    for size in (0, 1, 65_536, 65_537, 3_000_000):
        data = os.urandom(size)
        await slot.write_file("deep/er/f", data)
        content = await slot.read_file("deep/er/f")
        if content.data != data:
            pytest.fail(f"of {size} bytes, {len(content.data)} came back, or others")
        assert content.size == size, "the size that `read_file` tells"


async def modes_are_the_usual_ones(kit: Kit) -> None:
    """What a slot makes has the modes that programs expect, however it is made: those of the umask 0022."""
    slot = await kit.slot()
    await slot.run("mkdir made; echo x >made/run; chmod 700 made/run")
    await slot.write_file("made/new/written", b"x")
    await slot.write_file("made/new/program", b"x", mode=0o755)
    await slot.tar_in("made/copied/deep", await slot.tar_out("made"))
    modes = {entry.path: f"{entry.mode:o}" for entry in await slot.list_dir("made", recursive=True)}
    tree = {"run": "700", "new": "755", "new/written": "644", "new/program": "755"}
    copies = {f"copied/deep/{path}": mode for path, mode in tree.items()}
    assert modes == {**tree, "copied": "755", "copied/deep": "755", **copies}, "the modes"


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs("a preparation user apart")
async def rights_are_the_slots(kit: Kit) -> None:
    """File operations have the slot's rights: reading a file that it can't read is refused."""
    slot = await kit.slot()
    if kit.level is Isolation.PRIVATE_ROOT:  # the slot owns all files of its root directory
        await expect_refusal(slot.read_file("/proc/1/environ"), "permission")
        await expect_refusal(slot.write_file("/proc/planted", b"x"), "permission", "not_found", "failed")
        return
    # Where an ordinary user unpacked the image, all of its files are that user's, and so are the slots.
    if (await slot.run("cat /etc/shadow >/dev/null")).returncode != 0:
        await expect_refusal(slot.read_file("/etc/shadow"), "permission", "not_found")
    await expect_refusal(slot.write_file("/etc/planted", b"x"), "permission", "not_found", "failed")


async def trees_go_out_and_in(kit: Kit) -> None:
    """A directory tree can be copied from one slot to another: contents, modes and links."""
    slot, other = await kit.slot(), await kit.slot()
    await slot.run("mkdir -p t/a/b t/empty; printf x >t/a/b/f; printf '#!/bin/sh\\necho ran' >t/run; chmod 755 t/run")
    await slot.run("cd t; ln -s a/b/f link; ln -s /nowhere dangling; touch 'a b' .hidden")
    await slot.write_file("t/large", os.urandom(1_000_000))
    await other.tar_in("deep/er", await slot.tar_out("t"))
    names = [(entry.path, entry.kind) for entry in await slot.list_dir("t", recursive=True)]
    assert [(entry.path, entry.kind) for entry in await other.list_dir("deep/er", recursive=True)] == names, "the tree"
    if (await other.read_file("deep/er/large")).data != (await slot.read_file("t/large")).data:
        pytest.fail("a file of 1 MB has changed on its way")
    assert (await other.run(["deep/er/run"])).text == "ran\n", "what its program prints"
