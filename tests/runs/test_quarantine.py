"""Quarantine files: what they hold, which datasets they are of, and that runs leave out what they name."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_core.environment import Environment, EnvironmentConfig
from hermes_core.errors import ConfigError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.options import RunOptions
from hermes_core.runs.quarantine import FORMAT, Fingerprints, Quarantine
from hermes_core.runs.runner import run_rollouts
from hermes_core.runs.session import open_session
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


class Letters(Environment):
    """Items without slots, that every agent solves."""

    name = "letters"
    default_toolsets = ()

    def __init__(self, ids: str = "abcd", config: EnvironmentConfig | None = None, **changed: str) -> None:
        super().__init__(config)
        self.rows = [{"id": each, "text": changed.get(each, each)} for each in ids]

    def items(self) -> list[dict[str, Any]]:
        return self.rows

    def format_prompt(self, item: Any) -> str:
        return "p"

    def uses_slot(self, item: Any) -> bool:
        return False

    @hookimpl
    def verify_and_score_trajectory(self) -> float:
        return 1.0


@pytest.fixture
async def runtime(tmp_path: Path):
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as one:
        yield one


@pytest.fixture
def quarantine(tmp_path):
    """Writes a quarantine of some items of `Letters()`, as a validation does."""

    def write(*ids: str, **changes: Any) -> Path:
        known = Fingerprints.of(Letters())
        items = [{"item_id": each, "fingerprint": known.items.get(each), "reasons": []} for each in ids]
        dataset = {"fingerprint": known.dataset, "items": 4}
        path = tmp_path / "quarantine.json"
        content = {"format": FORMAT, "version": 1, "environment": "letters", "dataset": dataset, "items": items}
        path.write_text(json.dumps({**content, **changes}))
        return path

    return write


async def ids_of(runtime: Runtime, environment: Environment, file: Path, **options: Any) -> list[str]:
    """The items that a run has."""
    ran: list[str] = []
    given = {**ISOLATION, **options, "concurrency": 1}
    await run_rollouts(
        runtime, environment, "nop", quarantine=str(file), on_record=lambda each: ran.append(each["item_id"]), **given
    )
    return ran


async def test_a_run_leaves_out_what_is_in_quarantine_and_says_how_many(runtime, quarantine, caplog):
    file = quarantine("b", "d")
    assert await ids_of(runtime, Letters(), file) == ["a", "c"]
    assert [record.getMessage() for record in caplog.records] == [f"the quarantine {file} leaves out 2 of 4 items"]


async def test_the_number_of_items_is_that_of_the_run_and_the_order_is_kept(runtime, quarantine):
    config = EnvironmentConfig(max_items=2, shuffle=True, seed=3)
    whole = await ids_of(runtime, Letters(config=config.model_copy(update={"max_items": 0})), quarantine())
    kept = [each for each in whole if each != "b"]
    assert await ids_of(runtime, Letters(config=config), quarantine("b")) == kept[:2]


async def test_every_session_honours_it_and_the_next_one_does_not_remember_it(runtime, quarantine):
    environment = Letters()
    for file, ids in ((str(quarantine("a")), "bcd"), (None, "abcd")):
        options = RunOptions.model_validate({**ISOLATION, "quarantine": file})
        async with open_session(runtime, environment, "nop", options) as session:
            assert [item["id"] for item in session.environment.select_items()] == [*ids]


async def test_items_may_be_added_and_what_is_gone_or_changed_is_named(runtime, quarantine, caplog):
    file = quarantine("a", "b", "z")
    assert await ids_of(runtime, Letters("bacdef", b="another"), file) == ["c", "d", "e", "f"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"the quarantine {file} was made of another state of this dataset: validate it again, as items that were sound "
        "may have changed",
        f"the quarantine {file} names items that the dataset does not have: z",
        "these items were changed after they were validated, and are left out all the same: b",
        f"the quarantine {file} leaves out 2 of 6 items",
    ]


def test_the_order_of_a_dataset_does_not_change_its_fingerprint():
    assert Fingerprints.of(Letters("abc")) == Fingerprints.of(Letters("cab"))
    assert Fingerprints.of(Letters("abc")).dataset != Fingerprints.of(Letters("abd")).dataset
    assert Fingerprints.of(Letters("abc")).dataset != Fingerprints.of(Letters("abc", a="x")).dataset


@pytest.mark.parametrize(
    ("ids", "changes", "said"),
    [
        ("xy", {}, "of another dataset: it names x, y, and none of these is here"),
        ("abcd", {}, "leaves out every item"),
        ("a", {"environment": "tasks"}, "is of environment 'tasks', not of 'letters'"),
        ("a", {"version": 2}, "has version 2 of the format"),
        ("a", {"format": "other"}, "no quarantine file: format: "),
        ("a", {"items": [{"item_id": ""}]}, "no quarantine file: items.0.item_id: "),
        ("a", {"items": None}, "no quarantine file: items: "),
    ],
)
async def test_a_file_that_does_not_fit_is_refused(runtime, quarantine, ids, changes, said):
    with pytest.raises(ConfigError, match=said):
        await ids_of(runtime, Letters(), quarantine(*ids, **changes))


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'"a"', b"{}"])
def test_what_is_no_quarantine_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"file is no quarantine file"):
        Quarantine.read(path)
    with pytest.raises(ConfigError, match="can't read the quarantine"):
        Quarantine.read(tmp_path / "other")


async def test_a_file_by_hand_needs_only_the_ids(runtime, quarantine, caplog):
    file = quarantine(items=[{"item_id": "c"}], dataset=None)
    assert await ids_of(runtime, Letters(), file) == ["a", "b", "d"]
    assert len(caplog.records) == 1


async def test_the_run_says_which_it_was_and_is_not_resumed_with_another(runtime, quarantine, tmp_path):
    file, out = quarantine("b"), tmp_path / "out"
    await ids_of(runtime, Letters(), file, out_dir=out)
    told = json.loads((out / "run.json").read_text())
    assert told["quarantine"] == str(file)
    assert told["configuration"]["quarantine"]["items"] == 1
    for other in (quarantine("c"), None):
        with pytest.raises(UsageError, match=r"another configuration: .*quarantine"):
            given = {"quarantine": str(other)} if other else {}
            await run_rollouts(runtime, Letters(), "nop", out_dir=out, resume=True, **given, **ISOLATION)
    moved = quarantine("b", validated={"at": "later"}).rename(tmp_path / "moved.json")
    assert await ids_of(runtime, Letters(), moved, out_dir=out, resume=True) == [], "the same items are left out"
