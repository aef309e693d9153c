"""The kit itself: it fails what is broken, and its report and command say what came of each check."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from hermes_testing.conformance import GROUPS, checks, cli, leaks, runner, speed
from hermes_testing.conformance import kit as kit_module
from hermes_testing.conformance.checks import Check, all_checks, choose_checks
from hermes_testing.conformance.kit import Kit, Rig, reason_of
from hermes_testing.conformance.runner import run_check
from hermes_testing.conformance.tamper import TamperedSandbox
from hermes_testing.conformance.waiting import NotDone

from hermes_core.aio import complete
from hermes_core.cli.main import main
from hermes_core.errors import ConfigError, PluginError, PolicyError, ProvisionError, UnknownNameError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runtime import Runtime
from hermes_core.sandbox.channels.blocking import AsyncioStreamChannel
from hermes_core.sandbox.contract import (
    Capabilities,
    Channel,
    Diagnosis,
    Isolation,
    Network,
    Sandbox,
    SandboxSpec,
    SandboxStatus,
)
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.settings import Settings


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is of a plugin, which tests see only if they name it."""
    monkeypatch.setenv("HERMES_PLUGINS", "testing")


# --- backends that are broken in one way each -------------------------------------------------------------------------


class Spoilt(Channel):
    """A channel that passes everything on; subclasses break one thing."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner

    async def read(self, n: int) -> bytes:
        return await self.inner.read(n)

    async def write(self, data: bytes) -> None:
        await self.inner.write(data)

    async def wait(self) -> int:
        return await self.inner.wait()

    async def aclose(self) -> None:
        await self.inner.aclose()

    @property
    def stderr_tail(self) -> str:
        return self.inner.stderr_tail


class DropsBytes(Spoilt):
    """Loses the last byte of whatever is longer than a few frames."""

    async def read(self, n: int) -> bytes:
        data = await self.inner.read(n)
        return data[:-1] if len(data) > 10_000 else data


class DoublesOutput(Spoilt):
    async def read(self, n: int) -> bytes:
        data = await self.inner.read(n)
        return data * 2


class IgnoresReset(Spoilt):
    """The guest is told to kill, never to wipe."""

    async def write(self, data: bytes) -> None:
        await self.inner.write(data.replace(b'"wipe":true', b'"wipe":null'))


class TextMode(Spoilt):
    async def read(self, n: int) -> bytes:
        return (await self.inner.read(n)).replace(b"\n", b"\r\n")


class WrongStatus(Spoilt):
    async def wait(self) -> int:
        return min(await self.inner.wait(), 1)


class Unbounded(Spoilt):
    """Reads all that there is before it gives any."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.data = bytearray()

    async def read(self, n: int) -> bytes:
        while piece := await self.inner.read(1 << 20):
            self.data += piece
        data = bytes(self.data[:n])
        del self.data[:n]
        return data


class Broken(LocalBackend):
    """The local backend with channels of another kind."""

    name = "broken"
    channel: type[Spoilt] = Spoilt
    end_delay_s = 0.0

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self.leaked: list[AsyncioStreamChannel] = []

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return SpoiltSandbox(await super().create(spec), self)


class SpoiltSandbox(TamperedSandbox):
    def __init__(self, inner: Sandbox, backend: Any) -> None:
        super().__init__(inner, backend)
        self.backend = backend

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        return self.backend.channel(await self._inner.open(argv, env=env))


class LeaksAProcess(Broken):
    """Starts a helper for each channel on the driver's host, and forgets it."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox, backend = await super().create(spec), self

        class Leaking(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                backend.leaked.append(await AsyncioStreamChannel.spawn(["sleep", "1000"]))
                return await self._inner.open(argv, env=env)

        return Leaking(sandbox._inner, self)

    async def aclose(self) -> None:
        for helper in self.leaked:
            await helper.aclose()


class ForgetsToEnd(Broken):
    """`terminate` returns before anything has ended."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)

        async def terminate() -> None:
            return

        sandbox.terminate = terminate  # type: ignore[method-assign]
        return sandbox


class MakesTwo(Broken):
    """A second `create` of a lease makes a second sandbox."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await super().create(dataclasses.replace(spec, creation_id=os.urandom(8).hex()))


class AlwaysRunning(Broken):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)

        async def status() -> SandboxStatus:
            return SandboxStatus.RUNNING

        sandbox.status = status  # type: ignore[method-assign]
        return sandbox


class LeaksEnvironment(Broken):
    """Gives programs the driver's environment."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)

        class Leaking(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                return await self._inner.open(argv, env={**os.environ, **(env or {})})

        return Leaking(sandbox._inner, self)


class Blocks(Broken):
    """Waits for the provider on the event loop."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        time.sleep(0.5)
        return await super().create(spec)


class BlocksOpen(Broken):
    """Waits for the provider on the event loop when a program is started."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        class Blocking(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                time.sleep(0.3)
                return await self._inner.open(argv, env=env)

        return Blocking((await super().create(spec))._inner, self)  # type: ignore[attr-defined]


class IgnoresNetwork(Broken):
    """Gives every sandbox the host's network."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        config = spec.config.model_copy(update={"network": Network.OPEN})
        return await super().create(dataclasses.replace(spec, config=config))


class IgnoresTheCut(IgnoresNetwork):
    """Promises to cut the network later, and does nothing."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return dataclasses.replace(super().capabilities, network=frozenset(Network))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        class Open(SpoiltSandbox):
            async def cut_network(self) -> None:
                return

        return Open((await super().create(spec))._inner, self)  # type: ignore[attr-defined]


class TakesEverything(LocalConfig):
    """Refuses no setting."""

    unsupported = ()


class IgnoresSettings(Broken):
    """Makes the same sandbox of every profile."""

    config_class = TakesEverything

    async def create(self, spec: SandboxSpec) -> Sandbox:
        config = spec.config.model_copy(update={"image": None, "memory": None})
        return await super().create(dataclasses.replace(spec, config=config))


class FindsNothingWrong(Broken):
    async def check(self) -> Diagnosis:
        return Diagnosis(True, "usable")


class OpensNothing(FindsNothingWrong):
    """`open` fails for every program."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        class Closed(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                raise OSError("no such tunnel")

        return Closed((await super().create(spec))._inner, self)  # type: ignore[attr-defined]


class OpensNone(FindsNothingWrong):
    """`open` has no return."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        class Forgetful(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Any:
                return None

        return Forgetful((await super().create(spec))._inner, self)  # type: ignore[attr-defined]


class RunsNothing(FindsNothingWrong):
    """A wrapper of every program fails, and says why on standard error."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        class Failing(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                return await self._inner.open(["sh", "-c", "echo no such flag >&2; exit 3"], env=env)

        return Failing((await super().create(spec))._inner, self)  # type: ignore[attr-defined]


class OneLevel(Broken):
    """Declares one level. A rig tries out each that is declared, and waits in vain where channels are broken."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return dataclasses.replace(super().capabilities, isolation=frozenset({Isolation.SHARED}))


def of(kind: type[Spoilt], base: type[Broken] = OneLevel) -> type[Broken]:
    return type(f"With{kind.__name__}", (base,), {"channel": kind})


class Plugin:
    """Provides one backend."""

    def __init__(self, backend: type[LocalBackend]) -> None:
        self.backend = backend

    @hookimpl
    def hermes_register_backends(self, registry: Any) -> None:
        registry.add(self.backend.name, self.backend)


class Seen(NamedTuple):
    """What came of a check: `passed`, `failed` or `not_applicable`, and why."""

    outcome: str
    reason: str


async def try_check(rig: Rig, check: Check) -> Seen:
    for mark in check.as_param().marks:
        return Seen("not_applicable", mark.kwargs["reason"])
    try:
        await run_check(rig, check)
    except pytest.skip.Exception as error:
        return Seen("not_applicable", reason_of(error))
    except (Exception, pytest.fail.Exception) as error:
        return Seen("failed", reason_of(error))
    return Seen("passed", "")


async def outcomes(backend: type[LocalBackend], *names: str) -> dict[str, Seen]:
    async with Runtime(plugins=[Plugin(backend)]) as runtime, Rig(runtime, backend.name) as rig:
        return {check.name: await try_check(rig, check) for check in choose_checks(names=names)}


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (OpensNothing, "OSError: no such tunnel"),
        (OpensNone, "`open` returned None, which is not a Channel"),
        (RunsNothing, "exit status 3, stderr: no such flag"),
    ],
)
async def test_without_a_guest_the_contract_is_checked_and_the_rest_says_why_it_could_not_start(backend, why):
    seen = await outcomes(backend, "terminate_by_id", "exit_status_and_last_words", "killed_while_idle")
    assert seen["terminate_by_id"].outcome == "passed"
    assert seen["exit_status_and_last_words"].outcome == "failed"
    assert seen["killed_while_idle"].outcome == "failed"
    assert seen["killed_while_idle"].reason.startswith("the guest could not start: `python3`")
    assert why in seen["killed_while_idle"].reason


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("backend", "seen_by"),
    [
        (of(DropsBytes), "a_channel_carries_much"),
        (of(DoublesOutput), "a_program_gets_its_arguments"),
        (of(TextMode), "a_channel_is_binary"),
        (of(WrongStatus), "exit_status_and_last_words"),
        pytest.param(of(Unbounded), "small_pieces_arrive_at_once", marks=pytest.mark.full),
        (of(Unbounded), "a_slow_reader_slows_the_writer"),
        (of(IgnoresReset, Broken), "reset_leaves_no_file[user]"),
        pytest.param(LeaksAProcess, "a_hundred_channels", marks=pytest.mark.full),
        (ForgetsToEnd, "status_follows_life"),
        (MakesTwo, "one_creation_id_is_one_sandbox"),
        (AlwaysRunning, "terminate_by_id"),
        (LeaksEnvironment, "nothing_of_the_driver_is_added"),
        pytest.param(Blocks, "no_call_stops_the_loop", marks=pytest.mark.full),
        pytest.param(BlocksOpen, "no_call_stops_the_loop", marks=pytest.mark.full),
        (IgnoresNetwork, "no_network_leads_nowhere"),
        pytest.param(IgnoresTheCut, "a_cut_network_leads_nowhere", marks=pytest.mark.full),
        (IgnoresSettings, "an_image_is_used_or_refused"),
        pytest.param(IgnoresSettings, "memory_is_limited_or_refused", marks=pytest.mark.full),
    ],
)
async def test_what_is_broken_is_seen(
    backend: type[LocalBackend], seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "SETTLE_S", 0.5)
    if "[user]" in seen_by and Isolation.USER not in LocalBackend().capabilities.isolation:
        pytest.skip("this host gives no slot of level user")
    if seen_by == "no_network_leads_nowhere" and Network.NONE not in LocalBackend().capabilities.network:
        pytest.skip("this host gives no sandbox a network of its own")
    found = (await outcomes(backend, seen_by))[seen_by]
    assert found.outcome == "failed" and found.reason, found


@pytest.mark.full  # the kit on local: test_conformance.py
async def test_the_same_backend_unbroken_passes() -> None:
    names = ("a_channel_carries_much", "reset_leaves_no_file[user]", "nothing_of_the_driver_is_added")
    names += (
        "no_network_leads_nowhere",
        "no_call_stops_the_loop",
        "an_image_is_used_or_refused",
        "memory_is_limited_or_refused",
    )
    for result in (await outcomes(Broken, *names)).values():
        assert result.outcome != "failed", result


@pytest.mark.full
async def test_what_no_check_cleans_up_is_a_failure_and_is_ended() -> None:
    async with Runtime(plugins=[Plugin(Broken)]) as runtime, Rig(runtime, "broken") as rig:

        async def leaves(kit: Kit) -> None:
            await kit.backend.create(kit.spec())

        with pytest.raises(AssertionError, match="sandboxes were left"):
            await run_check(rig, Check("contract", leaves))
        assert [info for info in await rig.backend.list() if info.owner.startswith(f"{rig.owner}-")] == []


@pytest.mark.full
async def test_a_check_that_hangs_is_cut_off() -> None:
    async with Runtime() as runtime, Rig(runtime, "local") as rig:

        @pytest.mark.limit(0.2)
        async def hangs(kit: Kit) -> None:
            await asyncio.sleep(1000)

        with pytest.raises(NotDone, match=r"^not done within 0\.2 s$"):
            await run_check(rig, Check("contract", hangs))


class Forgetful(FindsNothingWrong):
    """`create` has no return, as a first draft may have."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        await super().create(spec)
        return None  # type: ignore[return-value]


class Faulty(FindsNothingWrong):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise KeyError("region")


class ListsIds(FindsNothingWrong):
    """`list` gives ids, and no more."""

    async def list(self, owner: str | None = None) -> Any:
        return [info.sandbox_id for info in await super().list(owner)]


class Nameless(FindsNothingWrong):
    """Its sandboxes have no id."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)
        del sandbox.id
        return sandbox


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (Forgetful, "returned None, which is not a Sandbox"),
        (Faulty, "raised KeyError: 'region'"),
        (Nameless, "which is not a Sandbox with an `id`"),
    ],
)
async def test_a_backend_that_makes_no_sandbox_is_told_once(backend: type[Broken], reason: str) -> None:
    with pytest.raises(ProvisionError, match=rf"^{backend.__name__}\.create\(\) .*{reason}.*a bug in the plugin"):
        await outcomes(backend, "one_creation_id_is_one_sandbox", "exit_status")


async def test_what_list_should_not_return_fails_the_checks_that_need_it() -> None:
    seen = await outcomes(ListsIds, "one_creation_id_is_one_sandbox", "exit_status")
    first = seen["one_creation_id_is_one_sandbox"]
    assert first.outcome == "failed"
    assert "which is not a list of SandboxInfo" in first.reason and "a bug in the plugin" in first.reason
    assert seen["exit_status"].outcome == "passed"


class Forever(FindsNothingWrong):
    """`status` is a text, and always the same."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        class Running(SpoiltSandbox):
            async def status(self) -> Any:
                return "running"

        return Running((await super().create(spec))._inner, self)  # type: ignore[attr-defined]


class MakesLater(FindsNothingWrong):
    """What the provider began is made, although nobody waits for it any more."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await asyncio.shield(asyncio.ensure_future(self._make(spec)))

    async def _make(self, spec: SandboxSpec) -> Sandbox:
        await asyncio.sleep(0.5)
        return await super().create(spec)


class WaitsForItsThread(FindsNothingWrong):
    """Ends what a thread makes after a cancellation, in the way of docs/guides/writing-a-backend.md."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        try:
            await complete(asyncio.to_thread(time.sleep, 0.3))
            return await complete(super().create(spec))
        except BaseException:
            await complete(self._sweep(spec))
            raise

    async def _sweep(self, spec: SandboxSpec) -> None:
        for info in await self.list(spec.owner):
            if info.creation_id == spec.creation_id:
                await self.terminate_id(info.sandbox_id)


@pytest.mark.full
async def test_who_waits_for_their_threads_leaves_nothing() -> None:
    seen_by = "a_cancelled_creation_leaves_nothing"
    assert (await outcomes(WaitsForItsThread, seen_by))[seen_by].outcome == "passed"


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "seen_by"),
    [(Forever, "status_follows_life"), (MakesLater, "a_cancelled_creation_leaves_nothing")],
)
async def test_what_shows_only_later_is_seen(backend: type[Broken], seen_by: str) -> None:
    assert (await outcomes(backend, seen_by))[seen_by].outcome == "failed"


@pytest.mark.full
async def test_a_backend_whose_first_sandbox_never_comes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(FindsNothingWrong):
        async def create(self, spec: SandboxSpec) -> Sandbox:
            await asyncio.sleep(1000)
            raise AssertionError

    monkeypatch.setattr(kit_module, "FIRST_S", 0.2)
    with pytest.raises(PluginError, match=r"made and ended no sandbox within 0.2 s"):
        await outcomes(Hangs, "terminate_by_id")


class HangsLater(Broken):
    """Its `list` hangs once it was tried."""

    hanging = False

    async def list(self, owner: str | None = None) -> Any:
        if self.hanging:
            await asyncio.sleep(1000)
        return await super().list(owner)


@pytest.fixture
async def hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """A rig whose backend hangs until the test is over."""
    monkeypatch.setattr(runner, "CLEANUP_S", 0.2)
    async with Runtime(plugins=[Plugin(HangsLater)]) as runtime, Rig(runtime, "broken") as rig:
        HangsLater.hanging = True
        yield rig
        HangsLater.hanging = False


@pytest.mark.full
async def test_a_check_that_holds_up_the_loop_and_then_hangs_is_ended(hanging: Rig) -> None:
    """Its own limit and that of what it does when it is over are both past when the loop goes on."""

    @pytest.mark.limit(0.2)
    async def hangs(_: Kit) -> None:
        time.sleep(1)
        await asyncio.sleep(1000)

    with pytest.raises(NotDone):
        await asyncio.wait_for(run_check(hanging, Check("contract", hangs)), 60)


class DeclaresMore(FindsNothingWrong):
    """Declares a level that its sandboxes can't give."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return dataclasses.replace(super().capabilities, isolation=frozenset({Isolation.SHARED, Isolation.USER}))

    def levels(self, config: Any) -> frozenset[Isolation]:
        return self.capabilities.isolation

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(dataclasses.replace(spec, isolation=Isolation.SHARED))
        sandbox.uid_base = None
        return sandbox


class RefusesMore(DeclaresMore):
    """Refuses that level itself, as what a host can do is seen only there."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.isolation > Isolation.SHARED:
            raise PolicyError("this host has no user ids to give")
        return await super().create(spec)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "outcome"), [(DeclaresMore, "failed"), (RefusesMore, "not_applicable")])
async def test_a_level_that_is_declared_and_can_not_be_had_fails(backend: type[Broken], outcome: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's guest needs no user ids")
    async with Runtime(plugins=[Plugin(backend)]) as runtime, Rig(runtime, "broken", isolation="shared") as rig:
        results = {
            check.name: await try_check(rig, check)
            for check in choose_checks(names=["reset_leaves_no_file[user]", "exit_status"])
        }
    assert results["reset_leaves_no_file[user]"].outcome == outcome, results
    assert "user ids" in results["reset_leaves_no_file[user]"].reason
    assert results["exit_status"].outcome == "passed"


# --- the list ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tries", "made", "fails"), [((1, 3), 1, None), ((9, 8, 2), 3, None), ((9, 8, 7, 1), 3, "7 of 2")]
)
async def test_a_comparison_of_speeds_is_made_again_before_it_fails(
    tries: tuple[float, ...], made: int, fails: str | None
) -> None:
    left = list(tries)

    async def measure() -> tuple[float, float]:
        return left.pop(0), 2.0

    with contextlib.nullcontext() if fails is None else pytest.raises(pytest.fail.Exception, match=fails):
        await speed.less(measure, 3, "{:.0f} of {:.0f}")
    assert len(tries) - len(left) == made


def test_there_are_enough_checks_and_each_says_what_it_promises() -> None:
    every = all_checks()
    functions = {each.function for each in every}
    assert len(functions) >= 80
    assert {each.group for each in every} == set(GROUPS)
    assert len({each.name for each in every}) == len(every)
    for each in every:
        assert each.promise.endswith("."), each.name


def test_checks_are_chosen_by_group_and_name() -> None:
    assert {each.group for each in choose_checks(["files"])} == {"files"}
    assert [each.name for each in choose_checks(names=["exit_status"])] == ["exit_status"]
    assert len(choose_checks(names=["reset_leaves_no_file"])) == len(Isolation)
    assert [each.name for each in choose_checks(names=["reset_leaves_no_file[user]"])] == ["reset_leaves_no_file[user]"]
    with pytest.raises(UnknownNameError, match="exit_status"):
        choose_checks(names=["exit_statuss"])
    with pytest.raises(UnknownNameError, match="files"):
        choose_checks(groups=["file"])


# --- what is not applicable -------------------------------------------------------------------------------------------


class NoPython(Broken):
    """Sandboxes that have no Python."""

    name = "no-python"

    async def check(self) -> Diagnosis:
        return Diagnosis(True, "usable")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)

        class Without(SpoiltSandbox):
            async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
                return await self._inner.open(["no-python" if argv[0] == "python3" else argv[0], *argv[1:]], env=env)

        return Without(sandbox._inner, self)


@pytest.mark.full
async def test_without_python_the_reason_is_the_direct_modes() -> None:
    found = await outcomes(NoPython, "exit_status", "a_terminal_on_all_three", "reset_leaves_no_file")
    assert found["exit_status"].outcome == "passed"
    for name in ("a_terminal_on_all_three", "reset_leaves_no_file[user]"):
        assert found[name].outcome == "not_applicable"
    assert "terminals" in found["a_terminal_on_all_three"].reason
    assert "isolation between slots" in found["reset_leaves_no_file[user]"].reason


@pytest.mark.full
async def test_levels_that_are_not_declared_and_what_is_open_are_told() -> None:
    found = await outcomes(Broken, "a_neighbours_files_can_not_be_read")
    dedicated, shared = (found[f"a_neighbours_files_can_not_be_read[{level}]"] for level in ("dedicated", "shared"))
    assert dedicated.outcome == shared.outcome == "not_applicable"
    assert "does not declare level dedicated" in dedicated.reason
    assert shared.reason.startswith("documented as open: ")


# --- wrong use --------------------------------------------------------------------------------------------------------


async def test_wrong_use_is_refused_before_anything_is_made() -> None:
    async with Runtime() as runtime:
        with pytest.raises(UnknownNameError, match="slots_per_sandbox"):
            Rig(runtime, "local", {"slots_per_sandbx": 1})
        with pytest.raises(ConfigError):
            Rig(runtime, "local", {"orphan_ttl_s": -1})
        with pytest.raises(UnknownNameError):
            Rig(runtime, "lokal")
        with pytest.raises(UnknownNameError):
            Rig(runtime, "local", isolation="usr")
        with pytest.raises(PolicyError):
            async with Rig(runtime, "local", isolation="dedicated"):
                pass


class NotHere(Broken):
    name = "not-here"

    async def check(self) -> Diagnosis:
        return Diagnosis(False, "no daemon", advice=("start it",))


async def test_a_backend_that_can_not_be_used_here_is_told_at_once() -> None:
    async with Runtime(plugins=[Plugin(NotHere)]) as runtime:
        with pytest.raises(ProvisionError, match=r"no daemon.*start it"):
            async with Rig(runtime, "not-here"):
                pass


class SaysYes(Broken):
    name = "says-yes"

    async def check(self) -> Diagnosis:
        return True  # type: ignore[return-value]


async def test_a_check_that_returns_no_diagnosis_is_named() -> None:
    async with Runtime(plugins=[Plugin(SaysYes)]) as runtime:
        with pytest.raises(PluginError, match=r"SaysYes.check\(\) returned bool, not a Diagnosis"):
            async with Rig(runtime, "says-yes"):
                pass


# --- the command ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nested() -> Iterator[None]:
    """Another session of pytest: it takes away a variable that this one has set."""
    kept = os.environ["PYTEST_CURRENT_TEST"]
    yield
    os.environ["PYTEST_CURRENT_TEST"] = kept


def command(*arguments: str, traceback: bool = False) -> Any:
    with nested():
        return CliRunner().invoke(main, [*["--traceback"][: int(traceback)], "conformance", *arguments])


def session_of(backend: type[LocalBackend], *names: str, before: Callable[[], None] = lambda: None) -> Any:
    """The command's session of pytest on a backend of this file.

    Args:
        before: is called before each check.
    """

    class Before:
        def pytest_runtest_call(self) -> None:
            before()

    mark = pytest.mark.conformance(backend.name, plugins=[Plugin(backend)], names=names)
    session = cli._KitSession(mark, rows_to_stderr=False, tracebacks=False)
    with nested():
        pytest.main([*cli._PYTEST], plugins=[session, Before()])
    return session


@pytest.mark.full
def test_after_some_checks_that_hang_no_more_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CLEANUP_S", 0.2)
    monkeypatch.setattr(checks, "LIMIT_S", 0.2)
    monkeypatch.setattr(HangsLater, "hanging", False)
    names = [check.name for check in choose_checks(["contract"]) if check.limit_s == 0.2][:6]
    session = session_of(HangsLater, *names, before=lambda: setattr(HangsLater, "hanging", True))
    assert [row["outcome"] for row in session.rows] == ["failed"] * cli.MOST_HUNG
    assert session.as_dict("broken")["not_run"] == names[cli.MOST_HUNG :]
    assert "3 checks were not run" in session.as_text("broken")


def test_what_is_printed_is_one_line_and_names_the_promise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def terminate(_: Any, sandbox_id: str) -> None:
        raise RuntimeError("a [bold]reason[/]\n\x1b[31m")

    monkeypatch.setattr(Broken, "terminate_id", terminate)
    names = ("terminate_by_id", "exit_status", "reset_leaves_no_file[dedicated]", "reset_leaves_no_process[dedicated]")
    session = session_of(Broken, *names)
    printed = capsys.readouterr().out
    [promise] = [check.promise for check in choose_checks(names=["terminate_by_id"])]
    assert re.search(r"^contract  terminate_by_id +FAILED +[0-9.]+ s  RuntimeError: ", printed, re.MULTILINE)
    assert r"a [bold]reason[/] \x1b[31m" in printed and "\x1b" not in printed
    assert f"(promised: {promise})" in printed
    end = session.as_text("broken").splitlines()
    assert end[-1] == "broken: 4 checks, 1 passed, 1 failed, 2 not applicable"
    [folded] = [line for line in end if "does not declare level dedicated" in line]
    assert folded.endswith(": reset_leaves_no_file[dedicated], reset_leaves_no_process[dedicated]")


def test_the_promises_are_listed_without_a_run() -> None:
    done = CliRunner().invoke(main, ["conformance", "local", "--list", "--group", "contract"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("contract\n  one_creation_id_is_one_sandbox: ")


def test_the_command(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("env_vars: {A: b}\n")
    done = command("local", "--config", str(profile), "--check", "exit_status", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert {**report, "checks": []} == {"backend": "local", "checks": [], "figures": {}, "not_run": []}
    [row] = report["checks"]
    assert row.pop("seconds") > 0
    assert row == {"name": "exit_status", "group": "commands", "outcome": "passed", "reason": ""}


@pytest.mark.full
def test_figures_are_in_the_report() -> None:
    done = command("local", "--check", "a_lease_is_quicker_than_a_sandbox", "--json")
    assert json.loads(done.stdout)["figures"].keys() == {"sandbox_ready_s", "lease_p50_ms"}
    assert "sandbox_ready_s" in cli.FIGURES


async def test_what_was_measured_is_kept_if_the_check_is_skipped_then() -> None:
    async def measures(kit: Kit) -> None:
        kit.figure("true_p50_ms", 2.1)
        pytest.skip("it is no comparison")

    figures: dict[str, float] = {}
    async with Runtime() as runtime, Rig(runtime, "local") as rig:
        with pytest.raises(pytest.skip.Exception):
            await run_check(rig, Check("speed", measures), figures)
    assert figures == {"true_p50_ms": 2.1}


@pytest.mark.full
def test_the_command_prints_rows_as_checks_end_and_tracebacks_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def exit_status(kit: Kit) -> None:
        """It works."""
        raise KeyError("region")

    for traceback in (True, False):
        monkeypatch.setattr(checks, "all_checks", lambda: [Check("commands", exit_status)])
        done = command("local", "--check", "exit_status", "--json", traceback=traceback)
        assert done.exit_code == 1 and json.loads(done.stdout)["checks"][0]["reason"] == "KeyError: 'region'"
        assert "commands  exit_status FAILED" in done.stderr
        assert ('raise KeyError("region")' in done.stderr) is traceback


@pytest.mark.full
def test_the_command_s_last_line_is_what_came_of_the_checks() -> None:
    assert "1 passed" in command("local", "--check", "exit_status").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lokal"], "local"),
        (["local", "--group", "file"], "files"),
        (["local", "--check", "exit_statuss"], "exit_status"),
        (["local", "--isolation", "usr"], "user"),
        (["local", "--config", "/no/such/file"], "does not exist"),
        (["local", "--config", "PROFILE"], "slots_per_sandbox"),
        ([], "missing argument"),
    ],
)
def test_wrong_use_of_the_command_exits_with_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("slots_per_sandbx: 1\n")
    done = command(*(str(profile) if word == "PROFILE" else word for word in arguments))
    assert done.exit_code == 2 and said in done.output, done.output
