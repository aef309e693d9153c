"""The three classes that verifiers wants: a Taskset, a Harness and an Env. The rollouts themselves are in `worker`."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig
from verifiers.v1.errors import HarnessError, RolloutError, SandboxError, TaskError

from hermes_core import ConfigError, FailureKind, HermesError, InfraError, Record, StopReason
from hermes_verifiers.worker import Worker, WorkerOptions

ERRORS: Mapping[FailureKind, type[RolloutError]] = {
    FailureKind.INFRA: SandboxError,
    FailureKind.IMAGE: TaskError,
    FailureKind.SETUP: TaskError,
    FailureKind.VERIFIER: TaskError,
}
"""The error of verifiers for each kind of failure. Other kinds become a `HarnessError`."""

DEFAULTS = {"temperature": None, "request_timeout_s": 3600.0}
"""Default settings of the agent. verifiers sets the temperature. A request that is repeated after a time limit would be
a second turn of the trace, so the limit is long."""


class HermesTasksetConfig(vf.TasksetConfig):
    """The environment, its configuration, and the options of the run."""

    environment: str = "tasks"
    """The environment's name."""
    env: dict[str, Any] = Field(default_factory=dict)
    """The environment's configuration."""
    run: WorkerOptions = WorkerOptions()
    """The options of the run: the backend, the isolation level, time limits, and so on."""

    @property
    def key(self) -> str:
        """Return the key of this configuration's worker, which is the same in every process."""
        configuration = self.model_dump_json(include={"environment", "env", "run"})
        return hashlib.sha256(configuration.encode()).hexdigest()[:16]


_workers: dict[str, Worker] = {}
"""The workers of this process by key. Tasks, harness and env look their worker up here, because verifiers makes each of
these objects separately."""


def worker_of(config: HermesTasksetConfig) -> Worker:
    """Return the worker of this configuration in this process."""
    return _workers.setdefault(config.key, Worker(config.environment, config.env, config.run))


class HermesData(vf.TaskData):
    """One item of the environment. Its id is `name`."""

    worker: str
    """The key of the item's worker."""


class HermesState(vf.State):
    """The part of a trace in which the harness leaves the reward for `HermesTask.reward`."""

    reward: float | None = None


class HermesTask(vf.Task[HermesData, HermesState]):
    """One item, which `HermesHarness.launch` sets up and scores."""

    @property
    def key(self) -> str:
        """Return the item's id, because a position would change when the dataset is shuffled or read in part."""
        item_id: str = self.data.name
        return item_id

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """Return the environment's score."""
        if trace.state.reward is None:
            raise TaskError("the rollout was not scored: only the harness of hermes_rl does that")
        reward: float = trace.state.reward
        return reward

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Return whether the reference solution scores 1.

        Raises:
            SandboxError, TaskError, HarnessError: as `HermesHarness.launch` says.
        """
        return (await roll_item(self.data, "oracle")).reward == 1.0


class HermesTaskset(vf.Taskset[HermesTask, HermesTasksetConfig]):
    """The items of an environment."""

    def load(self) -> Iterator[HermesTask]:
        """Read the dataset, and yield a task for each item.

        Raises:
            ConfigError: a system prompt is set for the taskset, which would have no effect.
            HermesError: as `Worker.prompts` says.
        """
        if self.system_prompt is not None:
            raise ConfigError(
                "the environment makes the prompt, and would not use --env.taskset.system_prompt",
                hint="set the setting `system_prompt` of the environment, in --env.taskset.env",
            )
        for item_id, messages in worker_of(self.config).prompts().items():
            texts = {message["role"]: message["content"] for message in messages}
            data = HermesData(
                name=item_id, prompt=texts["user"], system_prompt=texts.get("system"), worker=self.config.key
            )
            yield HermesTask(data, self.config.task)


class HermesHarnessConfig(vf.HarnessConfig):
    """The agent that works on the tasks."""

    agent: str = "model"
    """The name of an agent that uses an OpenAI-compatible endpoint."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The agent's settings, without the model, the endpoint and the key, which verifiers sets."""


class HermesHarness(vf.Harness[HermesHarnessConfig]):
    """Runs whole rollouts in this process. Commands run in slots, not in the runtime that verifiers offers."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_MCP = False
    SUPPORTS_RESUME = False

    async def launch(  # noqa: PLR0917 (as verifiers calls it)
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: HermesData,
    ) -> vf.ProgramResult:
        """Roll out the task once, and score it.

        Raises:
            SandboxError, TaskError, HarnessError: the rollout failed, so it has no reward.
        """
        settings = {**DEFAULTS, **self.config.settings, "model": ctx.model, "base_url": endpoint, "api_key": secret}
        record = await roll_item(data, self.config.agent, settings, trace)
        trace.state.reward = record.reward
        if record.stop_reason == StopReason.TIME_LIMIT:
            trace.record_timeout("agent")
        elif record.stop_reason != StopReason.FINISHED:
            trace.stop(str(record.stop_reason))
        return vf.ProgramResult(0, "", "")


async def roll_item(
    data: HermesData, agent: str, settings: Mapping[str, Any] | None = None, trace: vf.Trace | None = None
) -> Record:
    """Roll out an item, and return the record. Add its stop reason, timings and details to the trace's info.

    Raises:
        SandboxError, TaskError, HarnessError: the rollout failed, so it has no reward.
    """
    notes: dict[str, Any] = {}
    if trace is not None:
        trace.info["hermes"] = notes
    try:
        ended = await _workers[data.worker].roll(data.name, agent, settings)
    except HermesError as error:
        kind = FailureKind.INFRA if isinstance(error, InfraError) else FailureKind.MODEL
        notes |= {"mask_sample": True, "failure_kind": str(kind), "failure_reason": str(error)}
        raise _rollout_error(kind, "start", str(error)) from error
    record = ended.record
    notes |= {
        **ended.notes,
        "stop_reason": record.stop_reason,
        "timings": dict(record.timings),
        "details": dict(record.details),
    }
    if record.failure is not None:
        raise _rollout_error(record.failure.kind, record.failure.stage, record.failure.message)
    return record


def _rollout_error(kind: FailureKind, stage: str, reason: str) -> RolloutError:
    """Return the error for a failure of this kind."""
    return ERRORS.get(kind, HarnessError)(f"{kind} ({stage}): {reason}")


class HermesEnvConfig(SingleAgentEnvConfig):
    """The configuration of an Env with one agent, whose runtime is a plain subprocess that is never used."""

    agent: AgentConfig = AgentConfig(runtime=vf.SubprocessConfig())


class HermesEnv(SingleAgentEnv, vf.Env[HermesEnvConfig]):
    """Keeps the run, with its sandboxes, open while verifiers serves."""

    def __init__(self, config: HermesEnvConfig) -> None:
        super().__init__(_with_our_time_limit(config))
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Open the run.

        Raises:
            HermesError: there is no such agent, or it has no such setting; or as `Worker.open` says.
        """
        async with AsyncExitStack() as opening:
            run = await opening.enter_async_context(worker_of(self.taskset.config).open())
            harness = self.config.agent.harness
            if isinstance(harness, HermesHarnessConfig):
                run.session.runtime.agent_settings({**DEFAULTS, **harness.settings}, harness.agent)
            self._open = opening.pop_all()

    async def stop(self) -> None:
        """End the sandboxes, unless a rollout still needs them."""
        await self._open.aclose()


def _with_our_time_limit(config: HermesEnvConfig) -> HermesEnvConfig:
    """Return the configuration with the agent's time limit moved to the run.

    At its own limit, a run stops the agent and scores its work. verifiers would cancel the whole rollout, and so the
    verification.
    """
    limit_s = config.agent.timeout.rollout
    if limit_s is None:
        return config
    timeout = config.agent.timeout.model_copy(update={"rollout": None})
    run = config.taskset.run.model_copy(update={"rollout_timeout": limit_s})
    ours: HermesEnvConfig = config.model_copy(
        update={
            "agent": config.agent.model_copy(update={"timeout": timeout}),
            "taskset": config.taskset.model_copy(update={"run": run}),
        }
    )
    return ours
