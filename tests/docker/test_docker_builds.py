"""Runs whose items have images that are built: failures of images, limits, and images that are made ahead."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker.errors
import hermes_docker
import pytest
from docker import APIClient
from hermes_docker.images import tag_of

from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.environment import Environment, Item
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.records.record import Record
from hermes_core.runs.group import GroupRoller
from hermes_core.runs.options import RunOptions
from hermes_core.runs.runner import run_rollouts
from hermes_core.runs.session import open_session
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Cwd
from hermes_core.sandbox.images import Image, ImageBuild
from hermes_core.settings import Settings


class Builds(Environment):
    """Items with a folder each. A rollout that runs at all scores 1."""

    name = "builds"
    item_images = True

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__()
        self.folders = {folder.name: folder for folder in folders}

    def items(self) -> Sequence[Item]:
        return [{"id": name} for name in self.folders]

    def format_prompt(self, item: Item) -> str:
        return "Wait."

    def image(self, item: Item) -> Image | None:
        return ImageBuild(self.folders[item["id"]])

    def cwd(self, item: Item) -> Cwd:
        return Cwd.IMAGE

    @hookimpl
    async def verify_and_score_trajectory(self, exec_tool: Any) -> tuple[float, Mapping[str, Any]]:
        return 1.0, {"cwd": (await exec_tool("bash", {"command": "pwd"})).output.strip()}


class Waits:
    """An agent that awaits a function."""

    name = "waits"

    def __init__(self, work: Callable[[str], Awaitable[None]]) -> None:
        self.work = work

    async def run(self, task: AgentTask) -> AgentResult:
        await self.work(task.seed_key.partition(":")[0])
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        pass


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(Settings(state_dir=tmp_path / "state"), plugins=[hermes_docker], load_entry_points=False) as one:
        yield one


@pytest.fixture
def folders(tmp_path: Path, python_image: str, api: APIClient) -> Any:
    """`folders(a="RUN …", …)`: folders with a Dockerfile of these lines each. Their images are removed."""
    written: list[Path] = []

    def write(**dockerfiles: str) -> list[Path]:
        for name, lines in dockerfiles.items():
            folder = tmp_path / "contexts" / name
            folder.mkdir(parents=True)
            (folder / "Dockerfile").write_text(f"FROM {python_image}\n{lines}\n")
            (folder / "unique").write_text(str(folder))
            written.append(folder)
        return written

    yield write
    for folder in written:
        try:
            api.remove_image(tag_of(ImageBuild(folder)), force=True)
        except docker.errors.NotFound:
            continue


async def rolled_out(
    runtime: Runtime, folders: Sequence[Path], agent: Any = "nop", **options: Any
) -> dict[str, list[Any]]:
    """Return the records by item."""
    records: dict[str, list[Any]] = {folder.name: [] for folder in folders}
    await run_rollouts(
        runtime,
        Builds(folders),
        agent,
        backend="docker",
        on_record=lambda record: records[record["item_id"]].append(record),
        **options,
    )
    return records


async def test_an_image_that_can_not_be_built_is_a_failure_of_its_own(
    runtime: Runtime, folders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hermes_core.docker")
    made = folders(good="WORKDIR /srv/it", bad="RUN echo so it ends; exit 7")
    records = await rolled_out(runtime, made, group_size=3, concurrency=3)
    assert [(each["reward"], each["failure"], each["details"]["cwd"]) for each in records["good"]] == [
        (1.0, None, "/srv/it")
    ] * 3
    for record in records["bad"]:
        assert (record["reward"], record["failure"]["kind"], record["failure"]["stage"]) == (None, "image", "acquire")
        assert "so it ends" in record["failure"]["message"] and "docker-builds" in record["failure"]["message"]
        assert record["infra_retries"] == 0
    assert caplog.text.count(f"from {made[1]}") == 1, "it is tried once in a run"


async def test_trainers_get_its_kind_and_no_reward(runtime: Runtime, folders: Any) -> None:
    environment = Builds(folders(bad="RUN exit 7"))
    async with (
        open_session(runtime, environment, "nop", RunOptions(backend="docker")) as session,
        session.sandboxes(start=False) as context,
    ):
        roller = GroupRoller(context, session.tools, room=2, refills=1, exact=False)
        group = await roller.roll(environment.items()[0], 2)
    assert (group.kept, group.unlucky, len(group.failed)) == ([], False, 3)
    for rolled in group.failed:
        assert (rolled.failure_kind, rolled.mask_sample, rolled.reward) == ("image", True, None)
        assert Record.from_json(rolled.record.to_json()).failure == rolled.record.failure


async def test_no_agent_works_if_another_image_of_its_item_can_not_be_built(runtime: Runtime, folders: Any) -> None:
    class Two(Builds):
        def images(self, item: Item) -> Sequence[Image]:
            return [ImageBuild(folder) for folder in self.folders.values()]

        def items(self) -> Sequence[Item]:
            return [{"id": "good"}]

    async def never(item_id: str) -> None:
        pytest.fail("the agent began")

    records: list[Any] = []
    made = folders(good="", bad="RUN exit 7")
    await run_rollouts(runtime, Two(made), Waits(never), backend="docker", on_record=records.append)
    assert [(each["reward"], each["failure"]["kind"]) for each in records] == [(None, "image")]


async def test_a_build_does_not_count_as_waiting_for_a_slot(runtime: Runtime, folders: Any) -> None:
    records = await rolled_out(
        runtime, folders(a=f"RUN sleep 12 && : {uuid.uuid4()}"), backend_config={"acquire_timeout_s": 11}
    )
    assert [each["reward"] for each in records["a"]] == [1.0]
    assert records["a"][0]["timings"]["acquire_s"] > 12


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_images_are_made_ahead(runtime: Runtime, folders: Any, api: APIClient, prefetch: int) -> None:
    made = folders(a="", b="RUN sleep 1", c="RUN sleep 1")
    tags = {folder.name: tag_of(ImageBuild(folder)) for folder in made}

    def there() -> set[str]:
        named = {name for image in api.images() for name in image["RepoTags"] or ()}
        return {name for name, tag in tags.items() if tag in named}

    seen: dict[str, set[str]] = {}

    async def look(item_id: str) -> None:
        try:
            await until(lambda: len(there()) > len(seen) + 1, 3.0)
        except TimeoutError:
            assert not prefetch or item_id == "c"
        seen[item_id] = there()

    records = await rolled_out(runtime, made, Waits(look), concurrency=1, prefetch=prefetch)
    assert [each["reward"] for name in "abc" for each in records[name]] == [1.0] * 3
    if prefetch:
        assert seen == {"a": {"a", "b"}, "b": {"a", "b", "c"}, "c": {"a", "b", "c"}}
    else:
        assert seen == {"a": {"a"}, "b": {"a", "b"}, "c": {"a", "b", "c"}}


async def test_what_is_made_ahead_ends_with_the_run(runtime: Runtime, folders: Any, api: APIClient) -> None:
    made = folders(a="", b="RUN sleep 65")

    def building() -> bool:
        return any("sleep 65" in each["Command"] for each in api.containers())

    async def wait(item_id: str) -> None:
        await asyncio.sleep(60)

    run = asyncio.create_task(rolled_out(runtime, made, Waits(wait), concurrency=1))
    await until(building)
    run.cancel()
    await asyncio.wait([run])
    assert run.cancelled()
    await until(lambda: not building())
