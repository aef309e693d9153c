"""How long slots stand idle while images are built: a run over images of eight seconds each, made ahead and not.

Each item has an image of its own. The agent of a rollout only waits, as one does whose model answers. A slot is idle
while its rollout waits for an image, a sandbox or the slot, and when no rollout is left for it. Both runs have the same
items, with contents of their own, so that the daemon finds nothing built.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Rows, Target, alternate
from benchmarks.peers import Case
from benchmarks.peers_docker import IMAGE, missing
from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.environment import Environment, Item
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.images import Image, ImageBuild
from hermes_core.settings import Settings

IMAGES, BUILD_S = 20, 8
GROUP, AT_A_TIME, ROLLOUT_S = 2, 4, 10.0
CASE = f"{IMAGES} images of {BUILD_S} s, {AT_A_TIME} slots: "
IDLE = Case("images", f"{CASE}idle share", "%", Target(0.4, of_reference=True))
RATE = Case("images", f"{CASE}rollouts an hour", "/h")


async def rows(quick: bool) -> Rows:
    """The idle share of the slots, and the rollouts an hour; the reference makes no image ahead."""
    if (reason := await missing()) is not None:
        yield IDLE.left_out(reason)
        return
    count = IMAGES // 4 if quick else IMAGES
    [ahead], [without] = await alternate(partial(_run, count, 4), partial(_run, count, 0), 1, warm_up=0)
    share = (ahead.idle_share * 100, without.idle_share * 100)
    waits = f"waits for image and slot {ahead.waited_s:.0f} s in all, without prefetch {without.waited_s:.0f} s"
    yield IDLE.row(*share, waits)
    walls = f"{ahead.rollouts} rollouts in {ahead.wall_s:.0f} s, without prefetch in {without.wall_s:.0f} s"
    yield RATE.row(ahead.per_hour, without.per_hour, walls)


@dataclass(frozen=True)
class Run:
    """What one run took."""

    wall_s: float
    busy_s: float
    """Seconds from a slot's lease to the end of its release, of all rollouts together."""
    waited_s: float
    """Seconds before the leases, of all rollouts together."""
    rollouts: int

    @property
    def idle_share(self) -> float:
        """The share of the slots' time in which no rollout had them."""
        return 1 - self.busy_s / (AT_A_TIME * self.wall_s)

    @property
    def per_hour(self) -> float:
        """Rollouts an hour."""
        return self.rollouts / self.wall_s * 3600


class Folders(Environment):
    """Items with a Dockerfile each, which takes its time."""

    name = "folders"
    item_images = True

    def __init__(self, top: Path, count: int) -> None:
        super().__init__()
        self.folders = [top / f"{number:02}" for number in range(count)]
        for folder in self.folders:
            folder.mkdir()
            (folder / "unique").write_text(uuid.uuid4().hex)
            (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY unique /unique\nRUN sleep {BUILD_S}\n")

    def items(self) -> Sequence[Item]:
        return [{"id": folder.name, "folder": str(folder)} for folder in self.folders]

    def format_prompt(self, item: Item) -> str:
        return "Wait."

    def image(self, item: Item) -> Image | None:
        return ImageBuild(Path(item["folder"]))

    @hookimpl
    def verify_and_score_trajectory(self) -> float:
        return 1.0


class Waits:
    """An agent whose model takes its time."""

    name = "waits"

    async def run(self, task: AgentTask) -> AgentResult:
        await asyncio.sleep(ROLLOUT_S)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        return


async def _run(count: int, prefetch: int) -> Run:
    records: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        top = Path(scratch)
        environment = await asyncio.to_thread(Folders, top, count)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, _remove, environment.folders)
            runtime = await stack.enter_async_context(Runtime(Settings(state_dir=top / "state")))
            began = time.perf_counter()
            await run_rollouts(
                runtime,
                environment,
                Waits(),
                backend="docker",
                concurrency=AT_A_TIME,
                group_size=GROUP,
                prefetch=prefetch,
                on_record=records.append,
            )
            wall_s = time.perf_counter() - began
    failed = [record["failure"] for record in records if record["failure"]]
    assert not failed, failed[0]
    waited_s = sum(record["timings"]["acquire_s"] for record in records)
    busy_s = sum(sum(each or 0.0 for each in record["timings"].values()) for record in records) - waited_s
    return Run(wall_s, busy_s, waited_s, len(records))


def _remove(folders: Sequence[Path]) -> None:
    import docker
    from docker.errors import APIError
    from hermes_docker.images import tag_of

    client = docker.from_env()
    for folder in folders:
        with suppress(APIError):
            client.images.remove(tag_of(ImageBuild(folder)), force=True)
    client.close()
