"""Draws docs/images/ways.svg: the layers that import-linter holds, and in them the way of a command and of a reward.

`python docs/site/draw_ways.py` writes the picture anew. A test compares it with what would be drawn, and follows both
ways through a rollout.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "ways.svg"


@dataclass(frozen=True)
class Station:
    """One function on a way: where it is, and what it does there."""

    function: str
    """`module:qualified.name`, the module of the core without `hermes_core.`."""
    does: str

    @property
    def part(self) -> str:
        """The part of `hermes_core` that it is in, as the linter's layers name it; or the plugin."""
        return self.function.partition(":")[0].partition(".")[0]


COMMAND = (
    Station("agents.calls:CallRunner._run_one", "takes the call from the model's answer"),
    Station("rollout.rollout:Rollout.tool_handler", "lets the tools of this rollout through"),
    Station("tool_backend:ToolBackend.execute", "finds the lease and the tool, sets the time limit"),
    Station("tools.terminal:run_terminal", "turns the arguments into a command"),
    Station("sandbox.commands:SlotCommands.run", "makes one value of the command"),
    Station("sandbox.pool.leases:Lease.call", "checks the lease, once"),
    Station("sandbox.guest_client.commands:RemoteCommands._run", "turns the command into a request"),
    Station("sandbox.guest_client.client:GuestClient.request", "sends one frame and waits for one answer"),
    Station("sandbox.guest.request:RequestTable.handle", "in the sandbox: answers a known request again"),
    Station("sandbox.guest.operations:Operations.launch", "makes the pipes"),
    Station("sandbox.guest.parent:Parent._start", "starts the command as the slot's user"),
    Station("sandbox.guest.execution:Execution.record_exit", "answers when the output is drained"),
)

REWARD = (
    Station("datasets.tasks:TasksEnvironment.verify_and_score_trajectory", "runs the tests in a fresh slot"),
    Station("rollout.trajectory:Trajectory.score", "takes a finite number, nothing else"),
    Station("rollout.rollout:run_rollout", "starts again after an infrastructure failure"),
    Station("runs.group:Rolled.of", "refuses what has no reward or no exact tokens"),
    Station("runs.group:GroupRoller.roll", "gathers a group, replaces what was refused"),
    Station("hermes_atropos.groups:make_scored_groups", "turns the group into rows of tokens and scores"),
    Station("hermes_atropos.env:HermesAgentBaseEnv.collect_trajectories", "hands the rows to the trainer"),
)

PLUGIN = "hermes_atropos"
"""The plugin to which the reward goes."""

LINE, EMPTY, GAP, HEAD, NAMES, COLUMN = 38, 26, 6, 48, 200, 450
"""Pixels: heights of a station, of an empty layer, between layers, above them; widths of names and of a way."""
WIDTH = NAMES + 2 * COLUMN
BLUE, GREEN, INK, PALE = "#1f5fa8", "#2b7a3d", "#222222", "#f2f4f7"


def layers() -> list[list[str]]:
    """The plugin, then the core's layers from the highest down, as `pyproject.toml` tells import-linter. Parts that
    share one layer are beside each other."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (each for each in linter["contracts"] if each["type"] == "layers")
    return [[PLUGIN], *([part.strip() for part in layer.split("|")] for layer in contract["layers"])]


def draw() -> str:
    """The picture, as SVG."""
    ways = (
        ("A command, from the model's call to the sandbox", COMMAND, BLUE),
        ("A reward, from the tests to the trainer", REWARD, GREEN),
    )
    shapes, top = [], HEAD
    places: dict[Station, float] = {}
    for band in layers():
        down, up = [[station for station in way if station.part in band] for _, way, _ in ways]
        height = LINE * max(len(down), len(up)) or EMPTY
        shapes.append(f'<rect x="0" y="{top}" width="{WIDTH}" height="{height}" fill="{PALE}"/>')
        shapes.append(_text(10, top + height / 2 + 5, " · ".join(band), INK, bold=True))
        for stations in (down, up[::-1]):
            places |= {station: top + LINE * (index + 0.5) for index, station in enumerate(stations)}
        top += height + GAP
    for column, (title, way, colour) in enumerate(ways):
        shapes += _way(title, way, colour, NAMES + COLUMN * column, places)
    view = f'viewBox="0 0 {WIDTH} {top}" font-family="sans-serif" font-size="13"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
            f'<rect width="{WIDTH}" height="{top}" fill="white"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def _way(title: str, way: tuple[Station, ...], colour: str, left: float, places: dict[Station, float]) -> list[str]:
    """One way: its stations by number, and the line through them."""
    x = left + 14
    line = " ".join(f"{x},{places[station]}" for station in way)
    shapes = [_text(left, 28, title, colour, bold=True)]
    shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for number, station in enumerate(way, start=1):
        y = places[station]
        shapes.append(f'<circle cx="{x}" cy="{y}" r="11" fill="{colour}"/>')
        shapes.append(_text(x, y + 5, str(number), "white", bold=True, middle=True))
        shapes.append(_text(x + 20, y - 3, station.function.partition(":")[2], INK, bold=True))
        shapes.append(_text(x + 20, y + 13, station.does, INK))
    return shapes


def _text(x: float, y: float, text: str, colour: str, *, bold: bool = False, middle: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{weight}{anchor}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw())
