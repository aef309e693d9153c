"""A slot's directories: made from those that lie ready, or anew; and what a reset makes of them on a real guest."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hermes_core.sandbox.guest import workspace
from hermes_core.sandbox.guest.workspace import Workspace

ROOT = os.geteuid() == 0
UID = 54_341 if ROOT else None


@pytest.fixture
def base(tmp_path: Path) -> Path:
    workspace.prepare_base(str(tmp_path))
    return tmp_path


def spares(base: Path) -> list[str]:
    return os.listdir(base / ".slots" / "spares")


def shape(slot: Workspace) -> list[tuple[int, int, int]]:
    paths = [slot.path, slot.home, slot.tmp, slot.spool, os.path.dirname(slot.home)]
    found = [os.stat(path) for path in paths]
    return [(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) for info in found]


def test_directories_are_the_same_made_beforehand_or_on_the_spot(base):
    anew = Workspace(str(base), 0, UID)
    anew.make()
    workspace.make_spares(str(base))
    before = len(spares(base))
    ready = Workspace(str(base), 1, UID)
    ready.make()
    assert shape(anew) == shape(ready)
    assert len(spares(base)) == before - 5
    if ROOT:
        assert shape(ready)[0] == (0o700, UID, UID)
        assert shape(ready)[4] == (0o750, 0, UID)


def test_a_discarded_workspace_comes_back_empty(base):
    workspace.make_spares(str(base))
    slot = Workspace(str(base), 0, UID)
    slot.make()
    for path in (slot.path, slot.home, slot.tmp, slot.spool):
        Path(path, "left").write_text("x")
    slot.discard()
    slot.make()
    assert [os.listdir(path) for path in (slot.path, slot.home, slot.tmp, slot.spool)] == [[], [], [], []]


def test_more_slots_than_spares_are_made_on_the_spot(base):
    workspace.make_spares(str(base))
    slots = [Workspace(str(base), index, UID) for index in range(8)]
    for slot in slots:
        slot.make()
    assert spares(base) == []
    assert {tuple(shape(slot)) for slot in slots} == {tuple(shape(slots[0]))}


def test_stock_fills_up_and_no_further(base):
    workspace.make_spares(str(base))
    full = len(spares(base))
    workspace.make_spares(str(base))
    assert len(spares(base)) == full > 0
    assert stat.S_IMODE(os.stat(base / ".slots" / "spares").st_mode) == 0o700


def test_making_again_keeps_what_is_there(base):
    slot = Workspace(str(base), 0, UID)
    slot.make()
    Path(slot.path, "mine").write_text("x")
    workspace.make_spares(str(base))
    slot.make()
    assert os.listdir(slot.path) == ["mine"]


def test_a_link_of_the_preparation_user_is_replaced_by_a_directory(base, tmp_path):
    prepare = Workspace(str(base), workspace.PREPARE, UID)
    prepare.make()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.rmdir(os.path.join(prepare.path, "shared"))
    os.symlink(elsewhere, os.path.join(prepare.path, "shared"))
    workspace.make_spares(str(base))
    prepare.make()
    assert stat.S_ISDIR(os.lstat(os.path.join(prepare.path, "shared")).st_mode)
