"""The picture of the architecture shows the layers and the ways that there are."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hermes_testing.scripted_server import Reply, ScriptedServer, call

from hermes_core.agents.base import AgentSettings
from hermes_core.runs.group import GroupRoller, Rolled
from hermes_core.runs.options import RunOptions
from hermes_core.runs.session import open_session
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


def load_picture() -> Any:
    spec = importlib.util.spec_from_file_location("draw_ways", ROOT / "docs" / "site" / "draw_ways.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


picture = load_picture()


def test_the_picture_is_the_one_that_is_drawn_now() -> None:
    assert picture.PICTURE.read_text() == picture.draw(), "run python docs/site/draw_ways.py"


@pytest.mark.parametrize("station", [*picture.COMMAND, *picture.REWARD], ids=lambda station: station.function)
def test_every_station_is_a_function_in_one_of_the_layers(station: Any) -> None:
    module, _, name = station.function.partition(":")
    folder = ROOT / "plugins" / station.part if station.part == picture.PLUGIN else ROOT / "hermes_core"
    body: list[ast.stmt] = ast.parse((folder / f"{module.replace('.', '/')}.py").read_text()).body
    for part in name.split("."):
        (found,) = (each for each in body if getattr(each, "name", None) == part)
        body = getattr(found, "body", [])
    assert any(station.part in band for band in picture.layers())


@contextmanager
def followed() -> Iterator[list[tuple[str, str]]]:
    """The functions of `hermes_core` that are entered and left while the block runs, as `(event, function)`."""
    seen: list[tuple[str, str]] = []

    def follow(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event in {"call", "return"} and module.startswith("hermes_core."):
            seen.append((event, f"{module.removeprefix('hermes_core.')}:{frame.f_code.co_qualname}"))

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        yield seen
    finally:
        sys.setprofile(before)


class Nowhere:
    """Takes nothing down."""

    def add(self, rolled: Rolled, result: Any) -> None:
        pass

    def add_group(self, group: Any) -> None:
        pass


async def test_a_command_and_a_reward_go_the_ways_of_the_picture(tmp_path: Path) -> None:
    row = {"id": "one", "prompt": "Make it.", "check": "test -e made"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    options = RunOptions.model_validate({"concurrency": 1, **ISOLATION})
    async with (
        ScriptedServer([Reply(tool_calls=[call("terminal", command="touch made")]), Reply("Made.")]) as server,
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime,
        open_session(
            runtime,
            "tasks",
            "model",
            options,
            env={"dataset_name": str(tmp_path / "tasks.jsonl")},
            settings=AgentSettings(model="scripted", base_url=server.base_url),
        ) as session,
        session.sandboxes() as context,
    ):
        roller = GroupRoller(context, session.tools, Nowhere(), room=1, refills=0, exact=False)
        (item,) = context.environment.items()
        with followed() as seen:
            group = await roller.roll(item, 1)
    assert [rolled.record.reward for rolled in group.kept] == [1.0]
    entered = [function for event, function in seen if event == "call"]
    on_driver = [s.function for s in picture.COMMAND if ".guest." not in s.function]
    call_on = entered[entered.index(on_driver[0]) :]
    assert sorted(on_driver, key=call_on.index) == on_driver
    left = [function for event, function in seen if event == "return"][::-1]
    in_core = [s.function for s in picture.REWARD if s.part != picture.PLUGIN]
    assert sorted(in_core, key=left.index, reverse=True) == in_core
