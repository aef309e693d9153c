"""Images that are made ahead of slots and groups: once, within limits, and without a failure that nobody asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_core.environment import Environment, Item
from hermes_core.errors import ImageError, PluginError, PolicyError, ProvisionError, UnknownNameError
from hermes_core.runs.image_prefetch import Prefetch
from hermes_core.sandbox.contract import Capabilities, Isolation, SandboxConfig
from hermes_core.sandbox.images import Image, ImageBuild
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry


class Builder(LocalBackend):
    """Local sandboxes, and images that are ready when `gate` is open, unless their name says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.broken_off: list[str] = []
        self.gate = asyncio.Event()
        self.failures: dict[str, list[Exception]] = {}

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return replace(super().capabilities, builds=True)

    async def prepare_image(self, image: Image, config: SandboxConfig) -> str:
        name = image if isinstance(image, str) else image.folder.name
        self.begun.append(name)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.broken_off.append(name)
            raise
        if failures := self.failures.get(name):
            raise failures.pop(0) if len(failures) > 1 else failures[0]
        return f"built-{name}"


class Named(Environment):
    name = "named"

    def items(self) -> Sequence[Item]:
        return [{"id": name} for name in "abcdef"]

    def format_prompt(self, item: Item) -> str:
        return ""

    def image(self, item: Item) -> Image | None:
        return ImageBuild(Path(item["id"]))


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
async def backend(builder: Builder) -> AsyncIterator[ToolBackend]:
    made = ToolBackend(
        builder,
        profiles={"default": LocalConfig(min_sandboxes=0)},
        tools=ToolRegistry(),
        isolation=Isolation.SHARED,
        owner="test",
    )
    yield made
    await made.aclose()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def prefetch(backend: ToolBackend, ahead: int) -> Prefetch:
    environment = Named()
    return Prefetch(environment, backend, None, iter(environment.items()), ahead)


async def test_so_many_groups_are_ahead_of_those_that_run(builder: Builder, backend: ToolBackend) -> None:
    ahead = prefetch(backend, 2)
    seen = []
    for _ in "abcdef":
        ahead.group_begins()
        await settled()
        seen.append("".join(builder.begun))
    assert seen == ["abc", "abcd", "abcde", "abcdef", "abcdef", "abcdef"]
    await ahead.aclose()


async def test_an_image_is_made_once_however_many_need_it(builder: Builder, backend: ToolBackend) -> None:
    ahead = prefetch(backend, 0)
    ahead.group_begins()
    image = ImageBuild(Path("a"))
    waiting = [asyncio.create_task(backend.prepare_image(image)) for _ in range(3)]
    await settled()
    waiting.pop().cancel()
    await ahead.aclose()
    assert builder.broken_off == [], "the others wait for it"
    builder.gate.set()
    assert [await each for each in waiting] == ["built-a"] * 2
    assert await backend.prepare_image(image) == "built-a"
    assert builder.begun == ["a"]


async def test_it_goes_on_without_those_who_asked_and_ends_with_the_tool_backend(
    builder: Builder, backend: ToolBackend
) -> None:
    ahead = prefetch(backend, 1)
    ahead.group_begins()
    await settled()
    await ahead.aclose()
    assert (builder.begun, builder.broken_off) == (["a", "b"], []), "a rollout may need them soon"
    await backend.aclose()
    assert sorted(builder.broken_off) == ["a", "b"]


async def test_a_failure_is_for_those_who_need_the_image_and_is_not_tried_again(
    builder: Builder, backend: ToolBackend
) -> None:
    builder.failures["a"] = [ImageError("no", hint="fix it")]
    builder.gate.set()
    ahead = prefetch(backend, 1)
    ahead.group_begins()
    await settled()
    await ahead.aclose()
    assert await backend.prepare_image(ImageBuild(Path("b"))) == "built-b"
    for _ in range(2):
        with pytest.raises(ImageError, match=r"no .fix it"):
            await backend.acquire(image=ImageBuild(Path("a")))
    assert builder.begun == ["a", "b"]


async def test_a_failure_that_may_pass_is_tried_again_for_as_long_as_one_waits_for_a_slot(
    builder: Builder, backend: ToolBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_core.tool_backend.FIRST_PAUSE_S", 0.01)
    builder.gate.set()
    builder.failures = {"a": [ProvisionError("away")] * 3 + [ImageError("there, and broken")]}
    with pytest.raises(ImageError, match="there, and broken"):
        await backend.acquire(image=ImageBuild(Path("a")), timeout_s=60)
    assert builder.begun == ["a"] * 4
    builder.failures = {"b": [ProvisionError("away")]}
    with pytest.raises(ProvisionError, match="away"):
        await backend.acquire(image=ImageBuild(Path("b")), timeout_s=0.1)
    assert builder.begun.count("b") > 2


async def test_the_time_for_a_failure_that_may_pass_is_that_of_all_who_need_the_image(
    builder: Builder, backend: ToolBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hermes_core.tool_backend.FIRST_PAUSE_S", 0.01)
    builder.gate.set()
    builder.failures = {"a": [ProvisionError("away")]}
    wanted = [backend.acquire(image=ImageBuild(Path("a")), timeout_s=0.2) for _ in range(3)]
    assert {type(each) for each in await asyncio.gather(*wanted, return_exceptions=True)} == {ProvisionError}
    await asyncio.sleep(0.2)  # a last attempt is not made if the pause before it would end too late
    tries = len(builder.begun)
    with pytest.raises(ProvisionError, match="away"):
        await backend.acquire(image=ImageBuild(Path("a")), timeout_s=0.2)
    assert len(builder.begun) == tries + 1, "a rollout that is begun anew waits as long again"
    assert len([each for each in caplog.records if "tried again for 0.2 s" in each.message]) == 1
    builder.failures.clear()
    with pytest.raises(PolicyError, match="default@built-a"):
        await backend.acquire(image=ImageBuild(Path("a")))
    assert backend._failing == {}


async def test_the_pool_gets_the_name_of_the_image(builder: Builder, backend: ToolBackend) -> None:
    builder.gate.set()
    with pytest.raises(PolicyError, match="default@built-a"):  # as it would of any image, as local sandboxes have none
        await backend.acquire(image=ImageBuild(Path("a")))
    with pytest.raises(PolicyError, match="default@built-by-name"):
        await backend.acquire(image="by-name")


async def test_faults_of_others_are_named(builder: Builder, backend: ToolBackend) -> None:
    builder.gate.set()
    builder.failures["a"] = [KeyError("its own")]
    with pytest.raises((PluginError, ProvisionError), match=r"Builder\.prepare_image\(\) raised KeyError"):
        await backend.prepare_image(ImageBuild(Path("a")))
    with pytest.raises(UnknownNameError):
        await backend.prepare_image("x", profile="nothing")
