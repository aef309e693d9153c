"""Training over the SDK on SkyRL's server: exact tokens, weights that change, and what becomes of failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hermes_core import ConfigError, LoopThread, ModelError
from hermes_core.agents import silence
from hermes_core.testing.tiny_model.exactness import recomputed_logprobs
from tests.tinker.conftest import AGENT, Open
from tests.trl.conftest import ISOLATION

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tinker_extra")]


@pytest.fixture
def opened(skyrl: Open) -> Iterator[Callable[..., Any]]:
    """Opens runs, and closes them after the test."""
    from hermes_tinker import TinkerRun

    with contextlib.ExitStack() as stack:

        def open_run(environment: Any, *, training: Any = None, agent: Any = AGENT, **options: Any) -> Any:
            training = training or skyrl.shared
            return stack.enter_context(
                TinkerRun(environment, training, agent=agent, concurrency=16, **ISOLATION, **options)
            )

        yield open_run


@pytest.mark.parametrize("many", [2, pytest.param(25, marks=pytest.mark.stress)])
def test_the_trainer_gets_the_tokens_that_were_sampled(
    skyrl: Open, opened: Callable[..., Any], troubled: Callable[..., Any], many: int
) -> None:
    from hermes_tinker import datums, grpo

    run = opened(troubled(), training=skyrl.client())
    groups = run.roll(many, 8)
    rolled = [each for group in groups for each in group.kept]
    assert len(rolled) == 8 * many
    assert [each.record.weight_versions for each in rolled] == [["0"]] * len(rolled)
    worst = trained = 0.0
    for sequence in (sequence for each in rolled for sequence in each.sequences):
        again = recomputed_logprobs(skyrl.model, sequence.tokens.tolist(), 1)
        own = [number for number, mask in enumerate(sequence.masks) if mask != -100]
        worst = max([worst, *(abs(again[number - 1] - sequence.logprobs[number]) for number in own)])
        trained += len(own)
    assert trained > 200
    assert worst < 1e-5
    rewards = {id(group): {each.reward for each in group.kept} for group in groups}
    assert len(datums(groups)) == sum(len(group.kept) for group in groups if len(rewards[id(group)]) > 1)
    first, second = grpo(run, steps=2, groups=2, size=8, learning_rate=1e-3)
    assert first.trained
    assert first.drift < 1e-5, "the trainer computes other logprobs than the sampler"
    assert [each.record.weight_versions for group in second.groups for each in group.kept] == [["1"]] * 16
    assert second.drift is None or second.drift < 1e-5, "the sampler has not the trainer's new weights"


@pytest.mark.parametrize("where", ["infra", "setup", "verifier"])
def test_a_failed_rollout_is_replaced(opened: Callable[..., Any], troubled: Callable[..., Any], where: str) -> None:
    (group,) = opened(troubled(where, times=3 if where == "infra" else 1)).roll(1, 8)
    assert group.whole
    assert None not in [each.reward for each in group.kept]


@pytest.mark.parametrize("where", ["infra", "setup", "verifier"])
def test_a_failure_is_never_trained_on(opened: Callable[..., Any], troubled: Callable[..., Any], where: str) -> None:
    from hermes_tinker import datums, grpo

    run = opened(troubled(where), refills=0, infra_retries=0)
    (step,) = grpo(run, steps=1, groups=2, size=8, learning_rate=1e-3)
    broken, sound = step.groups
    assert (len(broken.kept), len(broken.failed)) == (0, 8)
    assert step.failures == {where: 8}
    assert datums([broken]) == []
    assert step.reward == sum(each.reward for each in sound.kept) / 8, "what failed has no part in the mean"


def test_a_sandbox_that_is_killed_is_no_reward(opened: Callable[..., Any], troubled: Callable[..., Any]) -> None:
    run = opened(troubled(), refills=0, infra_retries=0)

    async def kill(backend: Any) -> None:
        mine: list[str] = []
        while not mine:
            await asyncio.sleep(0.05)
            # The others are of other tests and programs.
            mine = [each.sandbox_id for each in await backend.list() if f"-{os.getpid()}-" in each.owner]
        for sandbox_id in mine:
            await backend.terminate_id(sandbox_id)

    async def roll_and_kill() -> Any:
        backend = run._roller.context.backend.backend
        rolling = asyncio.ensure_future(run._roll(list(run.items.values())[:1], 8))
        await asyncio.sleep(0.2)
        await kill(backend)
        return await rolling

    (group,) = run._loop.call(roll_and_kill())
    assert {each.failure_kind for each in group.failed} == {"infra"}
    assert [each.reward for each in group.failed] == [None] * len(group.failed)
    assert group.failed
    assert run.roll(1, 8)[0].whole, "later rollouts work"


class Gate:
    """A way to the server that can be shut."""

    def __init__(self, url: str) -> None:
        self._to = int(url.rpartition(":")[2])
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = LoopThread("gate", self._shut)
        self.url = self._loop.call(self._listen())

    def shut(self) -> None:
        self._loop.close()

    async def _listen(self) -> str:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.close()


def test_a_server_that_is_gone_ends_the_training(
    skyrl: Open, opened: Callable[..., Any], troubled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "QUIET_S", 1.0)
    monkeypatch.setattr(silence, "SIGN_S", 1.0)
    gate = Gate(skyrl.url)
    try:
        run = opened(troubled(), training=skyrl.client(gate.url), agent={**AGENT, "endpoint_patience_s": 2.0})
        gate.shut()
        with pytest.raises(ModelError, match=r"answers nothing|could not be reached"):
            run.roll(1, 8)
    finally:
        gate.shut()


def test_another_temperature_is_refused(opened: Callable[..., Any], troubled: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        opened(troubled(), agent={**AGENT, "temperature": 0.7})
