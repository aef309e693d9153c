"""The environment `verifiers`: tasks of a taskset, for agents of hermes-rl in slots, scored by the tasks' rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from hermes_core import (
    AgentResult,
    CommandError,
    DatasetError,
    Environment,
    EnvironmentConfig,
    Item,
    RolloutHandle,
    SlotCommands,
    VerifierError,
    hookimpl,
)
from hermes_verifiers.versions import VERIFIERS

with VERIFIERS.imports():
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.dialects.chat import message_to_wire, parse_message
    from verifiers.v1.errors import SandboxError
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.rollout import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.utils.decorators import discover_decorated, invoke
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

ELSEWHERE = "run it with vf-eval"

OUTPUT_LIMIT = 16 << 20
"""Maximum number of bytes of a command's output, and of one part of a file that is read."""


class VerifiersConfig(EnvironmentConfig):
    """The settings of `verifiers`."""

    taskset: str
    """The id of the taskset: an importable module, or one that comes with verifiers."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The settings of the taskset."""
    use_images: bool = False
    """Whether sandboxes use the image and the directory that a task names, instead of the profile's. This needs a
    backend with images."""


class SlotRuntime(vf.Runtime):
    """A rollout's slot as the runtime of a task. A lost sandbox raises `InfraError`, which ends the rollout."""

    def __init__(self, commands: SlotCommands) -> None:
        super().__init__()
        self.config = vf.SubprocessConfig()
        self._commands = commands

    async def start(self) -> None:
        """Do nothing, because the slot is already leased."""

    async def run(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        """Run a command in the slot's directory."""
        try:
            result = await self._commands.run(argv, env=self.process_env(env), output_limit=OUTPUT_LIMIT)
        except CommandError as error:  # a shell would return the same statuses
            return vf.ProgramResult(127 if error.code == "not_found" else 126, "", error.message)
        return vf.ProgramResult(result.returncode, result.text, result.error_text)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        data = b""
        while max_bytes is None or len(data) < max_bytes:
            limit = OUTPUT_LIMIT if max_bytes is None else min(OUTPUT_LIMIT, max_bytes - len(data))
            try:
                part = await self._commands.read_file(path, offset=len(data), limit=limit)
            except CommandError as error:
                raise SandboxError(f"read {path!r}: {error.message}") from error
            data += part.data
            if not part.data or len(data) >= part.size:
                break
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and make its directories."""
        try:
            await self._commands.write_file(path, data)
        except CommandError as error:
            raise SandboxError(f"write {path!r}: {error.message}") from error


class VerifiersEnvironment(Environment):
    """A taskset of verifiers, for agents and tools of hermes-rl. A task's hooks and rewards get the agent's slot as
    their runtime."""

    name = "verifiers"
    config_class = VerifiersConfig
    config: VerifiersConfig

    def __init__(self, config: VerifiersConfig) -> None:
        super().__init__(config)
        self.item_images = config.use_images
        self._tasks: dict[str, vf.Task] = {}
        self._items: Sequence[Item] = ()

    async def setup(self) -> None:
        """Load the taskset, and check that its tasks can be run here.

        Raises:
            DatasetError: the taskset can't be loaded, or needs something that only verifiers has.
        """
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        name = self.config.taskset
        try:
            config = taskset_config_type(name).model_validate({**self.config.settings, "id": name})
            taskset = load_taskset(config)
            unfit = "never ends" if not taskset.bounded else None
            if taskset.toolsets(config):
                unfit = "has tool servers of its own"
            tasks = [] if unfit else list(taskset)
        except Exception as error:  # the taskset's own code runs
            raise DatasetError(f"the taskset {name!r} can't be loaded: {error}") from error
        if unfit is not None:
            raise DatasetError(f"the taskset {name!r} {unfit}", hint=ELSEWHERE)
        for task in tasks:
            key = str(task.data.id or task.data.name or task.key)
            if key in self._tasks:
                raise DatasetError(f"two tasks of {name!r} have the id {key!r}", hint="give each one of its own")
            for reason in _unfit(task):
                raise DatasetError(f"the task {key!r} of {name!r} {reason}", hint=ELSEWHERE)
            self._tasks[key] = task
        if not self._tasks:
            raise DatasetError(f"the taskset {name!r} has no tasks")
        self._items = [{**task.data.model_dump(mode="json"), "id": key} for key, task in self._tasks.items()]

    def items(self) -> Sequence[Item]:
        """Return the tasks' data, in the taskset's order."""
        return self._items

    def format_prompt(self, item: Item) -> str:
        """Return the text of the prompt."""
        return str(self._tasks[item["id"]].data.prompt_text)

    def initial_messages(self, item: Item) -> list[dict[str, Any]]:
        """Return the task's conversation. Its system prompt takes the place of the configuration's."""
        data = self._tasks[item["id"]].data
        system = data.system_prompt or self.config.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(data.prompt, str):
            return [*messages, {"role": "user", "content": data.prompt}]
        return [*messages, *(message_to_wire(message) for message in data.prompt)]

    def image(self, item: Item) -> str | None:
        """Return the task's image, if `use_images` is set."""
        image: str | None = self._tasks[item["id"]].data.image
        return image if self.config.use_images else None

    def cwd(self, item: Item) -> str | None:
        """Return the task's directory, if `use_images` is set."""
        workdir: str | None = self._tasks[item["id"]].data.workdir
        return workdir if self.config.use_images else None

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> dict[str, Any]:
        """Set up the task in the slot. Return the trace, with the task's state, as metadata for the verification."""
        task = self._tasks[item["id"]]
        trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=AgentConfig(runtime=vf.SubprocessConfig())),
        )
        await invoke(task.setup, {"trace": trace, "runtime": SlotRuntime(rollout.commands)})
        return {"trace": trace}

    @hookimpl
    async def verify_and_score_trajectory(
        self, item: Item, result: AgentResult, workspace_meta: Mapping[str, Any], rollout: RolloutHandle
    ) -> tuple[float, dict[str, Any]]:
        """Finalize the task, and sum its weighted rewards."""
        task, trace, runtime = self._tasks[item["id"]], workspace_meta["trace"], SlotRuntime(rollout.commands)
        trace.nodes = list(_nodes(result.messages, prompt_length=len(self.initial_messages(item))))
        trace.stop_condition = str(result.stop_reason)
        await invoke(task.finalize, {"trace": trace, "runtime": runtime})
        await task.score(trace, runtime)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards or not math.isfinite(trace.reward):
            raise VerifierError(f"the task gives no reward: {', '.join(missing) or trace.rewards or 'it has none'}")
        rewards = {name: reward.value for name, reward in trace.rewards.items()}
        return trace.reward, {"rewards": rewards, "metrics": dict(trace.metrics)}


def _unfit(task: vf.Task) -> Iterator[str]:
    """Yield each reason why agents of hermes-rl can't work on a task."""
    data = task.data
    for unfit, reason in (
        (type(task).toolsets(task.config), "has tool servers of its own"),
        (data.prompt is None, "lets a user open the conversation"),
        (discover_decorated(task, "intercept") or task.hooks("stop"), "has hooks on the model's requests or answers"),
        (task.config.judges, "is scored by judges, which are models of verifiers"),
        (task.runtime_env(), "sets environment variables of the agent"),
        (data.agent_user, "names a user for the agent"),
        (data.skills, "has skills"),
        (data.artifacts or type(task).stage_verifier is not vf.Task.stage_verifier, "is scored in another box"),
        (data.network_block or data.network_allow != ["*"], "has rules for the network"),
    ):
        if unfit:
            yield reason


def _nodes(messages: Sequence[Mapping[str, Any]], prompt_length: int) -> Iterator[MessageNode]:
    """Yield a conversation as nodes of a trace. The first `prompt_length` messages are the prompt."""
    for number, message in enumerate(messages):
        yield MessageNode(
            parent=number - 1 if number else None,
            message=parse_message(dict(message)),
            sampled=number >= prompt_length and message["role"] == "assistant",
        )
