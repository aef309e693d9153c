"""OpenEnv's resource sessions. Each is one rollout, in a slot of a running sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Self

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult

from hermes_core import (
    AdaptedPackage,
    ConfigError,
    DrivenRollout,
    Environment,
    Rolled,
    RolloutEnded,
    RunOptions,
    TokenSequence,
    TrainerRun,
    open_trainer_session,
    validate_data,
)

OPENENV = AdaptedPackage("hermes-rl-openenv", "openenv", "0.10.0")

ITEM = "item_id"
"""The field of a task, or of a prompt's last message, with the item's id."""


class HermesSessionFactory(ResourceSessionFactory[ResourceSession]):
    """Makes the sessions of an environment of hermes-rl.

        with HermesSessionFactory("swe-smith", backend="docker", env={"dataset_name": "tasks.jsonl"}) as factory:
            session = factory.create(factory.item_ids[0])

    Args:
        environment: its name, or an instance.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent `model`, whose rollouts are token-exact: `base_url`, `tokenizer_name`, … Then the
            sessions are `HermesTrainableSession`. Without `agent`, the caller runs the model, and the sessions are
            `HermesSession`.
        options: options of the run (`RunOptions`): `backend`, `isolation`, `rollout_timeout`, … `concurrency` is the
            number of sessions at the same time.

    Raises:
        HermesError: an option is wrong, or the run can't be opened.
    """

    def __init__(
        self,
        environment: str | Environment,
        *,
        env: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        OPENENV.check()
        run_options = validate_data(RunOptions, options, "the options of HermesSessionFactory")
        self.run = TrainerRun(
            partial(open_trainer_session, environment, run_options, env=env, agent=agent),
            exact=agent is not None,
            more_room="close the sessions that are done, or raise concurrency of HermesSessionFactory",
        ).start()

    @property
    def item_ids(self) -> list[str]:
        """Return the ids of all items. Each is a task for `create`."""
        return list(self.run.items)

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> ResourceSession:
        """Begin a rollout of a task in a fresh slot.

        After a failure to begin, tool calls are answered with an error, and `verify` gives no reward.

        Args:
            task: an item's id; or a mapping with the id under `item_id`; or a prompt whose last message is such a
                mapping.
            seed: ignored; the caller, or the agent's settings, decide how the model samples.
            episode_id: ignored; the rollout's own id is in the artifacts of `verify`.

        Raises:
            ConfigError, UnknownNameError: the task names no item of the environment.
            UsageError, PolicyError: no slot can be had with these settings.
        """
        item_id = _item_id(task)
        self.run.item(item_id)
        if self.run.exact:
            return HermesTrainableSession(self.run, item_id)
        return HermesSession(self.run, item_id)

    def close(self) -> None:
        """End the rollouts and the sandboxes. Idempotent. Called also when the program ends."""
        self.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HermesSession(ResourceSession):
    """A rollout whose model the caller runs, for example `MCPHarnessAdapter`."""

    def __init__(self, run: TrainerRun, item_id: str) -> None:
        self._run = run
        self._item_id = item_id
        self._rollout: DrivenRollout = run.call(run.begin(item_id))
        self._verified: VerifyResult | None = None

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return the prompt of the item."""
        return [dict(each) for each in self._run.session.environment.initial_messages(self._run.item(self._item_id))]

    def list_tools(self) -> list[Tool]:
        """Return the tools of the rollout."""
        functions = (schema["function"] for schema in self._rollout.tool_schemas)
        return [Tool(name=f["name"], description=f["description"], input_schema=f["parameters"]) for f in functions]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run a tool call of the model.

        Returns:
            The answer as text, because OpenEnv would take a key `reward` of a mapping for the environment's reward.
            Once the rollout has ended, for example at its time limit, `done` is set and `error` gives the reason.
        """
        try:
            return ToolResult(data=self._run.call(self._rollout.call(name, arguments)))
        except RolloutEnded as error:
            return ToolResult(data=str(error), done=True, error=str(error))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """End the rollout and verify its work. Later calls return the first result.

        Returns:
            The reward, or None if the rollout failed; OpenEnv does not train on None. The metrics have `failure_kind`
            and `failure_reason`, the artifacts the record.
        """
        if self._verified is None:
            texts = (each.get("content") for each in reversed(transcript) if each.get("role") == "assistant")
            text = next(texts, "")
            ending = [(self._rollout, text if isinstance(text, str) else "")]
            self._verified = _verify_result(Rolled.of(self._run.call(self._run.end(ending))[0], exact=False))
        return self._verified

    def close(self) -> None:
        """End the rollout, if it was not verified, and release its slot. Idempotent."""
        if not self._run.closed:
            self._run.call(self._run.drop(self._rollout))


class HermesTrainableSession(ResourceSession):
    """A rollout of the agent `model`, which begins at once, needs no calls of OpenEnv, and keeps its tokens."""

    def __init__(self, run: TrainerRun, item_id: str) -> None:
        self._run = run
        self._rolling = run.call(run.spawn(run.roll_one(item_id), f"the rollout of {item_id}"))

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return an empty list, because the agent makes its own prompt."""
        return []

    def list_tools(self) -> list[Tool]:
        """Return an empty list, because the agent calls its tools itself."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Refuse the call, because the agent calls its tools itself.

        Raises:
            KeyError: always; OpenEnv's bridge expects this error for an unknown tool.
        """
        raise KeyError(f"Unknown tool: {name}")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait until the rollout is verified. Return 0 if it can be trained on, and 1 if not.

        Raises:
            TimeoutError: the rollout is still running after `timeout_s` seconds.
            HermesError: the run can't go on, for example because the model's endpoint is gone.
        """
        return int(self._wait(timeout_s).mask_sample)

    def fetch_training_trace(self) -> TrainingTrace:
        """Wait for the rollout, and return a turn for each answer of the model, with the tokens that were sampled.

        A rollout that failed has no turns.
        """
        rolled = self._wait()
        turns = enumerate(turn for each in rolled.sequences for turn in _turns(each))
        name = rolled.record.trajectory_id
        return TrainingTrace.model_validate({"turns": [{"node_id": f"{name}/{n}", **turn} for n, turn in turns]})

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """Wait for the rollout, and return its reward as `HermesSession.verify` does."""
        return _verify_result(self._wait())

    def close(self) -> None:
        """Cancel the rollout, if it still runs. Idempotent."""
        if not self._run.closed:
            self._run.call(_cancel(self._rolling))

    def _wait(self, timeout_s: float | None = None) -> Rolled:
        return self._run.call(_outcome(self._rolling, timeout_s))


async def _outcome(rolling: asyncio.Task[Rolled], timeout_s: float | None) -> Rolled:
    return await asyncio.wait_for(asyncio.shield(rolling), timeout_s)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _verify_result(rolled: Rolled) -> VerifyResult:
    record = rolled.record
    metrics = {**rolled.labels, "turns": len(record.turns), "stop_reason": record.stop_reason}
    artifacts = {"trajectory_id": record.trajectory_id, "record": record.to_json()}
    return VerifyResult(env_reward=rolled.reward, done=True, metrics=metrics, artifacts=artifacts)


def _turns(sequence: TokenSequence) -> Iterator[dict[str, Any]]:
    """Yield each answer of the model in a sequence; all tokens before an answer are its prompt."""
    tokens, end = sequence.tokens.tolist(), 0
    for sampled, part in groupby(sequence.own):
        begin, end = end, end + len([*part])
        if sampled:
            yield {
                "prompt_token_ids": tokens[:begin],
                "completion_token_ids": tokens[begin:end],
                "per_token_logps": sequence.logprobs[begin:end].tolist(),
                "loss_mask": [0] * begin + [1] * (end - begin),
            }


def _item_id(task: Any) -> str:
    """Return the id of the item that a task names.

    Raises:
        ConfigError: the task names no item.
    """
    last = task[-1] if isinstance(task, Sequence) and not isinstance(task, str) and task else task
    item_id = last.get(ITEM) if isinstance(last, Mapping) else last
    if not isinstance(item_id, str):
        raise ConfigError(
            f"the task names no item: {str(task)[:100]}",
            hint=f"give an item's id, or a mapping that has it under {ITEM!r}",
        )
    return item_id
