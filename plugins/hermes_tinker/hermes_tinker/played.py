"""Rollouts whose model is the caller's, token by token: it is given each prompt, and says what its policy sampled."""

from __future__ import annotations

import asyncio
import math
import threading
import uuid
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hermes_core import (
    AgentResult,
    AgentSettings,
    AgentTask,
    Chat,
    DrivenRun,
    Endpoint,
    Environment,
    ExactAgent,
    FailureKind,
    HermesError,
    ImageError,
    InfraError,
    Item,
    ModelError,
    Record,
    Rolled,
    RolloutEnded,
    RunOptions,
    SetupFailed,
    UsageError,
    VerifierError,
    open_exact_agent,
    validated,
)
from hermes_core.agents.wires import Sampled
from hermes_core.envs.session import parsers_with
from hermes_tinker.server import TokensOnly

_ERRORS: Mapping[str, type[HermesError]] = {
    FailureKind.INFRA: InfraError,
    FailureKind.IMAGE: ImageError,
    FailureKind.SETUP: SetupFailed,
    FailureKind.MODEL: ModelError,
    FailureKind.VERIFIER: VerifierError,
}


class Player(TokensOnly):
    """The token server of one rollout, played by the caller."""

    url = "the caller's policy"

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.endpoint = Endpoint(settings, self.url, self.url, self.aclose)
        self.prompts: asyncio.Queue[list[int]] = asyncio.Queue()
        """The prompt that waits for an answer, if any."""
        self._answer: asyncio.Future[Sampled] | None = None

    def say(self, tokens: Sequence[int], finish_reason: str) -> None:
        """Answer the prompt.

        Raises:
            RolloutEnded: none waits for an answer.
        """
        if self._answer is None or self._answer.done():
            raise RolloutEnded("no prompt waits for an answer", hint="make one step after the other")
        # The caller keeps the logprobs. What stands in their place here goes nowhere: see `_Played`.
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
        """Return what the caller answers to the prompt."""
        self._answer = asyncio.get_running_loop().create_future()
        self.prompts.put_nowait(list(prompt))
        return await self._answer


class _Played:
    """The exact agent, without its tokens in the record: their logprobs are the caller's."""

    name = "model"

    def __init__(self, agent: ExactAgent) -> None:
        self._agent = agent

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task with the caller's policy; see `Agent.run`."""
        result = await self._agent.run(task)
        result.managed_state = None
        return result

    async def aclose(self) -> None:
        """Do nothing: it holds nothing open."""


class PlayedRollout:
    """One rollout. Its coroutines may be used in any loop.

    Args:
        rollouts: the open run.
        item: the task.
        group: rollouts of one group get slots of one sandbox where they fit.
    """

    def __init__(self, rollouts: OpenRun, item: Item, group: str) -> None:
        self._run = rollouts
        self._item, self._group = item, group
        self._player = Player(rollouts.agent.settings)
        self._rolling: asyncio.Task[Any] | None = None

    async def begin(self) -> list[int] | None:
        """Begin, and return the first prompt; None if the rollout ended without one."""
        return await self._run.run(self._begin())

    async def step(self, tokens: Sequence[int], finish_reason: str) -> list[int] | None:
        """Answer the prompt, and return the next one; None if the rollout has ended.

        Args:
            finish_reason: `stop`, or `length` if the answer was cut.
        """
        return await self._run.run(self._step(tokens, finish_reason))

    async def aclose(self) -> None:
        """End the rollout as cancelled, unless it has ended; the slot is released. Idempotent."""
        await self._run.run(self._end())

    def record(self) -> Record:
        """Return the record of the rollout, which has ended and was scored.

        Raises:
            InfraError, SetupFailed, ModelError, VerifierError, RolloutEnded: it failed, so there is no reward.
        """
        rolled = self._rolled()
        if rolled.mask_sample:
            raise _ERRORS.get(rolled.failure_kind or "", RolloutEnded)(
                rolled.failure_reason or "", hint="it has no reward; begin another rollout"
            )
        return rolled.record

    def _rolled(self) -> Rolled:
        assert self._rolling is not None  # it has begun
        group = self._rolling.result()
        (rolled,) = group.kept or group.failed
        assert isinstance(rolled, Rolled)
        return rolled

    async def _begin(self) -> list[int] | None:
        played = _Played(self._run.agent.on(self._player))
        work = (await self._run.roller()).roll_one(self._item, agent=played, group_id=self._group)
        self._rolling = await self._run.start(work, f"a rollout of {self._group}")
        return await self._next(self._rolling)

    async def _step(self, tokens: Sequence[int], finish_reason: str) -> list[int] | None:
        assert self._rolling is not None  # it has begun
        if not self._rolling.done():
            self._player.say(tokens, finish_reason)
        return await self._next(self._rolling)

    async def _next(self, rolling: asyncio.Task[Any]) -> list[int] | None:
        asked = asyncio.ensure_future(self._player.prompts.get())
        try:
            await asyncio.wait([rolling, asked], return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    async def _end(self) -> None:
        if self._rolling is not None and not self._rolling.done():
            self._rolling.cancel()
            await asyncio.wait([self._rolling])


class OpenRun(DrivenRun):
    """The run that the rollouts of a process share.

    Raises:
        HermesError: it can't be opened, as `open_session` says.
    """

    def __init__(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any],
        options: RunOptions,
    ) -> None:
        super().__init__(environment, env, None, options)
        self.agent: ExactAgent
        self.ends: list[int]
        """The tokens that end an answer."""
        try:
            self.call(self._open_agent(agent))
        except BaseException:
            self.close()
            raise

    async def _open_agent(self, agent: Mapping[str, Any]) -> None:
        session = self.session
        if agent.get("name", "model") != "model":
            raise UsageError(
                "a program can't be played step by step: it may ask several things at once, and what is not its own "
                "conversation would be trained on",
                hint="use TinkerRun",
            )
        settings: Any
        settings, _ = await self.model(session.runtime, agent)
        self.agent = await open_exact_agent(
            settings,
            parsers_with(session.runtime, settings.tool_call_parser),
            tools=bool(session.tools.names()),
            system=bool(session.environment.config.system_prompt),
            server=partial(self._nobody, settings),
        )
        await self.context()

    def _nobody(self, settings: AgentSettings, chat: Chat) -> Player:
        self.ends = sorted(chat.end_tokens)
        return Player(settings)


class Rollouts:
    """What an `OpenRun` is opened with, once in each process that has it or a copy of it.

    Args:
        environment: its name, or an instance.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent `model`: `tokenizer_name`, `max_token_length`, `max_turns`, …
        options: options of the run (`RunOptions`), without `infra_retries`: the caller has seen what a rollout that is
            restarted would forget.

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
        checked = validated(RunOptions, {**options, "infra_retries": 0}, "the options of the run")
        self.key = uuid.uuid4().hex
        self.name = environment if isinstance(environment, str) else environment.name
        self._given = (environment, env, agent or {}, checked)
        self._opening = threading.Lock()
        self._run: OpenRun | None = None
        _known[self.key] = self

    @property
    def run(self) -> OpenRun:
        """Return the open run of this process; the first use opens it. Blocks.

        Raises:
            HermesError: it can't be opened.
        """
        with self._opening:
            if self._run is None:
                self._run = OpenRun(*self._given)
            return self._run

    def close(self) -> None:
        """End the rollouts and the sandboxes of this process. Idempotent. It also happens when the program ends."""
        if self._run is not None:
            self._run.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy, (self.key, self._given)


_known: weakref.WeakValueDictionary[str, Rollouts] = weakref.WeakValueDictionary()
"""By key: copies of one object share the run of their process."""


def _copy(key: str, given: tuple[Any, ...]) -> Rollouts:
    """Return the object with this key, made anew if this process has none."""
    found = _known.get(key)
    if found is None:
        found = Rollouts.__new__(Rollouts)
        found.key, found._given, found._opening, found._run = key, given, threading.Lock(), None
        found.name = given[0] if isinstance(given[0], str) else given[0].name
        _known[key] = found
    return found
