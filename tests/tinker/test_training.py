"""Training over the SDK on SkyRL's server: exact tokens, weights that change, and what becomes of failures."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from hermes_testing import tiny_model
from hermes_testing.tiny_model.engine import SampledCompletion

from hermes_core import ConfigError, LoopThread, ModelError
from hermes_core.agents.endpoint import liveness
from hermes_core.agents.exact.agent import ExactSession
from hermes_core.agents.replies import ModelReply, ToolCall
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.support.exactness import COMMAND, FORMS, MANY, check_run, check_share, without_trial
from tests.tinker.conftest import AGENT, Open
from tests.tiny_model.token_exactness import TrainedSequence
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
                TinkerRun(environment, training, agent=agent, concurrency=16, **{**ISOLATION, **options})
            )

        yield open_run


def summarising(tokenizer: Any, form: str, growth: int = 60) -> dict[str, Any]:
    """Settings of an agent with this chat format whose conversations are summarised after so many tokens."""
    text = files(tiny_model).joinpath("templates", f"{form}.jinja").read_text("utf-8")
    template = re.sub(r"\(tool \| tojson.*?\) ", "tool.function.name ", text)  # instead of its schema
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write fox to gold."}],
        tools=Runtime(Settings(), load_entry_points=False).tools.schemas(("terminal", "process")),
        chat_template=template,
        add_generation_prompt=True,
        return_dict=False,
    )
    limits = {"max_token_length": 1024, "max_tokens": 48, "max_turns": 6}
    return {**limits, "chat_template": template, "compact_at": len(prompt) + growth}


@pytest.fixture
def calls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four answers make a call, whatever the model wrote. It has learnt to write calls in one format only."""
    read = ExactSession._read

    def reads(self: ExactSession, sampled: Any, *about: Any) -> ModelReply:
        reply, number = read(self, sampled, *about), sum(sampled.tokens)
        if reply.calls or number % 4 == 0:
            return reply
        word, box = ("ant", "bee", "cow", "fox")[number // 4 % 4], ("red", "blue", "green", "gold")[number // 16 % 4]
        arguments = {"command": f"echo {word} > {box}"}
        return replace(
            reply, calls=(ToolCall(f"call_{len(self._tree.answers)}", "terminal", json.dumps(arguments), arguments),)
        )

    monkeypatch.setattr(ExactSession, "_read", reads)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[SampledCompletion]:
    """What the server answers from now on."""
    from hermes_tinker.server import TinkerServer

    noted: list[SampledCompletion] = []
    sample = TinkerServer.sample

    async def note(self: Any, prompt: Sequence[int], **asked: Any) -> Any:
        got = await sample(self, prompt, **asked)
        free, version = (False,) * len(got.tokens), int(got.weight_version or 0)
        noted.append(
            SampledCompletion(
                tuple(prompt), tuple(got.tokens), tuple(got.logprobs), free, 1.0, got.finish_reason, version
            )
        )
        return got

    monkeypatch.setattr(TinkerServer, "sample", note)
    return noted


@pytest.mark.parametrize(
    ("form", "many"),
    [*((form, 1) for form in FORMS), *(pytest.param(form, 25, marks=pytest.mark.stress) for form in FORMS)],
)
def test_the_trainer_gets_the_tokens_that_were_sampled(
    skyrl: Open,
    opened: Callable[..., Any],
    troubled: Callable[..., Any],
    answers: list[SampledCompletion],
    calls_often: None,
    form: str,
    many: int,
    record_property: Callable[[str, object], None],
) -> None:
    growth = 60 if 8 * many < MANY else 140  # two calls or more
    run = opened(troubled(), training=skyrl.untrained, agent=summarising(skyrl.tokenizer, form, growth))
    groups = run.roll(many, 8)
    rolled = [each for group in groups for each in group.kept]
    summaries = [sum(turn.compacted for turn in each.record.turns) for each in rolled]
    sequences = [TrainedSequence(**sequence.lists()) for each in rolled for sequence in each.sequences]
    sampled = without_trial(answers, skyrl.tokenizer)
    weights = copy.deepcopy(skyrl.model).double()  # so that only the server's rounding is left
    check_run(f"Tinker, {form}", weights, sequences, sampled, summaries=summaries, tell=record_property)
    check_share(summaries)
    assert len(rolled) == 8 * many
    assert [each.record.weight_versions for each in rolled] == [["0"]] * len(rolled)


class Noting:
    """A training client that notes in which order its work is asked for and done."""

    def __init__(self, training: Any) -> None:
        self._training = training
        self.order: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def forward_backward(self, *given: Any) -> Any:
        passed = self._training.forward_backward(*given)

        def result() -> Any:
            got = passed.result()
            self.order.append("gradients")
            return got

        return SimpleNamespace(result=result)

    def optim_step(self, *given: Any) -> Any:
        self.order.append("step")
        return self._training.optim_step(*given)


def test_no_step_is_asked_for_before_its_gradients_are_there(
    skyrl: Open, opened: Callable[..., Any], troubled: Callable[..., Any], calls_often: None
) -> None:
    """Of two requests that wait, SkyRL 0.4.0 sometimes does the second one first."""
    from hermes_tinker import grpo

    training = Noting(skyrl.client())
    run = opened(troubled(), training=training, agent=summarising(skyrl.tokenizer, "chatml"))
    (step,) = grpo(run, steps=1, groups=4, size=8, learning_rate=1e-3, substeps=2)
    assert step.trained
    assert training.order == ["gradients", "step"] * (len(training.order) // 2)


@pytest.mark.parametrize("name", ["model", "program"])
def test_the_trainer_computes_the_logprobs_of_the_sampler(
    name: str,
    skyrl: Open,
    opened: Callable[..., Any],
    troubled: Callable[..., Any],
    calls_often: None,
    request: pytest.FixtureRequest,
) -> None:
    from hermes_tinker import datums, grpo

    agent, level = summarising(skyrl.tokenizer, "chatml"), {}
    if name == "program":
        request.getfixturevalue("program_agents")
        del agent["compact_at"]
        agent, level = {**agent, "name": name, "command": COMMAND}, {"isolation": "user"}
    run = opened(troubled(), training=skyrl.client(), agent=agent, **level)
    first, second = grpo(run, steps=2, groups=2, size=8, learning_rate=1e-3)
    differ = [group for group in first.groups if len({each.reward for each in group.kept}) > 1]
    sequences = [sequence for group in differ for each in group.kept for sequence in each.sequences]
    assert len(datums(first.groups)) == first.trained == len(sequences) > 8
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
        backend = (await run._run.context()).backend.backend
        rolling = asyncio.ensure_future(run._run.roll([(next(iter(run.items)), 8)]))
        await asyncio.sleep(0.2)
        await kill(backend)
        return await rolling

    (group,) = run._run.call(roll_and_kill())
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
    monkeypatch.setattr(liveness, "QUIET_S", 1.0)
    monkeypatch.setattr(liveness, "PROBE_S", 1.0)
    gate = Gate(skyrl.url)
    try:
        run = opened(troubled(), training=skyrl.client(gate.url), agent={**AGENT, "endpoint_patience_s": 2.0})
        gate.shut()
        with pytest.raises(ModelError, match=r"answers nothing|could not be reached"):
            run.roll(1, 8)
    finally:
        gate.shut()


def test_another_temperature_is_refused(opened: Callable[..., Any], troubled: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"at temperature 0\.7, and the trainer computes logprobs at 1"):
        opened(troubled(), agent={**AGENT, "temperature": 0.7})
