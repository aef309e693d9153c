"""Rollouts that the caller steps: it gets each prompt as tokens, and answers with tokens from its own policy."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from hermes_core import (
    AgentResult,
    AgentSettings,
    AgentTask,
    Chat,
    Endpoint,
    Environment,
    ExactAgent,
    FailureKind,
    HermesError,
    ImageError,
    InfraError,
    ModelError,
    Record,
    Rolled,
    RolloutEnded,
    RunOptions,
    Session,
    SetupFailed,
    SharedRun,
    TrainerRun,
    UsageError,
    VerifierError,
    open_trainer_session,
    validate_data,
)
from hermes_core.agents.exact.wires import Sampled
from hermes_tinker.server import TokensOnly

_ERRORS: Mapping[str, type[HermesError]] = {
    FailureKind.INFRA: InfraError,
    FailureKind.IMAGE: ImageError,
    FailureKind.SETUP: SetupFailed,
    FailureKind.MODEL: ModelError,
    FailureKind.VERIFIER: VerifierError,
}


class CallerTokenServer(TokensOnly):
    """The token server of one rollout, whose answers the caller gives."""

    url = "the caller's policy"

    def __init__(self, settings: AgentSettings, _chat: Chat | None = None) -> None:
        self.settings = settings
        self.endpoint = Endpoint(settings, self.url, self.url, self.aclose)
        self.prompts: asyncio.Queue[list[int]] = asyncio.Queue()
        """A queue with the prompt that waits for an answer, if there is one."""
        self._answer: asyncio.Future[Sampled] | None = None

    def answer(self, tokens: Sequence[int], finish_reason: str) -> None:
        """Answer the waiting prompt.

        Raises:
            RolloutEnded: no prompt waits.
        """
        if self._answer is None or self._answer.done():
            raise RolloutEnded("no prompt waits for an answer", hint="make one step after the other")
        # The caller has the logprobs. The zeros are never read: `CallerAgent` keeps the tokens out of the record.
        self._answer.set_result(Sampled(list(tokens), [0.0] * len(tokens), finish_reason))

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float | None,
        top_k: int | None = None,
        seed: int | None = None,
        patience_s: float = math.inf,
    ) -> Sampled:
        """Hand the prompt to the caller, and return its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self.prompts.put_nowait(list(prompt))
        return await self._answer


class CallerAgent:
    """The exact agent, but without tokens in the record, because only the caller has their logprobs."""

    name = "model"

    def __init__(self, agent: ExactAgent) -> None:
        self.exact = agent

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task with the caller's policy; see `Agent.run`."""
        result = await self.exact.run(task)
        result.managed_state = None
        return result

    async def aclose(self) -> None:
        """Do nothing: the agent holds nothing open."""


@asynccontextmanager
async def _open_session(
    environment: str | Environment, env: Mapping[str, Any] | None, agent: Mapping[str, Any], options: RunOptions
) -> AsyncIterator[Session]:
    """Open a session in which the caller samples the model's answers.

    Raises:
        UsageError: the agent is a program.
        HermesError: as `open_trainer_session` says.
    """
    if agent.get("name", "model") != "model":
        raise UsageError(
            "a program can't be stepped: it may send several requests at once, and its requests beside the "
            "conversation would be trained on",
            hint="use TinkerRun",
        )
    async with open_trainer_session(environment, options, env=env, agent=agent, server=CallerTokenServer) as session:
        assert isinstance(session.agent, ExactAgent)
        # Before its first rollout, a run would probe an ExactAgent, but there is no caller yet who could answer.
        session.agent = CallerAgent(session.agent)
        yield session


class SteppedRollout:
    """One rollout. Any event loop may await its coroutines.

    Args:
        run: the open run.
        item_id: the item to work on.
        group: the id of its group, whose rollouts share a sandbox if they fit.
    """

    def __init__(self, run: TrainerRun, item_id: str, group: str) -> None:
        agent = run.session.agent
        assert isinstance(agent, CallerAgent)  # see `Rollouts`
        self.stop_tokens = sorted(agent.exact.chat.end_tokens)
        """The tokens that end an answer."""
        self._run = run
        self._item_id, self._group = item_id, group
        self._server = CallerTokenServer(agent.exact.settings)
        self._agent = CallerAgent(agent.exact.on(self._server))
        self._rolling: asyncio.Task[Rolled] | None = None

    async def begin(self) -> list[int] | None:
        """Begin the rollout, and return its first prompt; None if it ended without one."""
        return await self._run.run(self._begin())

    async def step(self, tokens: Sequence[int], finish_reason: str) -> list[int] | None:
        """Answer the prompt, and return the next one; None if the rollout has ended.

        Args:
            finish_reason: `stop`, or `length` if the answer was cut off.
        """
        return await self._run.run(self._step(tokens, finish_reason))

    async def aclose(self) -> None:
        """Cancel the rollout, unless it has ended, and release its slot. Idempotent."""
        await self._run.run(self._end())

    def record(self) -> Record:
        """Return the record of a rollout that has ended.

        Raises:
            InfraError, SetupFailed, ModelError, VerifierError, RolloutEnded: the rollout failed, so it has no reward.
        """
        assert self._rolling is not None  # it has begun
        rolled = self._rolling.result()
        if rolled.mask_sample:
            raise _ERRORS.get(rolled.failure_kind or "", RolloutEnded)(
                rolled.failure_reason or "", hint="it has no reward; begin another rollout"
            )
        return rolled.record

    async def _begin(self) -> list[int] | None:
        work = self._run.roll_one(self._item_id, agent=self._agent, group_id=self._group)
        self._rolling = await self._run.spawn(work, f"a rollout of {self._group}")
        return await self._next(self._rolling)

    async def _step(self, tokens: Sequence[int], finish_reason: str) -> list[int] | None:
        assert self._rolling is not None  # it has begun
        if not self._rolling.done():
            self._server.answer(tokens, finish_reason)
        return await self._next(self._rolling)

    async def _next(self, rolling: asyncio.Task[Rolled]) -> list[int] | None:
        prompt = asyncio.ensure_future(self._server.prompts.get())
        try:
            await asyncio.wait([rolling, prompt], return_when=asyncio.FIRST_COMPLETED)
            return prompt.result() if prompt.done() else None
        finally:
            prompt.cancel()

    async def _end(self) -> None:
        if self._rolling is not None and not self._rolling.done():
            self._rolling.cancel()
            await asyncio.wait([self._rolling])


class Rollouts:
    """The run of the cookbook's environments, which is opened once in each process that has this object or a copy.

    Args:
        environment: the environment's name, or an instance.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent `model`: `tokenizer_name`, `max_token_length`, `max_turns`, …
        options: options of the run (`RunOptions`). `infra_retries` is always 0: a restart would drop turns that the
            caller has seen.

    Raises:
        UsageError: an option does not exist, or has a wrong value.
    """

    def __init__(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        run_options = validate_data(RunOptions, {**options, "infra_retries": 0}, "the options of the run")
        self.name = environment if isinstance(environment, str) else environment.name
        opening = partial(_open_session, environment, env, agent or {}, run_options)
        self._shared = SharedRun(partial(TrainerRun, opening, eager=True))

    @property
    def run(self) -> TrainerRun:
        """Return the open run of this process; the first use opens it. Blocks.

        Raises:
            HermesError: the run can't be opened.
        """
        return self._shared.run

    def close(self) -> None:
        """End the rollouts and the sandboxes of this process. Idempotent. Called also when the program ends."""
        self._shared.close()
