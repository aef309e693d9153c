"""Slots of real sandboxes on `local`: each promise at the level that one gets here, and in the direct mode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from hermes_testing.conformance.kit import Kit, Rig
from hermes_testing.conformance.tamper import TamperedBackend, TamperedSandbox

from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Channel, Diagnosis, Isolation, Sandbox, SandboxSpec
from hermes_core.sandbox.local.backend import LocalBackend


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "once: is about pools and channels, and so runs at one level alone")
    config.addinivalue_line("markers", "elsewhere: runs everywhere but at the first level")


class _NoPython(TamperedSandbox):
    """A sandbox in which there is no Python."""

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        return await super().open(["no-python" if argv[0] == "python3" else argv[0], *argv[1:]], env=env)


class DirectBackend(LocalBackend):
    """The local backend with sandboxes that have no Python: everything goes through `sh`."""

    name = "direct"

    async def check(self) -> Diagnosis:
        return Diagnosis(True, "usable, though nothing that takes Python works")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return _NoPython(await super().create(spec), TamperedBackend(self))


class _Plugin:
    @hookimpl
    def hermes_register_backends(self, registry: Any) -> None:
        registry.add(DirectBackend.name, DirectBackend)


GRANTED = [
    level.label
    for level in (Isolation.USER, Isolation.NAMESPACE, Isolation.SHARED)
    if level in LocalBackend().capabilities.isolation
]
"""The levels of this host; the first is the one that one gets here, and what does not depend on it is tested there."""


def _marks(place: str) -> Any:
    """At `shared` a slot is what it is elsewhere, with less around it."""
    return pytest.mark.stress if place == Isolation.SHARED.label else pytest.mark.full


PLACES = [GRANTED[0], *(pytest.param(each, marks=_marks(each)) for each in [*GRANTED[1:], "direct"])]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rigs() -> AsyncIterator[Callable[[str], Awaitable[Rig]]]:
    """One rig for each place that a module's tests ask for, shared by them."""
    opened: dict[str, Rig] = {}
    async with Runtime(plugins=[_Plugin()]) as runtime:

        async def get(place: str) -> Rig:
            if place not in opened:
                rig = Rig(runtime, "direct" if place == "direct" else "local")
                if place == "direct":
                    await rig.__aenter__()
                else:
                    rig.level = Isolation.parse(place)  # known to be granted: nothing has to be tried out
                opened[place] = rig
            return opened[place]

        yield get
        for rig in opened.values():
            await rig.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(place: str, rigs: Callable[[str], Awaitable[Rig]]) -> Rig:
    """The rig of this place."""
    return await rigs(place)


@pytest_asyncio.fixture(loop_scope="module")
async def kit(request: pytest.FixtureRequest, rig: Rig) -> AsyncIterator[Kit]:
    """Slots and tool backends for one test, ended with it."""
    for mark in request.node.iter_markers("needs"):
        if any(mark.args[0] in sentence for sentence in rig.missing):
            pytest.skip(f"a sandbox without a guest lacks: {mark.args[0]}")
    for mark in request.node.iter_markers("least"):
        if rig.level < mark.args[0]:
            pytest.skip(f"level {rig.level.label} keeps nothing apart")
    async with Kit(rig, rig.level) as kit:
        yield kit


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        once, elsewhere = (metafunc.definition.get_closest_marker(name) for name in ("once", "elsewhere"))
        metafunc.parametrize("place", PLACES[:1] if once else PLACES[1:] if elsewhere else PLACES)
